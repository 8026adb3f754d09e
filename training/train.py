"""The trainer: build everything, then one loop of batch, step, log, evaluate, save; nothing else happens.

    setup = build(config)                              # mesh, data, model, optimizer, compiled step
    outcome = train(setup, folder, resume=False)

Measurements stay on the device until a step is long done (_log.py), so that no step waits for the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Any, TextIO

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
import scape_jax
from training import metrics, preflight, report, runs
from training._log import RunLog
from training._signals import StopSignals
from training.checkpoint import Checkpoints
from training.config import Config
from training.data import eval_batches, make_loader
from training.evaluate import Evaluation, evaluate, place
from training.mesh import AXIS_NAME, make_mesh
from training.metrics import MetricsWriter
from training.optimizers import make_optimizer
from training.progress import Progress, quantity
from training.schedules import Schedule, make_schedule
from training.summary import startup_text, summarise


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that is fixed before the first step."""

    config: Config
    model: models.Config
    mesh: Mesh
    data: preflight.Data
    schedule: Schedule
    step: Any  # scape_jax.TrainStep: (params, opt_state, batch) -> (params, opt_state, metrics)

    @property
    def parameters(self) -> int:
        return models.num_params(self.model)


@dataclasses.dataclass
class State:
    """What changes from step to step and goes into a checkpoint; `totals` counts over all attempts at the
    run.
    """

    step: int
    params: Any
    opt_state: Any
    loader: Any
    totals: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: its summary, or the exit code of the signal that stopped it."""

    folder: Path
    step: int
    summary: dict[str, Any] | None
    exit_code: int


def build(config: Config) -> Setup:
    """Opens the data and makes mesh, schedule, optimizer and step; the devices must exist
    (mesh.prepare_devices).
    """
    preflight.check(config)
    model = config.model.build()
    mesh = make_mesh(config.mesh.data)
    schedule = make_schedule(config.schedule, config.run.steps)
    step = scape_jax.make_train_step(
        models.loss_fn(model),
        make_optimizer(config, schedule, AXIS_NAME),
        mesh,
        axis_name=AXIS_NAME,
        accumulate=config.data.accumulate,
    )
    return Setup(config, model, mesh, preflight.open_data(config), schedule, step)


def start(setup: Setup) -> State:
    """The state before the first step. Raises ValueError where the workers' parameters differ or the data do
    not fit.
    """
    config = setup.config
    loader = make_loader(
        setup.data.train,
        global_batch=config.data.global_batch,
        length=config.data.length,
        seed=config.run.seed,
        num_workers=config.mesh.data,
        vocab_size=setup.model.vocab_size,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    params = models.init_params(setup.model, config.run.seed)
    params = jax.device_put(params, NamedSharding(setup.mesh, PartitionSpec()))
    if config.checkpoint.parameters_from:
        source = Path(config.checkpoint.parameters_from)
        runs.load_config(source)  # a clear error where this is no run
        with Checkpoints(source) as checkpoints:
            params = checkpoints.restore_params(params, config)
    totals = {"bytes_sent": 0.0, "dense_bytes": 0.0, "secs": 0.0}
    return State(0, params, setup.step.init(params), loader, totals)


def restore(setup: Setup, checkpoints: Checkpoints) -> State:
    """The state of the newest checkpoint; one that does not fit is refused before anything is allocated."""
    like = abstract_state(setup)
    checkpoints.check(*like, setup.config)
    fresh = start(dataclasses.replace(setup, config=_without_source(setup.config)))
    fresh.params = fresh.opt_state = None  # free their memory before the saved ones are read
    found = checkpoints.restore(*like, setup.config)
    fresh.loader.set_state(found.data_state)
    return State(found.step, found.params, found.opt_state, fresh.loader, dict(found.totals))


def abstract_state(setup: Setup) -> tuple[Any, Any]:
    """Shapes and shardings of parameters and optimizer state."""
    mesh, tx, replicated = setup.mesh, setup.step.tx, PartitionSpec()

    def init(specs: Any) -> Any:
        mapped = jax.shard_map(tx.init, mesh=mesh, in_specs=replicated, out_specs=specs, check_vma=False)
        return jax.eval_shape(mapped, params)

    def with_sharding(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    params = models.abstract_params(setup.model)
    specs = scape_jax.state_specs(init(replicated), AXIS_NAME)  # which leaves have an axis of workers
    opt_state = jax.tree.map(with_sharding, init(specs), specs)
    return jax.tree.map(lambda leaf: with_sharding(leaf, replicated), params), opt_state


def _without_source(config: Config) -> Config:
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, parameters_from=""))


def validate(setup: Setup, params: Any, batches: int, stop: StopSignals | None = None) -> Evaluation | None:
    """Loss on up to `batches` batches of held-out text (0: all of it); None if a signal came in between."""
    config = setup.config
    held_out = eval_batches(
        setup.data.validation,
        config.data.global_batch // config.data.accumulate,
        config.data.length,
        batches or None,
        num_workers=config.mesh.data,
        vocab_size=setup.model.vocab_size,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    should_stop = (lambda: stop.received is not None) if stop else (lambda: False)
    return evaluate(setup.model, params, held_out, setup.mesh, AXIS_NAME, should_stop=should_stop)


def train(setup: Setup, folder: Path, *, resume: bool = False, out: TextIO | None = None) -> Outcome:
    """Runs the steps that are left, leaving metrics, checkpoints, summary.json and report.html in `folder`.

    A first Ctrl-C or SIGTERM ends the loop after the current step, with a checkpoint; a second one ends the
    process.
    """
    config, began = setup.config, time.perf_counter()
    total, evaluate_every, save_every = config.run.steps, config.eval.every, config.checkpoint.every
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(folder, keep=config.checkpoint.keep))
        # A run that was stopped before its first checkpoint has nothing to go on from: it starts anew.
        going_on = resume and checkpoints.latest() is not None
        state = restore(setup, checkpoints) if going_on else start(setup)
        stack.callback(state.loader.close)
        if state.step > total:
            raise ValueError(
                f"run.steps must be at least the {state.step} steps that the run has taken, got {total}. "
                "Use a larger --run.steps to go on."
            )
        if state.step == total and (folder / report.SUMMARY_FILE).exists():
            print(f"{folder} is finished at step {total}; a larger --run.steps goes on with it.", file=out)
            return Outcome(folder, total, json.loads((folder / report.SUMMARY_FILE).read_text()), 0)
        earlier_secs = state.totals["secs"]
        if resume:
            runs.save_config(
                config, folder
            )  # only once the checkpoint was found to fit: some settings may be new
        writer = stack.enter_context(
            MetricsWriter(folder, start_step=state.step, tensorboard=config.log.tensorboard)
        )
        progress = stack.enter_context(Progress(total, file=out))
        stop = stack.enter_context(
            StopSignals(
                lambda number: progress.note("stopping after this step; once more to leave at once, unsaved"),
                lambda: progress.console.show_cursor(True),
            )
        )
        progress.note(startup_text(setup, folder, state.step))
        first_step = state.step
        log = RunLog(writer, progress, tokens_per_step=config.tokens_per_step, schedule=setup.schedule)

        while state.step < total and stop.received is None:
            batch = place(next(state.loader), setup.mesh, AXIS_NAME)
            if state.step == first_step:
                _compile_ahead(setup, state, batch, progress)
            state.params, state.opt_state, measured = setup.step(state.params, state.opt_state, batch)
            state.step += 1
            wire = setup.step.wire_bytes(state.step)
            state.totals["bytes_sent"] += wire.total_bytes
            state.totals["dense_bytes"] += wire.dense_total_bytes
            log.add(state.step, measured)

            if state.step % config.log.every == 0 or state.step == total:
                telemetry = setup.step.telemetry(state.opt_state) if config.log.telemetry else {}
                log.line(
                    state.step,
                    {**_bytes(state), "wire_bytes": wire.total_bytes, "density": wire.density, **telemetry},
                )
            if evaluate_every and state.step % evaluate_every == 0 and state.step < total:
                with log.pause():
                    result = validate(setup, state.params, config.eval.batches, stop)
                    _record_validation(setup, state, result, writer, progress)
            if save_every and state.step % save_every == 0 and state.step < total:
                with log.pause():
                    state.totals["secs"] = earlier_secs + time.perf_counter() - began
                    save(setup, state, checkpoints)

        log.flush()
        state.totals["secs"] = earlier_secs + time.perf_counter() - began
        save(setup, state, checkpoints)
        checkpoints.wait()  # nothing is promised below that is not on disk
        final = (
            validate(setup, state.params, config.eval.final_batches, stop) if stop.received is None else None
        )
        if final is None:
            progress.note(f"saved step {state.step}; to go on: python scripts/pretrain.py --resume {folder}")
            return Outcome(folder, state.step, None, stop.exit_code)
        _record_validation(setup, state, final, writer, progress)
        state.totals["secs"] = earlier_secs + time.perf_counter() - began
    summary = summarise(setup, state, final, metrics.read(folder))
    (folder / report.SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    report.write_report(folder)
    return Outcome(folder, state.step, summary, 0)


def _compile_ahead(setup: Setup, state: State, batch: Any, progress: Progress) -> None:
    """Says what the first step waits for; side by side, a second program costs no pause in the middle of the run."""
    two = setup.step.compile_ahead(
        state.params,
        state.opt_state,
        batch,
        steps=setup.config.run.steps - state.step,
        on_wait=lambda: progress.note("the density is final: waiting until its program is compiled ..."),
    )
    what = "two programs, for the first steps and for the final density" if two else "the step"
    progress.note(f"compiling {what} ...")


def _bytes(state: State) -> dict[str, float]:
    return {"bytes_sent_total": state.totals["bytes_sent"], "dense_bytes_total": state.totals["dense_bytes"]}


def _record_validation(
    setup: Setup, state: State, result: Evaluation | None, writer: MetricsWriter, progress: Progress
) -> None:
    if result is None:  # a signal cut it short: half an average is not a result
        return
    record = {"step": state.step, "validation_loss": result.loss, "validation_perplexity": result.perplexity}
    if setup.data.validation.tokenizer_name == "byte":
        record["bits_per_byte"] = result.bits_per_token
    writer.write({**record, **_bytes(state)})
    progress.note(f"step {state.step}  validation loss {result.loss:.4f} ({quantity(result.tokens)} tokens)")


def save(setup: Setup, state: State, checkpoints: Checkpoints) -> None:
    """Starts writing the whole state."""
    checkpoints.save(
        state.step,
        state.params,
        state.opt_state,
        config=setup.config,
        data_state=state.loader.get_state(),
        totals=state.totals,
    )
