"""The graphs of a method's rounds, without those that no simulated round meets over.

The library makes all graphs of a topology, since a compiled step needs them. For 1024 workers the complete graph has a
million messages, which are one all-reduce, and random pairs have 1023 graphs, of which a simulation meets a few.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import numpy as np

import gasloc_jax
from gasloc_jax._graphs import Graph, seeded_permutation


def with_small_pool(optimizer: Any, workers: int, rounds: int) -> Any:
    """The outer optimizer with the graphs of its first `rounds` rounds, in turn; bytes and graphs stay the library's."""
    mixer = optimizer.mixer
    name, build = mixer.topology.name, mixer.topology.build
    if workers < 3:
        return optimizer
    if name == "complete" and (mixer.averages or mixer.payload.lossless):
        pool = _complete(workers)
    elif name == "random_pairs":
        pool = _pairs(build(2).seed, workers, rounds)
    else:
        pool = build(workers)  # once, for the bytes and for the rounds
    small = copy.copy(optimizer)
    small.mixer = dataclasses.replace(mixer, topology=gasloc_jax.Topology(name, lambda size: pool))
    return small


@functools.cache
def _complete(workers: int) -> gasloc_jax.Pool:
    nothing = Graph((), np.zeros((0, workers)), np.full(workers, 1.0 / workers))
    return gasloc_jax.Pool("complete", workers, (nothing,), all_reduce=True)


@functools.lru_cache(maxsize=32)
def _pairs(seed: int, workers: int, rounds: int) -> gasloc_jax.Pool:
    """The matchings of `gasloc_jax.random_pairs(seed)` that rounds 0 .. rounds - 1 draw."""
    label = seeded_permutation(seed, 0, workers)
    wheel = workers - 1 if workers % 2 == 0 else workers
    nothing = Graph((), np.zeros((0, workers)), np.ones(workers))
    drawn = gasloc_jax.Pool("random_pairs", workers, (nothing,) * wheel, seed)
    return gasloc_jax.Pool(
        "random_pairs", workers, tuple(_matching(drawn.index(r), label, wheel) for r in range(rounds))
    )


def _matching(turn: int, label: np.ndarray, wheel: int) -> Graph:
    step, workers = np.arange(1, (wheel + 1) // 2), len(label)
    a, b = (turn + step) % wheel, (turn - step) % wheel
    if workers % 2 == 0:
        a, b = np.append(a, turn), np.append(b, workers - 1)
    a, b = label[a], label[b]
    pairs = np.stack([np.concatenate([a, b]), np.concatenate([b, a])], axis=1)
    weights = np.zeros((1, workers))
    weights[0, pairs[:, 1]] = 0.5
    return Graph((tuple(sorted(map(tuple, pairs.tolist()))),), weights, 1.0 - weights[0])
