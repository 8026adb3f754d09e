"""Cells of a notebook that run on several processes of this machine at once: `%%workers`.

    %load_ext training.notebook
    from training import notebook
    group = notebook.start(4, bandwidth="100mbit")

    %%workers
    from jax.experimental import multihost_utils
    print(worker, multihost_utils.process_allgather(np.array(worker)))

A cell sees all that earlier cells of the same worker left, and from the start `jax`, `jnp`, `np`, `worker` and `workers`,
its number and their count; JAX is one group of all of them, with one CPU device each.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from training._cell_worker import decode
from training.launch import Cluster
from training.workers import Answers

__all__ = ["CellError", "CellWorkers", "load_ipython_extension", "start"]

_TIMEOUT_SECS = 300.0
_START_SECS = 120.0
_INTERRUPTS, _INTERRUPT_SECS = 3, 1.0
_SHOWN_LINES = 40
_running: CellWorkers | None = None


class CellError(RuntimeError):
    """A cell failed in a worker; the message holds its traceback and says which workers can go on."""

    def _render_traceback_(self) -> list[str]:
        """For IPython: the worker's traceback instead of this process's own."""
        return str(self).splitlines()


class CellWorkers:
    """Processes that run cells; a context manager, which ends them with the cluster.

    Args:
      cluster: where; nothing else may run there.
      timeout_secs: for a cell, unless `run` is given another.
      grace_secs: after an exception in one worker, what the others get to finish the cell, too.

    Raises:
      CellError: the workers did not start.
    """

    def __init__(self, cluster: Cluster, *, timeout_secs: float = _TIMEOUT_SECS, grace_secs: float = 5.0):
        self.cluster, self._timeout_secs, self._grace_secs = cluster, timeout_secs, grace_secs
        self._lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._found = Answers()
        self._number, self._ended = 0, ""
        try:
            cluster.start(
                [sys.executable, "-m", "training._cell_worker"],
                environment={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": _other_flags()},
                on_line=lambda worker, text: self._lines.put((worker, text)),
            )
            self._collect(_START_SECS, show=False)
        except BaseException:
            cluster.close()
            raise

    def run(self, source: str, timeout_secs: float | None = None) -> None:
        """Runs a cell in all workers at once; what they print appears with their number, as does a value in the last line.

        Raises:
          CellError: a worker raised, or did not finish in time, or died. Workers that wait for one that raised are
            interrupted; where they cannot be, inside a collective, all are ended. The message says which.
        """
        self._ask(self._timeout_secs if timeout_secs is None else timeout_secs, run=source)

    def fetch(self, expression: str) -> list[Any]:
        """Its value in each worker: arrays, numbers, strings, and lists and dicts of them. Of a global array each worker
        gives its own part. Tens of MB at most: it travels as text.

        Raises:
          CellError: as for `run`.
        """
        return [decode(answer["value"]) for answer in self._ask(self._timeout_secs, fetch=expression)]

    def close(self) -> None:
        """Ends all workers."""
        self._ended = self._ended or "they were closed"
        self.cluster.close()

    def __enter__(self) -> CellWorkers:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, timeout_secs: float, **command: str) -> list[dict[str, Any]]:
        if self._ended:
            raise ValueError(
                f"the workers must run, but {self._ended}. Start new ones: group = notebook.start(...)."
            )
        self._number += 1
        self.cluster.send(json.dumps({"number": self._number, **command}))
        return self._collect(timeout_secs)

    def _collect(self, timeout_secs: float, show: bool = True) -> list[dict[str, Any]]:
        """The answers of all workers, in their order; prints what comes meanwhile."""
        answers: dict[int, dict[str, Any]] = {}
        hidden: list[str] = []
        deadline, why = time.monotonic() + timeout_secs, f"within {timeout_secs:g} s"
        try:
            while len(answers) < self.cluster.workers and time.monotonic() < deadline:
                if self._take(answers, hidden, show) and deadline - time.monotonic() > self._grace_secs:
                    deadline = time.monotonic() + self._grace_secs
                    why = (
                        f"within {self._grace_secs:g} s after that, perhaps in a collective that waits for it"
                    )
        except KeyboardInterrupt:
            why = "before the interrupt"
        missing = sorted(set(range(self.cluster.workers)) - set(answers))
        parts = _tracebacks(answers)
        if missing:
            parts.append(f"{_named(missing)} did not finish {why}.")
            parts.append(self._interrupt(answers, hidden, show))
        if parts:
            raise CellError("\n".join(hidden[-_SHOWN_LINES:] + parts))
        return [answers[worker] for worker in range(self.cluster.workers)]

    def _take(self, answers: dict[int, dict[str, Any]], hidden: list[str], show: bool) -> bool:
        """Takes the next line, if one comes soon; whether it tells of an exception."""
        try:
            worker, line = self._lines.get(timeout=0.1)
        except queue.Empty:
            if self.cluster.failure:
                self.close()
                self._ended = f"{self.cluster.failure}, which ended all"
                told = [*hidden[-_SHOWN_LINES:], *_tracebacks(answers), f"{self._ended}."]
                raise CellError("\n".join(told)) from None
            return False
        text, found = self._found.take(worker, line)
        if text is not None:
            (print if show else hidden.append)(f"[{worker}] {text}")
        if found is None or found["number"] != self._number:  # of a cell that was interrupted
            return False
        answers[worker] = found
        return found["error"] is not None

    def _interrupt(self, answers: dict[int, dict[str, Any]], hidden: list[str], show: bool) -> str:
        """Interrupts who still runs, and ends all where that does not help; says which."""
        for _ in range(_INTERRUPTS):  # one may come while Python is in a callback, which swallows it
            self.cluster.signal(signal.SIGINT)
            deadline = time.monotonic() + _INTERRUPT_SECS
            while len(answers) < self.cluster.workers and time.monotonic() < deadline:
                self._take(answers, hidden, show)
        if len(answers) == self.cluster.workers:
            return "The cell was interrupted there; the workers run on, with all that they hold."
        self.close()
        self._ended = f"they were ended, since a cell was still running in {_named(_without(answers, self.cluster.workers))}"
        return "They could not be interrupted, so all workers were ended. Start new ones: group = notebook.start(...)."


def _other_flags() -> str:
    """XLA_FLAGS without a number of devices, which is the notebook's own."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in flags if "host_platform_device_count" not in flag)


def _without(answers: dict[int, Any], workers: int) -> list[int]:
    return [worker for worker in range(workers) if worker not in answers]


def _named(workers: Iterable[int]) -> str:
    names = [str(worker) for worker in workers]
    return f"worker {names[0]}" if len(names) == 1 else f"workers {', '.join(names)}"


def _tracebacks(answers: dict[int, dict[str, Any]]) -> list[str]:
    """Each exception once, with the numbers of the workers that raised it."""
    raised: defaultdict[str, list[int]] = defaultdict(list)
    for worker, answer in sorted(answers.items()):
        if answer["error"] is not None:
            raised[answer["error"]].append(worker)
    return [f"{_named(workers)} raised:\n{text}" for text, workers in raised.items()]


def start(
    workers: int = 4,
    *,
    timeout_secs: float = _TIMEOUT_SECS,
    **links: Any,
) -> CellWorkers:
    """Starts the workers of `%%workers`, in place of those that run, and prints what their links are.

    Args:
      workers: processes.
      timeout_secs: for a cell; `%%workers 900` gives one cell 900 s.
      **links: bandwidth, links, latency and loopback, as for `training.launch.Cluster`.

    Raises:
      ValueError: an argument does not fit. CellError: the workers did not start.
    """
    global _running
    if _running is not None:
        _running.close()
    cluster = Cluster(workers, **links)
    _running = CellWorkers(cluster, timeout_secs=timeout_secs)
    print(cluster.note)
    return _running


def load_ipython_extension(shell: Any) -> None:
    """Gives IPython the cell magic `%%workers`."""
    shell.register_magic_function(_workers_magic, "cell", "workers")


def _workers_magic(line: str, cell: str) -> None:
    """Runs the cell in every worker: %%workers [SECONDS]"""
    if _running is None:
        raise ValueError("workers must run before a cell does. Call training.notebook.start(4) first.")
    _running.run(cell, float(line) if line.strip() else None)
