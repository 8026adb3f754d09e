"""Follows the steps of a run without making them wait: measurements stay on the device until a step is done.

At most two steps are in flight (none where the method itself waits for each); the host waits for the oldest of
them only, notes when it was done, and writes its line if one is due. So a line appears two steps late, and its
tokens/s is the time between two completed steps, without the time spent in evaluations and checkpoints.
"""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from training.metrics import MetricsWriter, NoWriter
from training.progress import Progress
from training.schedules import Schedule


class RunLog:
    """Turns the measurements of steps into lines of metrics.jsonl and of the progress display."""

    def __init__(
        self,
        writer: MetricsWriter | NoWriter,
        progress: Progress,
        *,
        tokens_per_step: int,
        schedule: Schedule,
        start_step: int = 0,
        skipped: int = 0,
        in_flight: int = 2,  # enough to hide the host's work, few enough to stop quickly
        collect: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = jax.device_get,
    ):
        self._writer, self._progress, self._most_in_flight = writer, progress, in_flight
        self._collect = collect
        self._tokens_per_step, self._schedule = tokens_per_step, schedule
        self._in_flight: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()
        self._window: list[tuple[int, dict[str, Any]]] = []  # measurements of steps since the last `_count`
        self._counted: list[dict[str, Any]] = []  # collected ones, since the last line
        self._due: dict[int, dict[str, Any]] = {}
        self._paused_secs = 0.0
        self.skipped_in_row, self._skipped = 0, skipped  # as of the last line or pause
        self._sound_step = start_step  # the last one that was not skipped, as of then
        self.longest_skip = 0, start_step  # how many in a row, and the sound step before them
        self._began = time.perf_counter()
        # A completed step, when that was, and the tokens until then.
        self._start: tuple[int, float, int] = (start_step, self._began, 0)
        self._mark: tuple[int, float, int] | None = None
        self._done = self._start

    def add(self, step: int, measured: dict[str, Any]) -> None:
        """Takes what step number `step` (1-based) measured; waits for the step before the two before it.

        A round is added once, under the number of its last step, with the `tokens` and `updates` of its workers.
        """
        self._in_flight.append((step, measured))
        if self._mark is None:  # the first step of this process: what it waits for is the compiler
            self._complete_oldest()
            self._mark = self._done
            self._progress.note(
                f"first step after {self._done[1] - self._began:.1f} s, compilation included; a line's loss is the "
                "mean since the line before"
            )
        while len(self._in_flight) > self._most_in_flight:
            self._complete_oldest()

    def line(self, step: int, known: Mapping[str, Any]) -> None:
        """Asks for a line of the step just added; `known` may hold device arrays."""
        self._due[step] = dict(known)
        if step <= self._done[0]:
            self._write(step)

    def flush(self) -> None:
        """Waits for all steps and writes their lines."""
        while self._in_flight:
            self._complete_oldest()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """For work between steps that tokens/s shall not count; nothing is in flight meanwhile."""
        self.flush()
        self._count()
        began = time.perf_counter()
        yield
        self._paused_secs += time.perf_counter() - began

    def _complete_oldest(self) -> None:
        step, measured = self._in_flight.popleft()
        jax.block_until_ready(measured)
        tokens = measured.get("tokens", self._tokens_per_step)
        self._done = (step, time.perf_counter() - self._paused_secs, self._done[2] + tokens)
        self._window.append((step, measured))
        if step in self._due:
            self._write(step)

    def _count(self) -> None:
        """Collects the steps done so far, and counts those that were skipped; the same steps in all processes."""
        if not self._window:
            return
        numbers, measurements = zip(*self._window, strict=True)
        self._window = []
        window = self._collect(list(measurements))
        for number, measured in zip(numbers, window, strict=True):
            skipped = int(measured["skipped"])
            # In rounds one worker may have dropped its own, or only skipped steps: that says whether all have.
            if measured.pop("nothing_sound", skipped > self._skipped):
                self.skipped_in_row += 1
                self.longest_skip = max(self.longest_skip, (self.skipped_in_row, self._sound_step))
            else:
                self.skipped_in_row, self._sound_step = 0, number
            self._skipped = skipped
        self._counted += window

    def _write(self, step: int) -> None:
        self._count()
        known, window = jax.device_get(self._due.pop(step)), self._counted
        self._counted = []
        since = self._mark or self._start
        if since[0] == step:  # only the first step, compilation included
            since = self._start
        last = dict(window[-1])
        last.pop("tokens", None)
        record = {
            "step": step,
            "loss": last["loss"],
            "loss_mean": _mean_of_finite([float(measured["loss"]) for measured in window]),
            # The optimizer's count stands still in a skipped step; this step itself may be the latest one
            # skipped.
            "lr": self._schedule(int(last.pop("updates", step - int(last["skipped"]))) - 1),
            "tokens_per_sec": (self._done[2] - since[2]) / max(self._done[1] - since[1], 1e-9),
            **{name: value for name, value in last.items() if name != "loss"},
            **known,
        }
        record = {name: value.item() if hasattr(value, "item") else value for name, value in record.items()}
        self._mark = self._done
        self._writer.write(record)
        self._progress.update(record)


def _mean_of_finite(losses: list[float]) -> float:
    """Without the steps that were skipped; NaN where all were."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return math.fsum(finite) / len(finite) if finite else math.nan
