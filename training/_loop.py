"""The steps of one attempt at a run: batch, step or round, then log, evaluate, compare and save where these are due."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax

from training._guard import Guard
from training._log import RunLog
from training._processes import is_first
from training._signals import StopSignals
from training._stop import CommonStop
from training._validation import bytes_so_far, record_validation, validate
from training._watchdog import Hang, Watchdog
from training.checkpoint import Checkpoints
from training.distributed import peers
from training.evaluate import Evaluation
from training.metrics import MetricsWriter, NoWriter
from training.progress import Progress
from training.summary import startup_text

if TYPE_CHECKING:
    from training.train import Setup, State


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: its summary (in the first process), the exit code, and what failed."""

    folder: Path
    step: int
    summary: dict[str, Any] | None
    exit_code: int
    failure: str | None = None


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Too many steps or rounds in a row were skipped.

    Attributes:
      first_step: the first of them.
      rollbacks: how often the run has gone back before.
      data_state: position of the data after them.
      text: for the user.
    """

    first_step: int
    rollbacks: int
    data_state: dict[str, Any]
    text: str


def how_to_go_on(folder: Path) -> str:
    """For the user."""
    count = jax.process_count()
    where = f", in all {count} processes" if count > 1 else ""
    return f"to go on{where}: python scripts/pretrain.py --resume {folder}"


def watched(
    setup: Setup, folder: Path, progress: Progress, stack: contextlib.ExitStack
) -> tuple[CommonStop, Watchdog]:
    """What ends the run early: a signal to any process, and a watchdog; both as long as the stack is open.

    Until a first step is done there is nothing to save: all is on disk already, or can be made again.
    """
    unit, lines = setup.method.unit, peers()

    def leave(number: int) -> None:
        try:
            progress.note(
                f"stopped before the first {unit} was done: nothing is lost by that; {how_to_go_on(folder)}"
            )
            progress.console.show_cursor(True)
            if lines is not None:
                lines.close()
                lines.let_others_end()
        finally:
            os._exit(128 + number)

    def told(number: int) -> None:
        progress.note(f"stopping after this {unit}; once more to leave at once, unsaved")
        stop.wish(number)

    signals = StopSignals(told, lambda: progress.console.show_cursor(True))
    stop = CommonStop(signals, lines, leave)
    stop.nothing_to_save(True)
    hang = Hang(lines, lambda: stop.passed)
    watch = stack.enter_context(Watchdog(hang.report, least_secs=setup.config.run.hang_secs))
    stack.enter_context(signals)
    return stop, watch


class Loop:
    """From `state` on; every process has its own, and all call the same methods at the same steps. A context manager.

    began: time.perf_counter() of the attempt, to count the seconds of the run.
    """

    def __init__(
        self,
        setup: Setup,
        state: State,
        folder: Path,
        checkpoints: Checkpoints,
        progress: Progress,
        stop: CommonStop,
        watch: Watchdog,
        began: float,
    ):
        self._setup, self._config, self._method, self._state = setup, setup.config, setup.method, state
        self._folder, self._checkpoints, self._progress = folder, checkpoints, progress
        self._stop, self._watch = stop, watch
        self._began = began - state.totals["secs"]
        self._first_step = state.step
        self._guard = Guard(setup.mesh)
        self._stack = contextlib.ExitStack()
        self._writer: MetricsWriter | NoWriter
        self._log: RunLog

    def __enter__(self) -> Loop:
        config, state, method = self._config, self._state, self._method
        method.check(state.step, self._note)
        self._writer = NoWriter()
        if is_first():
            board = config.log.tensorboard
            self._writer = self._stack.enter_context(
                MetricsWriter(self._folder, start_step=state.step, tensorboard=board)
            )
        self._log = RunLog(
            self._writer,
            self._progress,
            tokens_per_step=config.tokens_per_step,
            schedule=self._setup.schedule,
            start_step=state.step,
            skipped=method.skipped(state.opt_state),
            in_flight=method.in_flight,
            collect=method.collect,
        )
        self._progress.note(startup_text(self._setup, self._folder, state))
        if state.told:
            self._progress.note(state.told)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _note(self, text: str) -> None:
        self._watch.doing("compilation")  # what a method tells of is rare, and may take its time
        self._progress.note(text)

    def steps(self) -> Trouble | None:
        """All that are left, or up to a signal or trouble."""
        config, state, stop = self._config, self._state, self._stop
        total, save_is_due = config.run.steps, False
        while state.step < total and not stop.here():
            trouble = self._trouble()
            if trouble is not None:
                return trouble
            before = state.step
            self._advance()
            self._log_line(before)
            if _passed(config.eval.every, before, state.step) and state.step < total:
                with self._log.pause():
                    self._record(self._validate(config.eval.batches))
            if _passed(config.run.compare_every, before, state.step):
                self._compare()
            save_is_due |= _passed(config.checkpoint.every, before, state.step)
            if save_is_due and state.step < total:
                with self._log.pause():
                    # While steps are skipped it would take the place of one from before.
                    if not self._log.skipped_in_row and self._trouble() is None:
                        self._save()
                        save_is_due = False
        self._log.flush()
        return self._trouble()

    def may_go_back(self, trouble: Trouble) -> bool:
        """Whether it has not done so too often, nobody wants to stop, and there is a whole checkpoint from before."""
        if trouble.rollbacks >= self._config.run.rollbacks or self._stop.received is not None:
            return False
        self._watch.doing("checkpoint")
        self._checkpoints.wait()
        self._checkpoints.look()
        try:
            self._checkpoints.newest_whole(self._progress.note, before=trouble.first_step)
        except ValueError:
            return False
        return True

    def end(self, trouble: Trouble | None) -> Outcome | Evaluation:
        """Saves, and evaluates a run that has taken all its steps."""
        state, stop, folder = self._state, self._stop, self._folder
        self._log.flush()
        self._save()
        self._checkpoints.wait()  # nothing is promised below that is not on disk
        self._watch.doing("evaluation")
        failure = self._method.failure(state.step, state.opt_state) if stop.received is None else None
        if failure is None and trouble is not None:
            failure = (
                f"{trouble.text} (run.most_skipped). What was trained is saved at step {state.step}. Use a smaller "
                "--schedule.learning_rate, look at the data there, or start a run that goes back by itself, by "
                "--run.rollbacks 3."
            )
        if failure:
            return Outcome(folder, state.step, None, 1, failure)
        final = self._validate(self._config.eval.final_batches) if stop.received is None else None
        if final is None:
            self._progress.note(f"saved step {state.step}; {how_to_go_on(folder)}")
            return Outcome(folder, state.step, None, stop.exit_code)
        self._record(final)
        self._count_secs()
        return final

    def _advance(self) -> None:
        """One step or round."""
        state, method = self._state, self._method
        before, steps = state.step, method.steps_ahead(state.step)
        is_first = before == self._first_step
        self._watch.doing("first step" if is_first else "step")
        batch = method.read(state.loader, steps)
        if is_first:
            method.before_first(state.params, state.opt_state, batch, self._config.run.steps - before)
        state.params, state.opt_state, measured = method.advance(state.params, state.opt_state, batch, steps)
        self._stop.nothing_to_save(False)
        state.step += steps
        self._log.add(state.step, measured)

    def _log_line(self, before: int) -> None:
        """Counts what was sent since step `before`, and asks for a line where one is due."""
        state, method = self._state, self._method
        sent = method.sent(state.step, state.step - before)
        state.totals["bytes_sent"] += sent.total_bytes
        state.totals["dense_bytes"] += sent.dense_bytes
        if _passed(self._config.log.every, before, state.step) or state.step == self._config.run.steps:
            telemetry = method.telemetry(state.opt_state) if self._config.log.telemetry else {}
            self._log.line(state.step, {**bytes_so_far(state), **sent.line, **method.times(), **telemetry})
            self._checkpoints.check_written()

    def _validate(self, batches: int) -> Evaluation | None:
        self._watch.doing("evaluation")
        return validate(self._setup, self._state, batches, self._here)

    def _record(self, result: Evaluation | None) -> None:
        record_validation(self._setup, self._state, result, self._writer, self._progress)

    def _here(self) -> bool:
        self._watch.doing("evaluation")
        return self._stop.here()

    def _compare(self) -> None:
        """Raises ValueError where devices that must hold the same do not."""
        self._watch.doing("comparison")
        problem = self._guard.difference((self._state.params, self._state.opt_state))
        if problem:
            saved = self._checkpoints.steps
            back = f"the checkpoint of step {saved[-1]}: --resume" if saved else "a new run"
            raise ValueError(
                f"devices must hold the same after step {self._state.step}, but {problem}. Nothing of that was saved. Look "
                f"at that device's health, leave its node out, and go on from {back}."
            )

    def _save(self) -> None:
        self._count_secs()
        self._watch.doing("checkpoint")
        save(self._setup, self._state, self._checkpoints)

    def _count_secs(self) -> None:
        self._state.totals["secs"] = time.perf_counter() - self._began

    def _trouble(self) -> Trouble | None:
        """Whether too many were skipped, as of the last line; the same in all processes."""
        (skipped, sound_step), most = self._log.longest_skip, self._config.run.most_skipped
        if not 0 < most <= skipped:
            return None
        text = (
            f"{skipped} {self._method.unit}s in a row were skipped, for a gradient that is not finite or a loss far above "
            "the usual one"
        )
        rollbacks = int(self._state.totals["rollbacks"])
        return Trouble(sound_step + 1, rollbacks, self._state.loader.get_state(), text)


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


def _passed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]; 0: never."""
    return bool(every) and now // every > before // every
