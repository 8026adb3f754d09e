"""How fast the workers are, as each process measures it, and how many local steps follow from that.

An exchange ends for two peers at the same time, so the one that came last did not wait: of the times that neighbours of a
round's graph measured, the least is that of the link, and what is above it was waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import gasloc_jax
from training._outer_section import OuterConfig
from training._processes import gathered

# Rounds between two choices, each a gather for which all wait: few at first, more while nothing changes.
ADAPT_EVERY, MOST_EVERY = 5, 40


class Pace:
    """Times of the rounds and the local steps of every worker; workers of one process, `own_workers`, share its times."""

    def __init__(self, outer: OuterConfig, pool: gasloc_jax.Pool, own_workers: slice):
        self._outer, self._pool, self._workers, self._own = outer, pool, pool.num_workers, own_workers
        self.local_steps = outer.steps_of_each(self._workers)
        self._last: tuple[float, float] | None = None
        self._rounds, self._every = 0, ADAPT_EVERY
        # Since the last choice, (round, a step's seconds, an exchange's seconds): this process's.
        self._mine: list[tuple[int, float, float]] = []
        # At the last choice, of every worker: seconds of a step and of its link. The round to come.
        self._step_secs: list[float] = []
        self._link_secs: list[float] = []
        self._next_round = 0

    def add(self, round: int, counts: list[int], local_secs: float, exchange_secs: float) -> str | None:
        """Takes the times of round number `round`, in which worker n took counts[n] steps.

        With outer.adapt this chooses new local steps now and then, and returns a line that says so. Every process calls it
        after every round.
        """
        self._rounds += 1
        self._next_round = round + 1
        if self._rounds == 1:  # compilation
            return None
        self._last = (local_secs, exchange_secs)
        if not self._outer.adapt:
            return None
        # The process is done when the worker with the most steps is.
        self._mine.append((round, local_secs / max(counts[self._own]), exchange_secs))
        if len(self._mine) < self._every:
            return None
        mine = self._mine[-ADAPT_EVERY:]  # a link that became slower in between counts as it is now
        rounds, self._mine = [number for number, _, _ in mine], []
        told = self.choose(rounds, self._gathered(np.array([times[1:] for times in mine], np.float32)))
        self._every = ADAPT_EVERY if told else min(2 * self._every, MOST_EVERY)
        return told

    def steps_of_next_round(self) -> list[int]:
        """H_i of every worker in the round to come: whoever meets a slower link than its own comes earlier by as much."""
        if not self._link_secs:
            return list(self.local_steps)
        link = np.array(self._link_secs)
        early = np.where(self._near(self._next_round), link, 0).max(axis=1) - link
        fewer = np.rint(early / np.array(self._step_secs)).astype(int)
        return np.maximum(np.array(self.local_steps) - fewer, self._outer.fewest_steps).tolist()

    def line(self) -> dict[str, Any]:
        """Of the last round, lists with one number for each worker; {} where none was timed.

        Communicates 8 bytes a process, so every process calls it after the same round. The times of a process's first
        round are left out: they are the compiler's.
        """
        if self._last is None:
            return {}
        local, exchange = self._gathered(np.array(self._last, np.float32)).T.tolist()
        return {"local_secs": local, "exchange_secs": exchange}

    def choose(self, rounds: list[int], secs: np.ndarray) -> str | None:
        """New local steps from secs (W, rounds, 2), of a step and of an exchange; a line where they change.

        All are to reach the exchange when the fastest worker has taken the steps of the setting. That time is taken anew at
        each choice: kept from an earlier one, or from another machine, it would move everybody's steps with the clock.
        """
        outer, steps = self._outer, np.median(secs[:, :, 0], axis=1).tolist()
        exchanges = self.link_secs(rounds, secs[:, :, 1]).tolist()
        adapt = gasloc_jax.AdaptiveLocalSteps(
            outer.steps_per_round, outer.fewest_steps, outer.steps_per_round
        )
        self._step_secs, self._link_secs = steps, exchanges
        target_secs, before = adapt.common_target(steps, exchanges), self.local_steps
        self.local_steps = [
            adapt.choose(now, [step], [exchange], target_secs)
            for now, step, exchange in zip(before, steps, exchanges, strict=True)
        ]
        if self.local_steps != before:
            return f"local steps of the workers: {before} -> {self.local_steps}"
        return None

    def link_secs(self, rounds: list[int], exchange_secs: np.ndarray) -> np.ndarray:
        """Seconds of each worker's exchange without waiting, (W,), from what all measured, (W, rounds)."""
        found = []
        for number, secs in zip(rounds, exchange_secs.T, strict=True):
            found.append(np.where(self._near(number), secs, np.inf).min(axis=1))
        return np.min(found, axis=0)

    def _near(self, round: int) -> np.ndarray:
        """Who waits for whom in a round, bool (W, W); everyone for itself."""
        matrix = self._pool.matrix(round)
        return (matrix != 0) | (matrix.T != 0) | np.eye(self._workers, dtype=bool)

    def get_state(self) -> dict[str, Any]:
        """Communicates up to 320 bytes a process with outer.adapt; every process calls it after the same round."""
        times = np.array([times[1:] for times in self._mine], np.float32).reshape(-1, 2)
        return {
            "local_steps": list(self.local_steps),
            "timed_rounds": [number for number, _, _ in self._mine],
            "secs": self._gathered(times).tolist(),  # (W, rounds, 2)
            "step_secs": self._step_secs,
            "link_secs": self._link_secs,
            "next_round": self._next_round,
            "every": self._every,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        if len(state["local_steps"]) != self._workers:
            return  # they are others now, and measured anew
        self.local_steps = list(state["local_steps"])
        self._step_secs, self._link_secs = list(state["step_secs"]), list(state["link_secs"])
        self._next_round, self._every = state["next_round"], state.get("every", ADAPT_EVERY)
        mine = state["secs"][self._own.start]
        self._mine = [(number, *times) for number, times in zip(state["timed_rounds"], mine, strict=True)]

    def _gathered(self, mine: np.ndarray) -> np.ndarray:
        """(W, *shape): for each worker what its process measured."""
        if not mine.size:
            return np.zeros((self._workers, *mine.shape), mine.dtype)
        found = gathered(mine[None])
        return np.repeat(found, self._workers // len(found), axis=0)
