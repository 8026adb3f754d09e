"""Talks with the processes of a Cluster: a command goes to all of them as a line of JSON, each answers with one.

    with Workers(Cluster(4, bandwidth="100mbit"), [sys.executable, "-m", "scripts._comm_worker"]) as workers:
        answers = workers.ask(prepare="adams")     # a dict of each worker

A worker reads commands from its standard input and answers by `answer`; other lines that it prints are kept for the error
that is raised where it ends without an answer.
"""

from __future__ import annotations

import collections
import contextlib
import json
import queue
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from training.launch import Cluster

_MARK, _MORE = "@answer ", "@answer-more "
_PART_CHARACTERS = 1 << 19  # the launcher cuts longer lines
_KEPT_LINES = 40


def commands() -> Iterator[dict[str, Any]]:
    """In a worker: the commands that it is given, until there are no more."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(**values: Any) -> None:
    """In a worker: answers the command it was given; values are plain JSON of any length."""
    text = json.dumps(values).replace("@", "\\u0040")  # so that no value looks like a mark
    while len(text) > _PART_CHARACTERS:
        print(f"{_MORE}{text[:_PART_CHARACTERS]}")
        text = text[_PART_CHARACTERS:]
    print(f"{_MARK}{text}", flush=True)


class Answers:
    """Finds the answers in the lines that workers print."""

    def __init__(self) -> None:
        self._parts: collections.defaultdict[int, str] = collections.defaultdict(str)

    def take(self, worker: int, line: str) -> tuple[str | None, dict[str, Any] | None]:
        """(what the worker printed, its answer) of a line, each None where the line holds none."""
        for mark in (_MORE, _MARK):
            text, found, part = line.partition(mark)
            if not found:
                continue
            if mark == _MORE:
                self._parts[worker] += part
                return text or None, None
            try:
                return text or None, json.loads(self._parts.pop(worker, "") + part)
            except json.JSONDecodeError:  # a worker that printed the mark itself
                break
        return line, None


@contextlib.contextmanager
def stopped_by_hand() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block, which closes its cluster, and then the process, with 130 or 143 and a word."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        yield
    except SystemExit as end:
        if end.code in (130, 143):
            print("\nstopped; what is finished is kept, and the same command goes on", file=sys.stderr)
        raise


class Workers:
    """Starts `command` in every worker of the cluster, which it closes with itself; a context manager.

    Args:
      cluster: where; nothing else may run there.
      command: program and arguments of a worker, which answers once when it is ready: `ready` holds these answers.
      environment: variables besides this process's own.
      timeout_secs: for the longest answer.

    Raises:
      RuntimeError: a worker ended, with what it printed last. TimeoutError: it did not answer in time.
    """

    def __init__(
        self,
        cluster: Cluster,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] = {},
        timeout_secs: float = 600.0,
    ):
        self.cluster, self._timeout_secs = cluster, timeout_secs
        self._answers: list[queue.SimpleQueue[dict[str, Any]]] = [
            queue.SimpleQueue() for _ in range(cluster.workers)
        ]
        self._found = Answers()
        self._printed: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        try:
            cluster.start(command, environment=environment, on_line=self._on_line)
            self.ready = self._collect()
        except BaseException:
            cluster.close()
            raise

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Gives all workers the same command and waits for all answers, in the order of the workers."""
        self.cluster.send(json.dumps(command))
        return self._collect()

    def close(self) -> None:
        """Ends all workers."""
        self.cluster.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _on_line(self, worker: int, text: str) -> None:
        printed, found = self._found.take(worker, text)
        if printed is not None:
            self._printed.append(f"[{worker}] {printed}")
        if found is not None:
            self._answers[worker].put(found)

    def _collect(self) -> list[dict[str, Any]]:
        return [self._next(worker) for worker in range(self.cluster.workers)]

    def _next(self, worker: int) -> dict[str, Any]:
        waited_secs = 0.0
        while waited_secs < self._timeout_secs:
            try:
                return self._answers[worker].get(timeout=1.0)
            except queue.Empty:
                waited_secs += 1.0
            try:
                code = self.cluster.wait(0)
            except TimeoutError:
                continue
            if self._answers[worker].empty():
                raise RuntimeError(
                    f"worker {worker} must answer, but the workers ended with exit code {code}. {self.cluster.failure}\n"
                    + "\n".join(self._printed)
                )
        raise TimeoutError(f"worker {worker} did not answer within {self._timeout_secs:g} s.")
