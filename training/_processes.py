"""Several processes train as one: how they find each other, which of them writes, and what they must agree on.

All processes run the same code and take part in every exchange, evaluation and checkpoint. The first alone prints, makes
the run's folder and writes its files, and tells the others what it found.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from training._signals import StopSignals

_GIVEN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# What JAX itself reads of a Slurm step.
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_MESSAGE_BYTES = 4096


def join(environment: Mapping[str, str] = os.environ) -> int:
    """Joins the group that the environment describes and returns its number of processes; 1 where it describes none.

    Three variables say it: JAX_COORDINATOR_ADDRESS, host:port of process 0, JAX_NUM_PROCESSES and JAX_PROCESS_ID. A Slurm
    step of several tasks says it itself. Must be called before JAX starts, in the main thread; it waits until all processes
    are there, and after five minutes JAX ends the process.

    Raises:
      ValueError: only some of the variables are set, one of them is no such number, or the others did not come in time.
    """
    given = {name: environment[name] for name in _GIVEN if environment.get(name)}
    slurm = _slurm_tasks(environment)
    if set(given) <= {_GIVEN[0]} and slurm > 1:  # JAX reads the rest, and an address, by itself
        _initialize(f"{slurm} Slurm tasks", environment["SLURM_PROCID"] == "0")
        return slurm
    if not given:
        return 1
    missing = [name for name in _GIVEN if name not in given]
    if missing:
        raise ValueError(
            f"{', '.join(_GIVEN)} must all be set for several processes, got no {' and no '.join(missing)}. Set "
            f"{'it' if len(missing) == 1 else 'them'}, or unset {' and '.join(given)} for a single process."
        )
    address, count, index = given[_GIVEN[0]], *(_whole(name, given[name]) for name in _GIVEN[1:])
    if ":" not in address:
        raise ValueError(
            f"{_GIVEN[0]} must be the host and a free port of process 0, got {address!r}. Write host:port."
        )
    if not 0 <= index < count:
        raise ValueError(
            f"{_GIVEN[2]} must be in 0..{_GIVEN[1]} - 1 = {count - 1}, got {index}. Count the processes from 0."
        )
    _initialize(f"{count} processes at {address}", index == 0, address, count, index)
    return count


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


def _slurm_tasks(environment: Mapping[str, str]) -> int:
    """Tasks of the Slurm step that this process is one of; a batch script outside srun is none, whatever the job has."""
    if not all(name in environment for name in _SLURM):
        return 1
    return min(
        int(environment[name]) for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS") if name in environment
    )


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r}. Write digits.") from None


def _initialize(who: str, first: bool, *arguments: str | int) -> None:
    if first:
        print(f"waiting for {who} ...", flush=True)
    # The wait is one call, in which Python runs no handlers; and JAX leaves one of its own for SIGTERM.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        jax.distributed.initialize(*arguments)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise ValueError(
            f"{who} must find each other, got: {str(error).splitlines()[0][:300]}. Start all of them within five minutes, "
            "with the address of process 0."
        ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
