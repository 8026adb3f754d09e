"""Ctrl-C and SIGTERM as a wish to stop after the current step; a second one ends the process at once.

A thread reads the signals from Python's wake-up descriptor, because the main thread may stand in a long call
(a compilation, a step) during which Python runs no handlers: the wish is noted, and a second signal works.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

_CAUGHT = (signal.SIGINT, signal.SIGTERM)
_SAME_SECS = (
    0.2  # a launcher may pass on the signal that the terminal already sent to the whole process group
)


class StopSignals:
    """Inside `with StopSignals() as stop`, `stop.received` is the number of the first signal, or None.

    Args:
      on_first: called with the number of the first signal, from another thread; may wait.
      on_second: called before the process is ended.
    """

    def __init__(
        self, on_first: Callable[[int], Any] | None = None, on_second: Callable[[], Any] | None = None
    ):
        self.received: int | None = None
        self._on_first, self._on_second = on_first, on_second
        self._previous: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """What a shell shows for an end by the signal: 130 for Ctrl-C, 143 for SIGTERM; 0 without one."""
        return 0 if self.received is None else 128 + self.received

    def _watch(self, reader: socket.socket) -> None:
        first_time = 0.0
        while data := reader.recv(1):
            number = data[0]
            if number not in _CAUGHT:
                continue
            if self.received is None:
                self.received, first_time = number, time.monotonic()
                if self._on_first is not None:
                    # In a thread of its own: it may wait for what never comes, and a second signal must still work.
                    threading.Thread(target=self._on_first, args=(number,), daemon=True).start()
            elif time.monotonic() - first_time > _SAME_SECS:
                if self._on_second is not None:
                    self._on_second()
                os._exit(128 + number)
        reader.close()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            for number in _CAUGHT:  # a handler must be there, or the signal's default action ends the process
                self._previous[number] = signal.signal(number, lambda number, frame: None)
            threading.Thread(target=self._watch, args=(reader,), daemon=True, name="stop-signals").start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._previous:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._previous.clear()
            signal.set_wakeup_fd(self._previous_fd)
            self._writer.close()  # ends the thread
