"""Ends a run that stands still: a peer that hangs keeps all waiting, and no exchange has a deadline of its own.

The deadline of a step follows from the run's own steps; what is done rarely (an evaluation's batch, a checkpoint) has five
times as long at least, once it was done three times, and before that, like a compilation, an hour. At its end all threads'
stacks are printed, and the process ends, so that a scheduler can start it again.
"""

from __future__ import annotations

import collections
import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from training._peers import Peers, end

LEAST_SECS, RARE_SECS = 120.0, 3600.0
AFTER_ALL_SECS = 2 * RARE_SECS  # for what else may end a run that waits: the watchdog is sooner, and says why
TIMES_LONGEST = 20.0  # of the recent steps
_RECENT = 50
_FIRST = 3  # times that something was done before its deadline is known
_TIMES_RARE = 5.0  # what is no step has at least so many times the least deadline
_WAKE_SECS, _LATE_SECS = 1.0, 2.0
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # of jax.monitoring
_ANSWER_SECS = 5.0  # of a process that is asked where it is


class Watchdog:
    """Inside `with Watchdog(...) as watch`, `watch.did(what)` tells that the run goes on; a context manager.

    Args:
      on_hung: called once, from a thread, with what was found, in words.
      least_secs: no step's deadline is shorter. 0: nothing is watched.
      rare_secs: no deadline is longer; that of what was hardly ever done.
      clock: seconds that only grow.
    """

    def __init__(
        self,
        on_hung: Callable[[str], Any],
        *,
        least_secs: float = LEAST_SECS,
        rare_secs: float = RARE_SECS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._on_hung, self._least_secs, self._clock = on_hung, least_secs, clock
        self._rare_secs = max(least_secs, rare_secs)
        self._took: dict[str, collections.deque[float]] = {}  # recent seconds, by what was done
        self._doing, self._since = "", clock()
        self._has_compiled = False
        self._ended = threading.Event()

    def doing(self, what: str) -> None:
        """The run begins something else; steps are "step". What compiles something does not count for a deadline."""
        now = self._clock()
        if self._doing and not self._has_compiled:
            self._took.setdefault(self._doing, collections.deque(maxlen=_RECENT)).append(now - self._since)
        self._doing, self._since, self._has_compiled = what, now, False

    def _note(self, event: str, duration_secs: float, **unused: str | int) -> None:
        if event == _COMPILE_EVENT:
            self._has_compiled = True

    @property
    def deadline_secs(self) -> float:
        """For what the run is doing now."""
        took = self._took.get(self._doing, ())
        if len(took) < _FIRST:
            return self._rare_secs
        least = self._least_secs * (1 if self._doing == "step" else _TIMES_RARE)
        return min(self._rare_secs, max(least, TIMES_LONGEST * max(took)))

    def hung(self) -> str | None:
        """What stands still, in words."""
        secs, deadline = self._clock() - self._since, self.deadline_secs
        if secs <= deadline:
            return None
        return f"no progress for {secs:.0f} s ({self._doing or 'start'}; the deadline is {deadline:.0f} s)"

    def _watch(self) -> None:
        asked = min(_WAKE_SECS, self._least_secs / 4)
        while True:
            before = self._clock()
            if self._ended.wait(asked):
                return
            late = self._clock() - before - asked
            if late > _LATE_SECS:  # this process was stopped, by Ctrl-Z or a scheduler that suspends jobs
                self._since += late
            found = self.hung()
            if found:
                self._on_hung(found)
                return

    def __enter__(self) -> Watchdog:
        if self._least_secs > 0:
            jax.monitoring.register_event_duration_secs_listener(self._note)
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._ended.set()
        if self._least_secs > 0:
            jax.monitoring.unregister_event_duration_listener(self._note)


def dump_stacks() -> None:
    """What every thread of this process is doing, on standard error."""
    sys.stderr.flush()
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


class Hang:
    """What to do when a run stands still: all processes print their stacks, the one that holds them up is named, all end.

    Args:
      peers: lines to the other processes; None: there are none.
      place: how many places of the run this process has passed.
      on_end: ends this process, told why.
    """

    def __init__(self, peers: Peers | None, place: Callable[[], int], on_end: Callable[[str], Any] = end):
        self._peers, self._place, self._on_end = peers, place, on_end
        self._found: dict[int, int] = {}
        self._why = ""
        if peers is not None:
            peers.on("hung", lambda index, message: self._ask(message["text"]))
            peers.on("where", lambda index, message: self._answer())
            peers.on("at", lambda index, message: self._found.update({index: message["place"]}))

    def report(self, text: str) -> None:
        """This process finds that the run stands still."""
        peers = self._peers
        if peers is None:
            dump_stacks()
            self._on_end(text)
            return
        peers.tell_first("hung", text=text)
        if not peers.lost.wait(3 * _ANSWER_SECS):
            dump_stacks()
            self._on_end(f"{text}; process 0 does not answer")

    def _answer(self) -> None:
        dump_stacks()
        assert self._peers is not None
        self._peers.tell_first("at", place=self._place())

    def _ask(self, text: str) -> None:
        """In process 0, when the first of them reports."""
        if self._why:
            return
        self._why = text
        assert self._peers is not None
        self._peers.tell_all("where")
        threading.Timer(_ANSWER_SECS, self._judge).start()

    def _judge(self) -> None:
        assert self._peers is not None
        silent = [index for index in (0, *self._peers.others) if index not in self._found]
        behind = [index for index, place in self._found.items() if place == min(self._found.values())]
        if silent:
            told = f"{self._peers.called(silent)} did not answer"
        elif len(behind) < len(self._found):
            told = f"{self._peers.called(sorted(behind))} came less far than the others"
        else:
            told = "all processes came equally far"
        self._peers.declare(f"{self._why}: {told}")
