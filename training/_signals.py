"""Ctrl-C and SIGTERM as a wish to stop after the current step; a second one ends the process at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_CAUGHT = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Inside `with StopSignals() as stop`, `stop.received` is the number of the first signal, or None."""

    def __init__(self, on_first: Callable[[int], None] | None = None):
        self.received: int | None = None
        self._on_first = on_first
        self._previous: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process ended by the signal: 130 for Ctrl-C, 143 for SIGTERM; 0 without
        one.
        """
        return 0 if self.received is None else 128 + self.received

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for caught in self._previous:
            signal.signal(caught, signal.SIG_DFL)  # the next one is not held up by anything
        if self._on_first is not None:
            self._on_first(number)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in _CAUGHT:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
