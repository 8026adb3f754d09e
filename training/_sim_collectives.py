"""The collectives as chains of phases over `Links`: ring, tree, all-gather, all-to-all, and messages along given pairs.

Each takes `ready`, float64 (W,), when each worker can begin, and returns when each has all that it is to get. One worker
has nobody to wait for. Bytes are counted by the links.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from training._sim_links import Links


def ring_reduce_scatter(links: Links, ready: np.ndarray, operand_bytes: float) -> np.ndarray:
    """W - 1 phases in which each worker passes n/W bytes to the next."""
    return _around(links, ready, operand_bytes / links.workers)


def ring_all_gather(links: Links, ready: np.ndarray, own_bytes: float) -> np.ndarray:
    """W - 1 phases in which each worker passes one worker's part, of `own_bytes`, to the next."""
    return _around(links, ready, own_bytes)


def ring_all_reduce(links: Links, ready: np.ndarray, operand_bytes: float) -> np.ndarray:
    """A reduce-scatter and an all-gather: 2 (W-1) phases of n/W bytes. Every worker sends 2 (W-1)/W n bytes."""
    return _around(links, _around(links, ready, operand_bytes / links.workers), operand_bytes / links.workers)


def _around(links: Links, ready: np.ndarray, part_bytes: float) -> np.ndarray:
    source = np.arange(links.workers)
    destination = np.roll(source, -1)
    return links.phases(ready, source, destination, part_bytes, links.workers - 1)


def tree_all_reduce(links: Links, ready: np.ndarray, operand_bytes: float) -> np.ndarray:
    """Up a binomial tree to worker 0 and down again: 2 ceil(log2 W) phases of all n bytes, not cut into pieces.

    Less latency than a ring and more bytes: the right one where messages are small and workers many.
    """
    levels = [1 << k for k in range((links.workers - 1).bit_length())]
    edges = []
    for distance in levels:
        child = np.arange(distance, links.workers, 2 * distance)
        edges.append((child, child - distance))
    for child, parent in edges:
        ready = links.phase(ready, child, parent, operand_bytes)
    for child, parent in reversed(edges):
        ready = links.phase(ready, parent, child, operand_bytes)
    return ready


def all_to_all(links: Links, ready: np.ndarray, part_bytes: float) -> np.ndarray:
    """W - 1 phases in which each worker sends `part_bytes` to the worker k places after it, k = 1, 2, .."""
    source = np.arange(links.workers)
    if links.alike and links.network.duplex and not np.ptp(ready):  # who sends to whom makes no difference
        return links.phases(ready, source, np.roll(source, -1), part_bytes, links.workers - 1)
    for k in range(1, links.workers):
        ready = links.phase(ready, source, np.roll(source, -k), part_bytes)
    return ready


def ppermute(
    links: Links, ready: np.ndarray, pairs: Iterable[tuple[int, int]], message_bytes: float
) -> np.ndarray:
    """One message along each (source, destination), as `lax.ppermute` sends it; workers in no pair do not wait.

    Raises:
      ValueError: a worker that there is not, a message to oneself, or a worker twice on one side.
    """
    table = np.array(list(pairs), np.int64).reshape(-1, 2)
    if table.size and (table.min() < 0 or table.max() >= links.workers):
        raise ValueError(
            f"pairs must name workers 0 to {links.workers - 1}, got {table.min()} to {table.max()}."
        )
    source, destination = table.T
    if len(set(source)) < len(source) or len(set(destination)) < len(destination):
        raise ValueError(
            f"in one phase a worker sends at most once and receives at most once, got {table.tolist()}. Use several phases."
        )
    if (source == destination).any():
        raise ValueError(f"a message must go to another worker, got {table.tolist()}. Leave that pair out.")
    return links.phase(ready, source, destination, message_bytes)


def exchange(
    links: Links, ready: np.ndarray, pairs: Sequence[tuple[int, int]], message_bytes: float
) -> np.ndarray:
    """The two workers of each unordered pair send to each other."""
    return ppermute(links, ready, [*pairs, *((b, a) for a, b in pairs)], message_bytes)


def all_reduce(links: Links, ready: np.ndarray, operand_bytes: float) -> np.ndarray:
    """By the network's algorithm."""
    one = ring_all_reduce if links.network.algorithm == "ring" else tree_all_reduce
    return one(links, ready, operand_bytes)
