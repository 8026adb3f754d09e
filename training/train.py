"""The trainer: build everything, then one loop of batch, step (or round), log, evaluate, save; nothing else happens.

    setup = build(config)                              # mesh, data, model, optimizer, compiled step
    outcome = train(setup, folder, resume=False)

Measurements stay on the device until a step is long done (_log.py), so that no step waits for the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
import scape_jax
from training import metrics, preflight, report, runs
from training._guard import Guard
from training._log import RunLog
from training._processes import from_first, is_first
from training._signals import StopSignals
from training._stop import CommonStop
from training._validation import bytes_so_far, record_validation, validate
from training._watchdog import Hang, Watchdog
from training.checkpoint import Checkpoints
from training.config import Config
from training.data import make_loader
from training.distributed import peers
from training.mesh import AXIS_NAME, WORKER_AXIS, make_mesh
from training.method import DataParallel, Method
from training.metrics import MetricsWriter, NoWriter
from training.optimizers import make_optimizer
from training.outer import make_round
from training.progress import Progress
from training.rounds import Rounds
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
    tx: Any  # the optimizer of every step, or the inner one of rounds
    step: Any  # scape_jax.TrainStep, or gasloc_jax.Round where the workers train in rounds

    @property
    def parameters(self) -> int:
        return models.num_params(self.model)

    @property
    def in_rounds(self) -> bool:
        return self.config.outer.name != "none"

    @functools.cached_property
    def method(self) -> Method:
        """What the loop drives; it holds what the host decides during a run, so each run has its own."""
        return Rounds(self) if self.in_rounds else DataParallel(self)

    @property
    def batch_axes(self) -> str | tuple[str, str]:
        """Over which a batch is spread that all devices work on together."""
        return (WORKER_AXIS, AXIS_NAME) if self.in_rounds else AXIS_NAME


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
    source: str = ""  # whose parameters a new run starts from; empty: fresh ones
    resized: str = ""  # what a resumed one had to change for another number of workers


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: its summary (in the first process), the exit code of the signal that stopped it, or what failed."""

    folder: Path
    step: int
    summary: dict[str, Any] | None
    exit_code: int
    failure: str | None = None


def build(config: Config) -> Setup:
    """Opens the data and makes mesh, schedule, optimizer and step; the devices must exist
    (mesh.prepare_devices).
    """
    preflight.check(config)
    model = config.model.build()
    in_rounds = config.outer.name != "none"
    mesh = make_mesh(config.mesh.data, islands=config.mesh.worker if in_rounds else None)
    schedule = make_schedule(config.schedule, config.run.steps)
    tx = make_optimizer(config, schedule, AXIS_NAME)
    step: Any
    if in_rounds:
        step = make_round(config, tx, mesh)
    else:
        step = scape_jax.make_train_step(
            models.loss_fn(model), tx, mesh, axis_name=AXIS_NAME, accumulate=config.data.accumulate
        )
    return Setup(config, model, mesh, preflight.open_data(config), schedule, tx, step)


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
        num_workers=config.mesh.devices,
        vocab_size=setup.model.vocab_size,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    params = models.init_params(setup.model, config.run.seed)
    params = jax.device_put(params, NamedSharding(setup.mesh, PartitionSpec()))
    source = ""
    if config.checkpoint.parameters_from:
        folder = Path(config.checkpoint.parameters_from)
        runs.load_config(folder)  # a clear error where this is no run
        with Checkpoints(folder) as checkpoints:
            step = checkpoints.newest_whole(print)
            params = checkpoints.restore_params(params, config, step)
            source = checkpoints.told_params(config, step)
    totals = {"bytes_sent": 0.0, "dense_bytes": 0.0, "secs": 0.0}
    return State(0, *setup.method.begin(params), loader, totals, source)


def restore(setup: Setup, checkpoints: Checkpoints, note: Callable[[str], Any] = print) -> State:
    """The state of the newest whole checkpoint; one that does not fit is refused before anything is allocated."""
    like, resize = abstract_state(setup), setup.method.resize
    step = checkpoints.newest_whole(note)
    checkpoints.check(*like, setup.config, step, resize)
    fresh = start(dataclasses.replace(setup, config=_without_source(setup.config)))
    fresh.params = fresh.opt_state = None  # free their memory before the saved ones are read
    found = checkpoints.restore(*like, setup.config, step, resize)
    checkpoints.set_aside(after=step)
    fresh.loader.set_state(found.data_state)
    setup.method.set_state(found.data_state.get("method", {}))
    return State(
        found.step, found.params, found.opt_state, fresh.loader, dict(found.totals), resized=found.told
    )


def abstract_state(setup: Setup) -> tuple[Any, Any]:
    """Shapes and shardings of parameters and optimizer state."""
    return setup.method.abstract()


def _without_source(config: Config) -> Config:
    own = dataclasses.replace(config.checkpoint, parameters_from="", parameters_worker=None)
    return dataclasses.replace(config, checkpoint=own)


def train(setup: Setup, folder: Path, *, resume: bool = False, out: TextIO | None = None) -> Outcome:
    """Runs the steps that are left, leaving metrics, checkpoints, summary.json and report.html in `folder`.

    A first Ctrl-C or SIGTERM ends the loop after the current step or round, with a checkpoint; a second one ends
    the process, as does the first while the first step is compiled, since nothing is lost by that. Several processes call
    it alike, with one folder that all see: the first writes and prints, and a signal to any of them ends all after the same
    step. Where one is lost or hangs, all end with exit code 75. A run in which nothing was finite ends with exit code 1.
    """
    config, method, began = setup.config, setup.method, time.perf_counter()
    total, evaluate_every, save_every = config.run.steps, config.eval.every, config.checkpoint.every
    with contextlib.ExitStack() as stack:
        if not is_first():
            out = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(runs.held(folder))
        kept = {"keep": config.checkpoint.keep, "keep_every": config.checkpoint.keep_every}
        checkpoints = stack.enter_context(Checkpoints(folder, **kept))
        # A run that was stopped before its first checkpoint has nothing to go on from: it starts anew.
        told_first = functools.partial(print, file=out)
        going_on = resume and from_first(lambda: str(checkpoints.latest() or "")) != ""
        if resume and not going_on:
            told_first(f"no checkpoint in {checkpoints.folder}: starting anew")
        state = restore(setup, checkpoints, told_first) if going_on else start(setup)
        stack.callback(state.loader.close)
        if state.step > total:
            raise ValueError(
                f"run.steps must be at least the {state.step} steps that the run has taken, got {total}. "
                "Use a larger --run.steps to go on."
            )
        saved_summary = from_first(lambda: _text(folder / report.SUMMARY_FILE)) if state.step == total else ""
        if saved_summary:
            print(f"{folder} is finished at step {total}; a larger --run.steps goes on with it.", file=out)
            return Outcome(folder, total, json.loads(saved_summary) if is_first() else None, 0)
        earlier_secs = state.totals["secs"]
        if resume and is_first():
            # Only once the checkpoint was found to fit: some settings may be new.
            runs.save_config(config, folder)
        writer: MetricsWriter | NoWriter = NoWriter()
        if is_first():
            writer = stack.enter_context(
                MetricsWriter(folder, start_step=state.step, tensorboard=config.log.tensorboard)
            )
        progress = stack.enter_context(Progress(total, file=out))
        if setup.in_rounds:
            progress.local_steps = config.outer.steps_of_each(config.mesh.worker)
        signals = StopSignals(lambda number: told(number), lambda: progress.console.show_cursor(True))
        lines = peers()

        def leave(number: int) -> None:
            try:
                progress.note(f"stopped before the first {method.unit} was done: nothing is lost by that")
                progress.console.show_cursor(True)
                if lines is not None:
                    lines.close()
                    lines.let_others_end()
            finally:
                os._exit(128 + number)

        def told(number: int) -> None:
            progress.note(f"stopping after this {method.unit}; once more to leave at once, unsaved")
            stop.wish(number)

        stop = CommonStop(signals, lines, leave)
        hang = Hang(lines, lambda: stop.passed)
        watch = stack.enter_context(Watchdog(hang.report, least_secs=config.run.hang_secs))
        stack.enter_context(signals)

        def noted(text: str) -> None:
            watch.doing("compilation")  # what a method tells of is rare, and may take its time
            progress.note(text)

        method.check(state.step, noted)
        progress.note(startup_text(setup, folder, state))
        if state.resized:
            progress.note(state.resized)
        first_step = state.step
        log = RunLog(
            writer,
            progress,
            tokens_per_step=config.tokens_per_step,
            schedule=setup.schedule,
            start_step=first_step,
            in_flight=method.in_flight,
            collect=method.collect,
        )

        def here() -> bool:
            watch.doing("evaluation")
            return stop.here()

        guard = Guard(setup.mesh)
        too_many_skipped = lambda: 0 < config.run.most_skipped <= log.skipped_in_row  # noqa: E731
        stop.nothing_to_save(True)  # all that there is is on disk, or can be made again
        while state.step < total and not stop.here() and not too_many_skipped():
            before, steps = state.step, method.steps_ahead(state.step)
            watch.doing("step" if before > first_step else "first step")
            batch = method.read(state.loader, steps)
            if before == first_step:
                method.before_first(state.params, state.opt_state, batch, total - before)
            state.params, state.opt_state, measured = method.advance(
                state.params, state.opt_state, batch, steps
            )
            stop.nothing_to_save(False)
            state.step += steps
            sent = method.sent(state.step, steps)
            state.totals["bytes_sent"] += sent.total_bytes
            state.totals["dense_bytes"] += sent.dense_bytes
            log.add(state.step, measured)

            if _passed(config.log.every, before, state.step) or state.step == total:
                telemetry = method.telemetry(state.opt_state) if config.log.telemetry else {}
                log.line(state.step, {**bytes_so_far(state), **sent.line, **method.times(), **telemetry})
            if _passed(evaluate_every, before, state.step) and state.step < total:
                with log.pause():
                    watch.doing("evaluation")
                    result = validate(setup, state, config.eval.batches, here)
                    record_validation(setup, state, result, writer, progress)
            if _passed(config.run.compare_every, before, state.step):
                watch.doing("comparison")
                problem = guard.difference((state.params, state.opt_state))
                if problem:
                    raise ValueError(_unequal(problem, state.step, checkpoints))
            if _passed(save_every, before, state.step) and state.step < total:
                with log.pause():
                    watch.doing("checkpoint")
                    state.totals["secs"] = earlier_secs + time.perf_counter() - began
                    save(setup, state, checkpoints)

        log.flush()
        watch.doing("checkpoint")
        state.totals["secs"] = earlier_secs + time.perf_counter() - began
        save(setup, state, checkpoints)
        checkpoints.wait()  # nothing is promised below that is not on disk
        watch.doing("evaluation")
        failure = method.failure(state.step, state.opt_state) if stop.received is None else None
        if failure is None and too_many_skipped():
            failure = (
                f"{log.skipped_in_row} {method.unit}s in a row had no finite gradient and were skipped (run.most_skipped). "
                f"What was trained is saved at step {state.step}. Use a smaller --schedule.learning_rate, and look at the "
                "data there."
            )
        if failure:
            return Outcome(folder, state.step, None, 1, failure)
        final = validate(setup, state, config.eval.final_batches, here) if stop.received is None else None
        if final is None:
            count = jax.process_count()
            where = f", in all {count} processes" if count > 1 else ""
            again = f"python scripts/pretrain.py --resume {folder}"
            progress.note(f"saved step {state.step}; to go on{where}: {again}")
            return Outcome(folder, state.step, None, stop.exit_code)
        record_validation(setup, state, final, writer, progress)
        state.totals["secs"] = earlier_secs + time.perf_counter() - began
    if not is_first():
        return Outcome(folder, state.step, None, 0)
    summary = summarise(setup, state, final, metrics.read(folder))
    (folder / report.SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    report.write_report(folder)
    return Outcome(folder, state.step, summary, 0)


def _unequal(problem: str, step: int, checkpoints: Checkpoints) -> str:
    saved = checkpoints.latest()
    back = "a new run" if saved is None else f"the checkpoint of step {saved}: --resume"
    return (
        f"devices must hold the same after step {step}, but {problem}. Nothing of that was saved. Look at that device's "
        f"health, leave its node out, and go on from {back}."
    )


def _text(path: Path) -> str:
    """What a file holds; empty where there is none."""
    return path.read_text() if path.exists() else ""


def _passed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]; 0: never."""
    return bool(every) and now // every > before // every


def save(setup: Setup, state: State, checkpoints: Checkpoints) -> None:
    """Starts writing the whole state."""
    checkpoints.save(
        state.step,
        state.params,
        state.opt_state,
        config=setup.config,
        data_state=state.loader.get_state() | {"method": setup.method.get_state()},
        totals=state.totals,
    )
