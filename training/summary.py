"""A run in a few lines: what is about to start, and what came out."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import preflight
from training.evaluate import Evaluation
from training.progress import amount

if TYPE_CHECKING:
    from training.train import Setup, State


def startup_text(setup: Setup, folder: Path, step: int) -> str:
    """What is about to run, in a few aligned lines."""
    config, wire = setup.config, setup.step.wire_bytes(setup.config.run.steps)
    optimizer = config.optimizer.name + (
        f", density {config.optimizer.density:g}" if config.optimizer.is_sparse else ""
    )
    devices = f"{config.mesh.data} x {setup.mesh.devices.flat[0].device_kind}"
    dense = amount(wire.dense_total_bytes)
    sent = f"{amount(wire.total_bytes)} per worker and step, dense {dense}"
    if wire.total_bytes:
        sent += f" ({wire.dense_total_bytes / wire.total_bytes:.1f}x fewer)"
    rows = [
        ("run", f"{folder}" + (f", going on from step {step}" if step else "")),
        ("model", f"{config.model.preset}, {setup.parameters:,} parameters"),
        ("data", f"{len(setup.data.train):,} tokens of {setup.data.train.path}"),
        ("workers", devices),
        ("optimizer", optimizer),
        ("exchange", sent),
        ("batch", f"{config.tokens_per_step:,} tokens per step, {config.run.steps:,} steps"),
        ("memory", f"about {preflight.estimate_memory(config)}"),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in rows)


def summarise(setup: Setup, state: State, final: Evaluation, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a finished run; training loss is the mean over its last twentieth."""
    logged = [record for record in records if "loss_mean" in record]
    tail = [r["loss_mean"] for r in logged if r["step"] > 0.95 * state.step] or [logged[-1]["loss_mean"]]
    wire = setup.step.wire_bytes(state.step)
    return {
        "steps": state.step,
        "train_loss": statistics.fmean(tail),
        "validation_loss": final.loss,
        "perplexity": final.perplexity,
        "bits_per_byte": final.bits_per_token if setup.data.validation.tokenizer_name == "byte" else None,
        "tokens_per_sec": statistics.median(r["tokens_per_sec"] for r in logged),
        "secs": state.totals["secs"],
        "parameters": setup.parameters,
        "workers": setup.config.mesh.data,
        "bytes_per_step": wire.total_bytes,
        "dense_bytes_per_step": wire.dense_total_bytes,
        "bytes_sent_total": state.totals["bytes_sent"],
        "dense_bytes_total": state.totals["dense_bytes"],
        "skipped": logged[-1].get("skipped", 0),
    }
