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

_MESSAGE_BYTES = 4096  # of a first message; a longer text follows in a second one


def is_first() -> bool:
    """Whether this process prints and writes."""
    return jax.process_index() == 0


def from_first(make: Callable[[], str]) -> str:
    """What `make` returns in the first process, which alone calls it; all processes call this.

    A ValueError or OSError of `make` is raised in all. Communicates 4096 bytes, and what of the text is more than that.
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
    kind = "+" if problem is None else "!" if isinstance(problem, OSError) else "-"
    text = f"{kind}{told if problem is None else problem}".encode()
    size = len(text).to_bytes(4, "little")
    first = _broadcast(size + text, _MESSAGE_BYTES)
    size_of_all = int.from_bytes(first[:4], "little")
    rest = size_of_all - (_MESSAGE_BYTES - 4)
    whole = first[4:] + (_broadcast(text[-rest:], rest) if rest > 0 else b"")
    text_of_all = whole[:size_of_all].decode()
    if text_of_all[0] != "+":
        raise problem or (OSError if text_of_all[0] == "!" else ValueError)(text_of_all[1:])
    return text_of_all[1:]


def _broadcast(mine: bytes, size: int) -> bytes:
    """The first `size` bytes of process 0's, padded with zeros."""
    message = np.zeros(size, np.uint8)
    text = mine[:size] if is_first() else b""
    message[: len(text)] = np.frombuffer(text, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(message), np.uint8).tobytes()


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
