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
from training._loop import Loop, Outcome, Trouble, save, watched
from training._processes import from_first, is_first
from training._stop import CommonStop
from training._watchdog import Watchdog
from training.checkpoint import Checkpoints, NotWritten, not_written
from training.config import Config
from training.data import make_loader
from training.evaluate import Evaluation
from training.mesh import AXIS_NAME, WORKER_AXIS, make_mesh
from training.method import DataParallel, Method
from training.optimizers import make_optimizer
from training.outer import make_round
from training.progress import Progress
from training.rounds import Rounds
from training.schedules import Schedule, make_schedule
from training.summary import summarise
from training.token_file import replace_atomically

__all__ = [
    "NOT_WRITTEN",
    "Outcome",
    "Setup",
    "State",
    "abstract_state",
    "build",
    "restore",
    "save",
    "start",
    "train",
]

NOT_WRITTEN = 74  # exit code: EX_IOERR of sysexits.h


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
    told: str = (
        ""  # what was done to one that goes on: for another number of workers, or to get out of trouble
    )


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
    totals = {"bytes_sent": 0.0, "dense_bytes": 0.0, "secs": 0.0, "rollbacks": 0.0}
    return State(0, *setup.method.begin(params), loader, totals, source)


def restore(
    setup: Setup, checkpoints: Checkpoints, note: Callable[[str], Any] = print, back: Trouble | None = None
) -> State:
    """The state of the newest whole checkpoint; one that does not fit is refused before anything is allocated.

    back: the newest from before these steps, with the data from where they ended.
    """
    like, resize = abstract_state(setup), setup.method.resize
    step = checkpoints.newest_whole(note, before=None if back is None else back.first_step)
    checkpoints.check(*like, setup.config, step, resize)
    fresh = start(dataclasses.replace(setup, config=_without_source(setup.config)))
    fresh.params = fresh.opt_state = None  # free their memory before the saved ones are read
    found = checkpoints.restore(*like, setup.config, step, resize)
    fresh.loader.set_state(found.data_state if back is None else found.data_state | back.data_state)
    checkpoints.set_aside(after=step)
    setup.method.set_state(found.data_state.get("method", {}))
    totals = {"rollbacks": 0.0} | found.totals  # one of an earlier version does not count them
    told = found.told
    if back is not None:
        totals["rollbacks"] = back.rollbacks + 1
        left_out = back.data_state["step"] - found.data_state["step"]
        told = f"{back.text}: going back to step {step}, and on without the {left_out} batches since"
    return State(found.step, found.params, found.opt_state, fresh.loader, totals, told=told)


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
    step. Where one is lost or hangs, all end with exit code 75. Where the folder cannot be written, the run ends with exit
    code 74 and keeps the checkpoints that are whole; a run in which nothing was finite ends with exit code 1.

    After config.run.most_skipped skipped steps in a row the run ends too, or goes back, up to config.run.rollbacks times, to
    the last checkpoint before them, and on with the data after them.
    """
    config = setup.config
    with contextlib.ExitStack() as stack:
        if not is_first():
            out = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(runs.held(folder))
        progress = stack.enter_context(Progress(config.run.steps, file=out))
        if setup.in_rounds:
            progress.local_steps = config.outer.steps_of_each(config.mesh.worker)
        watching = watched(setup, folder, progress, stack)
        try:
            ended = _attempt(setup, folder, resume, progress, watching, None)
            while isinstance(ended, Trouble):
                ended = _attempt(setup, folder, True, progress, watching, ended)
        except NotWritten as error:
            return Outcome(folder, 0, None, NOT_WRITTEN, str(error))
    if isinstance(ended, Outcome):
        return ended
    if not is_first():
        return Outcome(folder, config.run.steps, None, 0)
    try:
        summary = summarise(setup, *ended, metrics.read(folder))
        with replace_atomically(folder / report.SUMMARY_FILE) as file:
            file.write((json.dumps(summary, indent=2) + "\n").encode())
        report.write_report(folder)
    except OSError as error:
        return Outcome(folder, 0, None, NOT_WRITTEN, str(not_written(folder, [config.run.steps], error)))
    return Outcome(folder, config.run.steps, summary, 0)


def _attempt(
    setup: Setup,
    folder: Path,
    resume: bool,
    progress: Progress,
    watching: tuple[CommonStop, Watchdog],
    back: Trouble | None,
) -> Outcome | Trouble | tuple[State, Evaluation]:
    """From the start, or a checkpoint, to an end, or to where the run has to go back."""
    config, began = setup.config, time.perf_counter()
    total = config.run.steps
    with contextlib.ExitStack() as stack:
        kept = {"keep": config.checkpoint.keep, "keep_every": config.checkpoint.keep_every}
        checkpoints = stack.enter_context(Checkpoints(folder, **kept, own=True))
        # A run that was stopped before its first checkpoint has nothing to go on from: it starts anew.
        going_on = resume and bool(checkpoints.steps)
        if resume and not going_on:
            progress.note(f"no checkpoint in {checkpoints.folder}: starting anew")
        state = restore(setup, checkpoints, progress.note, back) if going_on else start(setup)
        stack.callback(state.loader.close)
        if state.step > total:
            raise ValueError(
                f"run.steps must be at least the {state.step} steps that the run has taken, got {total}. "
                "Use a larger --run.steps to go on."
            )
        saved_summary = from_first(lambda: _text(folder / report.SUMMARY_FILE)) if state.step == total else ""
        if saved_summary:
            progress.note(f"{folder} is finished at step {total}; a larger --run.steps goes on with it.")
            return Outcome(folder, total, json.loads(saved_summary) if is_first() else None, 0)
        loop = Loop(setup, state, folder, checkpoints, progress, *watching, began)
        try:
            if resume and is_first():
                # Only once the checkpoint was found to fit: some settings may be new.
                runs.save_config(config, folder)
            stack.enter_context(loop)
            trouble = loop.steps()
            if trouble is not None and loop.may_go_back(trouble):
                state.params = state.opt_state = None  # free their memory before the saved ones are read
                return trouble
            ended = loop.end(trouble)
        except BrokenPipeError:  # of what reads the output
            raise
        except OSError as error:
            raise not_written(folder, checkpoints.steps, error) from error
    return ended if isinstance(ended, Outcome) else (state, ended)


def _text(path: Path) -> str:
    """What a file holds; empty where there is none."""
    return path.read_text() if path.exists() else ""
