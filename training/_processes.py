"""Several processes train as one: which of them writes, and what they must agree on; how they start is `distributed`.

All processes run the same code and take part in every exchange, evaluation and checkpoint. The first alone prints, makes
the run's folder and writes its files, and tells the others what it found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from training._signals import StopSignals

_MESSAGE_BYTES = 4096


def is_first() -> bool:
    """Whether this process prints and writes."""
    return jax.process_index() == 0


def from_first(make: Callable[[], str]) -> str:
    """What `make` returns in the first process, which alone calls it; all processes call this.

    A ValueError or OSError of `make` is raised in all, and the others get the first 4095 bytes. Communicates 4096 bytes.
    """
    told, problem = "", None
    if is_first():
        try:
            told = make()
        except (ValueError, OSError) as error:
            problem = error
    if jax.process_count() == 1:
        if problem is not None:
            raise problem
        return told
    text = f"{'-' if problem else '+'}{problem or told}".encode()[:_MESSAGE_BYTES]
    message = np.zeros(_MESSAGE_BYTES, np.uint8)
    message[: len(text)] = np.frombuffer(text, np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(message), np.uint8).tobytes()
    text_of_all = received.rstrip(b"\0").decode(errors="ignore")
    if text_of_all.startswith("-"):
        raise ValueError(text_of_all[1:]) from problem
    return told or text_of_all[1:]


def require_same(what: str, text: str) -> None:
    """Raises ValueError in all processes unless all of them pass the same text. Communicates 8 bytes a process."""
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.int32)
    found = gathered(digest[None])
    different = np.flatnonzero((found != found[0]).any(axis=1)).tolist()
    if different:
        raise ValueError(
            f"{what} must be the same in all processes, got others in process {', '.join(map(str, different))} than in "
            "process 0. Give all the same command."
        )


def gathered(mine: NDArray) -> NDArray:
    """What all processes have, one after the other along the first axis; 4-byte numbers, and every process calls it."""
    found = np.asarray(multihost_utils.process_allgather(mine.view(np.int32)))
    return found.reshape(-1, *mine.shape[1:]).view(mine.dtype)


class CommonStop:
    """The wish to stop, of which all processes must know before one of them leaves a loop of exchanges.

    A single process knows at once. Several agree where they wait for each other anyway, by `agree`, so that a signal to one
    of them, or to all, ends all after the same step.
    """

    def __init__(self, signals: StopSignals):
        self._signals, self._agreed = signals, 0

    @property
    def received(self) -> int | None:
        """Number of the signal; None without one."""
        return self._signals.received if jax.process_count() == 1 else self._agreed or None

    @property
    def exit_code(self) -> int:
        """What a shell shows for an end by the signal; 0 without one."""
        return 0 if self.received is None else 128 + self.received

    def agree(self) -> None:
        """Communicates 4 bytes a process; all of them call it after the same step."""
        if jax.process_count() > 1:
            self._agreed = int(gathered(np.array([self._signals.received or 0], np.int32)).max())
