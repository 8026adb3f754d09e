"""The wish to stop, which all processes follow at the same place of the run, or none.

A run is the same sequence of places in all processes, where an exchange may begin: before each step or round, before each
batch of an evaluation. A process that were to leave alone would leave the others waiting for it. So whoever gets a signal
tells process 0; all are asked how far they are, and hold before their next place; they leave at the first one that nobody
has passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from training._peers import Peers
from training._signals import StopSignals


class CommonStop:
    """Of a single process without `peers`: its own signals.

    Args:
      signals: this process's, which call `wish`.
      peers: lines to the other processes.
      leave: ends this process at once, with the number of the signal; called where nothing is lost by it.
    """

    def __init__(
        self, signals: StopSignals, peers: Peers | None, leave: Callable[[int], Any] = lambda number: None
    ):
        self._signals, self._peers, self._leave = signals, peers, leave
        self._changed = threading.Condition()
        self.passed = 0  # places
        self._held = False  # asked how far, and not told yet where to stop
        self._last: int | None = None  # the place to stop at
        self._number: int | None = None  # of the signal
        self._nothing_to_save = False
        self._answers: dict[int, tuple[int, bool]] = {}  # in process 0
        self.received: int | None = None
        if peers is not None:
            peers.on("wish", lambda index, message: self._ask(message["number"]))
            peers.on("how far", lambda index, message: self._hold())
            peers.on("so far", lambda index, message: self._take(index, message))
            peers.on("stop at", lambda index, message: self._decide(message))

    @property
    def exit_code(self) -> int:
        """What a shell shows for an end by the signal; 0 without one."""
        return 0 if self.received is None else 128 + self.received

    def nothing_to_save(self, is_so: bool) -> None:
        """Whether all that this process has is on disk already, as while the first step is compiled: then a signal ends it
        at once. Processes with different answers go on to the next place.
        """
        with self._changed:
            self._nothing_to_save = is_so

    def wish(self, number: int) -> None:
        """This process got a signal."""
        if self._peers is not None:
            self._peers.tell_first("wish", number=number)
            return
        with self._changed:
            if not self._nothing_to_save:
                return
        self._leave(number)

    def here(self) -> bool:
        """At a place: whether to stop here. Every process calls it equally often; once true, it stays so."""
        if self._peers is None:
            self.received = self._signals.received
            return self.received is not None
        with self._changed:
            while self._held and self._last is None:
                self._changed.wait()
            if self._last is not None and self.passed >= self._last:
                self.received = self._number
                return True
            self.passed += 1
            return False

    # Process 0 asks, all answer, process 0 decides ----------------------------------------------------------------

    def _ask(self, number: int) -> None:
        with self._changed:
            if self._number is not None:
                return
            self._number = number
        assert self._peers is not None
        self._peers.tell_all("how far")

    def _hold(self) -> None:
        with self._changed:
            self._held = True
            passed, nothing = self.passed, self._nothing_to_save
        assert self._peers is not None
        self._peers.tell_first("so far", passed=passed, nothing=nothing)

    def _take(self, index: int, message: dict[str, Any]) -> None:
        assert self._peers is not None
        self._answers[index] = message["passed"], message["nothing"]
        if len(self._answers) == len(self._peers.others) + 1:
            passed, nothing = zip(*self._answers.values(), strict=True)
            self._peers.tell_all("stop at", place=max(passed), number=self._number, leave=all(nothing))

    def _decide(self, message: dict[str, Any]) -> None:
        if message["leave"]:
            self._leave(message["number"])
        with self._changed:
            self._last, self._number = message["place"], message["number"]
            self._changed.notify_all()
