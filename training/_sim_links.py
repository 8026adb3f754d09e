"""Links, machines and what passes over them: one phase of messages at a time, for the model of step time (simulate.py).

Each worker has an upload and a download link. A phase is a set of messages in which a worker sends at most once and
receives at most once; every collective is a chain of phases. A worker starts its next phase when its own last one has
ended, so the time of each event follows from the times of the phase before, for all workers at once: a queue of events
would visit the same ones in another order.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np

PerWorker = float | tuple[float, ...]


def tcp_share(mtu_bytes: int = 1500) -> float:
    """Part of a full Ethernet frame that is data of TCP: frames add 14 bytes, headers with time stamps take 52."""
    return (mtu_bytes - 52) / (mtu_bytes + 14)


def _of_workers(name: str, value: PerWorker, workers: int) -> np.ndarray:
    """float64 (W,)."""
    if isinstance(value, tuple) and len(value) != workers:
        raise ValueError(
            f"{name} must be one number or one for each of {workers} workers, got {len(value)} numbers. Give each worker "
            "its own, or all the same."
        )
    return np.broadcast_to(np.asarray(value, np.float64), (workers,)).copy()


def _check(settings: Any, names: tuple[str, ...], *, positive: bool = False) -> None:
    for name in names:
        value = getattr(settings, name)
        for one in value if isinstance(value, tuple) else (value,):
            if not (math.isfinite(one) and (one > 0 if positive else one >= 0)):
                raise ValueError(
                    f"{name} must be finite and {'> 0' if positive else '>= 0'}, got {one!r}. "
                    f"Units: {name.rpartition('_')[2]}."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """The workers' links; a number holds for all of them, a tuple has one for each.

    Attributes:
      upload_bits: bit/s of a worker's link to the others.
      download_bits: bit/s of its link from the others; None: as `upload_bits`. A message goes at the slower of the two it
        passes, and both directions of a worker at once.
      upload_latency_secs, download_latency_secs: added to the arrival of each message; they occupy no link.
      duplex: False: two workers that send to each other in the same phase do so one after the other, the one with the lower
        number first. gloo's exchange of a pair over its one socket was measured to be so mostly: 8 MB over 100 Mbit/s took
        1.27 s, and 0.64 s in the good case.
      payload_fraction: part of the bits that is payload; `tcp_share()` for TCP over Ethernet.
      algorithm: how an all-reduce goes: around a ring, or up and down a tree.

    Raises:
      ValueError: a number outside its range, or another algorithm.
    """

    upload_bits: PerWorker
    download_bits: PerWorker | None = None
    upload_latency_secs: PerWorker = 0.0
    download_latency_secs: PerWorker = 0.0
    duplex: bool = True
    payload_fraction: float = 1.0
    algorithm: Literal["ring", "tree"] = "ring"

    def __post_init__(self) -> None:
        _check(self, ("upload_bits", "payload_fraction"), positive=True)
        if self.download_bits is not None:
            _check(self, ("download_bits",), positive=True)
        _check(self, ("upload_latency_secs", "download_latency_secs"))
        if self.payload_fraction > 1:
            raise ValueError(
                f"payload_fraction must be in (0, 1], got {self.payload_fraction}. 1: no headers."
            )
        if self.algorithm not in ("ring", "tree"):
            raise ValueError(f"algorithm must be 'ring' or 'tree', got {self.algorithm!r}. Use one of these.")

    def bytes_per_sec(self, workers: int) -> tuple[np.ndarray, np.ndarray]:
        """(upload, download), float64 (W,) each, of payload."""
        scale = self.payload_fraction / 8
        up = _of_workers("upload_bits", self.upload_bits, workers)
        down = up if self.download_bits is None else _of_workers("download_bits", self.download_bits, workers)
        return up * scale, down * scale

    def latency_secs(self, workers: int) -> tuple[np.ndarray, np.ndarray]:
        """(of the sender's link, of the receiver's), float64 (W,) each."""
        return (
            _of_workers("upload_latency_secs", self.upload_latency_secs, workers),
            _of_workers("download_latency_secs", self.download_latency_secs, workers),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What a worker takes for the rest; a number holds for all workers, a tuple has one for each.

    Attributes:
      forward_secs, backward_secs: of one step on the worker's part of the batch.
      update_secs: of the optimizer in a step.
      outer_secs: of the outer optimizer in a round.
      message_secs: before each message leaves.
      byte_secs: for each byte received, after it arrived: summing, copying.
      overlap: whether the masks are gathered beside forward and backward; False: before them.

    Raises:
      ValueError: a number that is negative or not finite.
    """

    forward_secs: PerWorker = 0.0
    backward_secs: PerWorker = 0.0
    update_secs: PerWorker = 0.0
    outer_secs: PerWorker = 0.0
    message_secs: float = 0.0
    byte_secs: float = 0.0
    overlap: bool = True

    def __post_init__(self) -> None:
        _check(self, tuple(f.name for f in dataclasses.fields(self) if f.name != "overlap"))

    def secs(self, name: str, workers: int) -> np.ndarray:
        """float64 (W,) of "forward", "backward", "update" or "outer"."""
        return _of_workers(f"{name}_secs", getattr(self, f"{name}_secs"), workers)

    def compute_secs(self, workers: int) -> np.ndarray:
        """Forward and backward, float64 (W,)."""
        return self.secs("forward", workers) + self.secs("backward", workers)


class Links:
    """The links of W workers, and what has passed over each.

    Attributes:
      sent_bytes, received_bytes: float64 (W,), through each upload and each download link.
      own_secs: float64 (W,), what the worker's messages would have taken if its own links alone had set the pace.
    """

    def __init__(self, network: Network, workers: int, machine: Machine | None = None):
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}. One worker has nobody to send to.")
        machine = machine or Machine()
        self.network, self.workers = network, workers
        self.up, self.down = network.bytes_per_sec(workers)
        self.leaving, self.arriving = network.latency_secs(workers)
        self.message_secs, self.byte_secs = machine.message_secs, machine.byte_secs
        self.sent_bytes, self.received_bytes, self.own_secs = np.zeros((3, workers))
        self.alike = all(np.ptp(x) == 0 for x in (self.up, self.down, self.leaving, self.arriving))

    def phases(
        self, ready: np.ndarray, source: np.ndarray, destination: np.ndarray, message_bytes: float, count: int
    ) -> np.ndarray:
        """`count` phases one after the other, in each of which every worker sends to one that does not send to it.

        Workers with equal links that begin together also end each phase together: one is followed and multiplied.
        """
        if not self.alike or np.ptp(ready) or count < 2:
            for _ in range(count):
                ready = self.phase(ready, source, destination, message_bytes)
            return ready
        passed = (self.sent_bytes, self.received_bytes, self.own_secs)
        before = [x.copy() for x in passed]
        secs = self.phase(np.zeros(self.workers), source, destination, message_bytes)
        for x, old in zip(passed, before, strict=True):
            x += (count - 1) * (x - old)
        return ready + count * secs

    def phase(
        self, ready: np.ndarray, source: np.ndarray, destination: np.ndarray, message_bytes: float
    ) -> np.ndarray:
        """When each worker has sent and received, float64 (W,); `ready` for workers without a message.

        Args:
          ready: float64 (W,), when each worker can begin. A message leaves when both its ends can.
          source, destination: int (M,), of each message; no worker twice in either.
          message_bytes: of each message.
        """
        secs = message_bytes / np.minimum(self.up[source], self.down[destination]) + self.message_secs
        start = np.maximum(ready[source], ready[destination])
        mutual = np.zeros(len(source), bool)
        if not self.network.duplex:
            back = np.full(self.workers, -1)  # number of the message that a worker sends
            back[source] = np.arange(len(source))
            answer = back[destination]
            mutual = (answer >= 0) & (destination[answer] == source)
            start = np.where(mutual & (source > destination), start + secs[answer], start)
        left = start + secs
        arrived = left + self.leaving[source] + self.arriving[destination] + self.byte_secs * message_bytes
        end = ready.copy()
        end[source] = np.maximum(end[source], left)
        end[destination] = np.maximum(end[destination], arrived)

        self.sent_bytes[source] += message_bytes
        self.received_bytes[destination] += message_bytes
        own = np.zeros(self.workers)
        own[source] = message_bytes / self.up[source] + self.message_secs
        incoming = message_bytes / self.down[destination] + (arrived - left)
        outgoing = own[destination]
        own[destination] = np.where(mutual, outgoing + incoming, np.maximum(outgoing, incoming))
        self.own_secs += own
        return end
