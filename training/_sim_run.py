"""Steps and rounds of W workers on a clock: compute, exchange, update, and who waits for whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from training import _sim_collectives as collectives
from training._sim_links import Links, Machine
from training._sim_methods import Exchange


@dataclasses.dataclass(frozen=True)
class Segment:
    """What a worker did from `start` to `end`, seconds: forward, backward, local (steps), beside, wait, exchange
    or update. "beside" is what travels during compute: masks, and exchanges with a delay.
    """

    worker: int
    start: float
    end: float
    kind: str


@dataclasses.dataclass
class Run:
    """What came out of a simulation of steps or rounds; arrays are float64 (W,) unless told otherwise.

    Attributes:
      ends: (N, W), when each worker ended each step or round.
      compute_secs, update_secs: of each worker, all steps together.
      idle_secs: of each worker, all together: neither computing nor moving its own bytes as fast as its own links could.
      sent_bytes, received_bytes: through each link, all together.
      timeline: what everybody did when; empty unless asked for.
    """

    ends: np.ndarray
    compute_secs: np.ndarray
    update_secs: np.ndarray
    idle_secs: np.ndarray
    sent_bytes: np.ndarray
    received_bytes: np.ndarray
    timeline: list[Segment]

    @property
    def secs(self) -> float:
        """Of a step or round, in the long run: after the first, until the last worker is done."""
        done = self.ends.max(axis=1)
        return float(done[0] if len(done) == 1 else (done[-1] - done[0]) / (len(done) - 1))

    @property
    def exposed_secs(self) -> np.ndarray:
        """Of each worker, all together: neither computing nor updating. Idle time is a part of it."""
        return self.ends[-1] - self.compute_secs - self.update_secs

    @property
    def idle_share(self) -> np.ndarray:
        """`idle_secs` as a fraction of the time until the worker was done."""
        return self.idle_secs / np.maximum(self.ends[-1], np.finfo(np.float64).tiny)


class _Clock:
    """Notes what passes on the workers' way from one time to the next."""

    def __init__(self, links: Links, record: bool):
        self.links, self.record = links, record
        self.segments: list[Segment] = []
        self.idle_secs = np.zeros(links.workers)
        self.own_secs = links.own_secs.copy()

    def note(self, kind: str, start: np.ndarray, end: np.ndarray) -> None:
        if self.record:
            for worker, (a, b) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
                if b > a:
                    self.segments.append(Segment(worker, a, b, kind))

    def exposed(self, start: np.ndarray, end: np.ndarray) -> None:
        """Nothing but communication since `start`: its own transfer is put at the end, what it waits for others before."""
        begin = np.maximum(start, end - (self.links.own_secs - self.own_secs))
        self.own_secs = self.links.own_secs.copy()
        self.idle_secs += begin - start
        self.note("wait", start, begin)
        self.note("exchange", begin, end)

    def run(self, ends: list[np.ndarray], compute_secs: np.ndarray, update_secs: np.ndarray) -> Run:
        links = self.links
        sent, received = links.sent_bytes, links.received_bytes
        return Run(np.stack(ends), compute_secs, update_secs, self.idle_secs, sent, received, self.segments)


def run_steps(links: Links, machine: Machine, exchange: Exchange, steps: int, *, record: bool = False) -> Run:
    """Steps with an exchange in each: masks gathered from the start on, payload all-reduced after the backward pass."""
    workers = links.workers
    forward, backward = machine.secs("forward", workers), machine.secs("backward", workers)
    update = machine.secs("update", workers)
    now, ends, clock = np.zeros(workers), [], _Clock(links, record)
    for _ in range(steps):
        gathered = collectives.ring_all_gather(links, now, exchange.gathered_bytes)
        if machine.overlap:
            clock.note("beside", now, gathered)
        else:
            clock.exposed(now, gathered)
            now = gathered
        clock.note("forward", now, now + forward)
        computed = now + forward + backward
        clock.note("backward", now + forward, computed)
        ready = np.maximum(gathered, computed)
        clock.exposed(computed, ready)
        reduced = collectives.all_reduce(links, ready, exchange.reduced_bytes)
        if exchange.late_bytes:
            reduced = collectives.ring_all_gather(links, reduced, exchange.late_bytes)
        clock.exposed(ready, reduced)
        now = reduced + update
        clock.note("update", reduced, now)
        ends.append(now)
    return clock.run(ends, steps * (forward + backward), steps * update)


def run_rounds(
    links: Links,
    machine: Machine,
    exchange: Exchange,
    local_steps: Sequence[int],
    rounds: int,
    *,
    delay: int = 0,
    record: bool = False,
) -> Run:
    """Rounds of `local_steps` of each worker, each followed by an exchange over its own graph.

    With a delay of D the exchange of what the last round left comes first, beside the first D steps; the first round has
    nothing new to send and sends it all the same.
    """
    workers = links.workers
    of_step = machine.compute_secs(workers) + machine.secs("update", workers)
    outer, steps = machine.secs("outer", workers), np.asarray(local_steps, np.float64)
    now, ends, clock = np.zeros(workers), [], _Clock(links, record)
    for number in range(rounds):
        if delay == 0:
            stepped = now + steps * of_step
            clock.note("local", now, stepped)
            done = _exchange(links, stepped, exchange, number)
            clock.exposed(stepped, done)
        else:
            arrived = _exchange(links, now, exchange, number)
            clock.note("beside", now, arrived)
            first = now + delay * of_step
            clock.note("local", now, first)
            late = np.maximum(first, arrived)
            clock.exposed(first, late)
            done = late + (steps - delay) * of_step
            clock.note("local", late, done)
        now = done + outer
        clock.note("update", done, now)
        ends.append(now)
    update_secs = rounds * (steps * machine.secs("update", workers) + outer)
    return clock.run(ends, rounds * steps * machine.compute_secs(workers), update_secs)


def _exchange(links: Links, ready: np.ndarray, exchange: Exchange, number: int) -> np.ndarray:
    """Round `number`'s exchange; bytes of a message from the closed form of the busiest worker."""
    pool, workers = exchange.pool, links.workers
    assert pool is not None
    if workers == 1:
        return ready
    if pool.all_reduce:
        part_bytes = exchange.sent_bytes / (2 * (workers - 1))
        if exchange.halves:
            ready = collectives.all_to_all(links, ready, part_bytes)
            return collectives.ring_all_gather(links, ready, part_bytes)
        return collectives.all_reduce(links, ready, part_bytes * workers)
    graph = pool.graph(number)
    for pairs in graph.messages:
        ready = collectives.ppermute(links, ready, pairs, exchange.sent_bytes / len(graph.messages))
    return ready
