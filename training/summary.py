"""A run in a few lines: what is about to start, and what came out."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
from training import preflight
from training.config import Config
from training.evaluate import Evaluation
from training.outer import growth_warning, make_outer
from training.progress import amount

_ROUNDS = (
    "local_steps", "local_secs", "exchange_secs", "sequences_left_out", "island_bytes_total", "skipped_steps",
)  # fmt: skip

if TYPE_CHECKING:
    from training.train import Setup, State


def startup_text(setup: Setup, folder: Path, state: State) -> str:
    """What is about to run, in a few aligned lines."""
    config, step = setup.config, state.step
    optimizer = config.optimizer.name + (
        f", density {config.optimizer.density:g}" if config.optimizer.is_sparse else ""
    )
    kind = setup.mesh.devices.flat[0].device_kind
    rows = [
        ("run", f"{folder}" + (f", going on from step {step}" if step else "")),
        ("model", f"{config.model.preset}, {setup.parameters:,} parameters"),
        *([("start", f"parameters of {state.source}")] if state.source else []),
        ("data", f"{len(setup.data.train):,} tokens of {setup.data.train.path}"),
    ]
    if setup.in_rounds:
        rows += _rounds(setup, kind, optimizer)
    else:
        wire = setup.step.wire_bytes(config.run.steps)
        sent = f"{amount(wire.total_bytes)} per worker and step, dense {amount(wire.dense_total_bytes)}"
        if wire.total_bytes:
            sent += f" ({wire.dense_total_bytes / wire.total_bytes:.1f}x fewer)"
        rows += [
            ("workers", f"{config.mesh.data} x {kind}"),
            ("optimizer", optimizer),
            ("exchange", sent),
        ]
    rows += [
        ("batch", f"{config.tokens_per_step:,} tokens per step, {config.run.steps:,} steps"),
        ("memory", f"about {preflight.estimate_memory(config)}"),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in rows)


def _rounds(setup: Setup, kind: str, optimizer: str) -> list[tuple[str, str]]:
    """The rows about islands, rounds and the outer optimizer."""
    config, outer = setup.config, setup.config.outer
    workers, data = config.mesh.worker, config.mesh.data
    params = models.abstract_params(setup.model)
    inner, steps = setup.tx.wire(params, num_workers=data, step=config.run.steps), outer.steps_per_round
    sent = f"{amount(inner.total_bytes)} per device and step" if data > 1 else "no exchange"
    whole = (
        f"{steps} steps a round"
        if isinstance(outer.local_steps, int)
        else f"{outer.local_steps} steps a round"
    )
    adapted = f", adapted from {outer.fewest_steps} to {steps}" if outer.adapt else ""
    rows = [
        ("workers", f"{workers} islands of {data} x {kind}"),
        ("inner", f"{optimizer}, {sent} inside an island"),
        ("outer", f"{outer.name}, {whole}{adapted}; {make_outer(config).describe(params, workers)}"),
    ]
    warnings = [growth_warning(config), _needless_mask(config)]
    rows += [("WARNING", warning) for warning in warnings if warning]
    if outer.fragments > 1:
        a_round = amount(setup.step.wire_bytes(params))
        rows.append(
            ("fragments", f"{outer.fragments}, of which a round sends one: {a_round} in place of the above")
        )
    if config.run.steps % steps:
        rows.append(
            ("last round", f"{config.run.steps % steps} steps, which are left after the whole rounds")
        )
    return rows


def _needless_mask(config: Config) -> str | None:
    """A sparse optimizer where there is nothing to send."""
    if config.mesh.data > 1 or not config.optimizer.is_sparse:
        return None
    return (
        f"in islands of one device nothing is sent inside, so {config.optimizer.name} holds entries back and saves no "
        "bytes. Use --optimizer.name adamw, or islands of more devices (--mesh.data)."
    )


def summarise(setup: Setup, state: State, final: Evaluation, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a finished run; training loss is the mean over its last twentieth."""
    logged = [record for record in records if "loss_mean" in record]
    tail = [r["loss_mean"] for r in logged if r["step"] > 0.95 * state.step] or [logged[-1]["loss_mean"]]
    sent = setup.method.sent_per_step(state.step)
    return {
        "steps": state.step,
        "train_loss": statistics.fmean(tail),
        "validation_loss": final.loss,
        "perplexity": final.perplexity,
        "bits_per_byte": final.bits_per_token if setup.data.validation.tokenizer_name == "byte" else None,
        "tokens_per_sec": statistics.median(r["tokens_per_sec"] for r in logged),
        "secs": state.totals["secs"],
        "parameters": setup.parameters,
        "workers": setup.config.mesh.devices,
        **_islands(setup.config),
        "bytes_per_step": sent.total_bytes,
        "dense_bytes_per_step": sent.dense_bytes,
        "bytes_sent_total": state.totals["bytes_sent"],
        "dense_bytes_total": state.totals["dense_bytes"],
        "skipped": logged[-1].get("skipped", 0),
        **final.disagreement,
        **{name: logged[-1][name] for name in _ROUNDS if name in logged[-1]},
    }


def _islands(config: Config) -> dict[str, Any]:
    """Of a run in rounds what the report compares the last one with."""
    if config.outer.name == "none":
        return {}
    mesh, outer = config.mesh, config.outer
    return {
        "islands": mesh.worker,
        "island_devices": mesh.data,
        "local_steps_set": outer.steps_of_each(mesh.worker),
    }
