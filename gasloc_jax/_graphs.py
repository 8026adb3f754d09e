"""Static communication graphs and the pool from which each round takes one. Source: GASLoC (arXiv 2606.11081).

`lax.ppermute` takes static pairs, so a fresh random graph without a fresh compile means: a fixed pool, and an index that
is a function of the seed and the round only. Every process computes it for itself, and so does a resumed run.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gasloc_jax._payload import Payload

_MASK = 0xFFFFFFFF


def hash32(x: Any) -> Any:
    """A well-mixed 32-bit number from a Python int or a uint32 array: the same on every machine and in every version."""
    constant = int if isinstance(x, int) else np.uint32
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * constant(factor)) & constant(_MASK)
    return x ^ (x >> 16)


def seeded_permutation(seed: int, number: int, size: int) -> np.ndarray:
    """Permutation number `number` of 0..size-1 for this seed."""
    start = hash32(hash32(seed & _MASK) ^ (number + 1))
    return np.argsort([hash32(start ^ hash32(i + 1)) for i in range(size)], kind="stable")


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Who sends to whom in one round, and how much a receiver takes of it.

    Attributes:
      messages: K tuples of (source, destination) pairs; in each a worker sends at most once and receives at most once.
      receive_weights: float64 (K, W), weight of message k at its receiver, 0 where there is none.
      self_weights: float64 (W,), weight of a worker's own value.
    """

    messages: tuple[tuple[tuple[int, int], ...], ...]
    receive_weights: np.ndarray
    self_weights: np.ndarray

    def matrix(self) -> np.ndarray:
        """The mixing matrix, float64 (W, W): z_i = sum_j matrix[i, j] y_j."""
        matrix = np.diag(self.self_weights)
        for pairs, weights in zip(self.messages, self.receive_weights, strict=True):
            for source, destination in pairs:
                matrix[destination, source] += weights[destination]
        return matrix

    def pairs(self) -> tuple[tuple[int, int], ...] | None:
        """The pairs of workers, each once, where all workers have one and exchange both ways; None for any other graph."""
        to = dict(self.messages[0]) if len(self.messages) == 1 else {}
        if len(to) < self.self_weights.size or any(to[to[i]] != i for i in to):
            return None
        return tuple((i, j) for i, j in sorted(to.items()) if i < j)

    def matchings(self) -> tuple[tuple[tuple[tuple[int, int], ...], ...], np.ndarray] | None:
        """Where everyone exchanges both ways with two others, in rings of even length: two sets of pairs that hold all
        exchanges, and int (2, W), which set brings a worker its message k. None for any other graph.
        """
        size = self.self_weights.size
        sources = [{to: source for source, to in pairs} for pairs in self.messages]
        near = [{found[i] for found in sources if i in found} for i in range(size)]
        if len(sources) != 2 or any(
            len(near[i]) != 2 or any(i not in near[j] for j in near[i]) for i in range(size)
        ):
            return None
        sets: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        left = set(range(size))
        while left:
            ring = [min(left)]
            while len(ring) == 1 or ring[-1] != ring[0]:
                ring.append(next(j for j in sorted(near[ring[-1]]) if len(ring) == 1 or j != ring[-2]))
            if len(ring) % 2 == 0:  # the first stands at the end again
                return None
            for place, pair in enumerate(itertools.pairwise(ring)):
                sets[place % 2].append((min(pair), max(pair)))
            left -= set(ring)
        brought = [[int((min(i, s[i]), max(i, s[i])) in sets[1]) for i in range(size)] for s in sources]
        return tuple(tuple(sorted(pairs)) for pairs in sets), np.array(brought, np.int32)

    def sends(self) -> np.ndarray:
        """int (W,): messages that each worker sends."""
        sources = [source for pairs in self.messages for source, _ in pairs]
        return np.bincount(np.array(sources, np.int64), minlength=self.self_weights.size)


def graph_of(matrix: np.ndarray) -> Graph:
    """The graph of a mixing matrix: its cyclic offsets, put together where nobody would send or receive twice.

    Zero weights send nothing.
    """
    size = matrix.shape[0]
    messages: list[dict[int, int]] = []  # source -> destination
    for offset in range(1, size):
        pairs = {(i - offset) % size: i for i in range(size) if matrix[i, (i - offset) % size]}
        if not pairs:
            continue
        for message in messages:
            if not (message.keys() & pairs.keys() or set(message.values()) & set(pairs.values())):
                message.update(pairs)
                break
        else:
            messages.append(pairs)
    weights = np.zeros((len(messages), size))
    for row, message in zip(weights, messages, strict=True):
        for source, destination in message.items():
            row[destination] = matrix[destination, source]
    return Graph(tuple(tuple(sorted(m.items())) for m in messages), weights, np.diag(matrix).copy())


class Graphs(Sequence[Graph]):
    """Graphs that are made when they are first asked for: a simulated run over 4096 workers meets few of 4095 matchings."""

    def __init__(self, count: int, make: Callable[[int], Graph]):
        self._count, self._make = count, functools.cache(make)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple(self._make(n) for n in range(*number.indices(self._count)))
        return self._make(range(self._count)[number])


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """The graphs of a topology for W workers, made by `Topology.build`. Everything but `index` of a traced round is NumPy.

    Attributes:
      name: of the topology.
      num_workers: W.
      graphs: with equally many messages each, also of the busiest worker.
      seed: draws a graph uniformly in each round; None: they are taken in turn.
      all_reduce: the one graph is the complete one, for which an all-reduce is cheaper than W - 1 messages.
    """

    name: str
    num_workers: int
    graphs: Sequence[Graph]
    seed: int | None = None
    all_reduce: bool = False

    def index(self, round: Any) -> Any:
        """Which graph is used in round 0, 1, ...: int for an int, traced int32 () for a traced int32 ()."""
        if len(self.graphs) == 1:
            return 0 if isinstance(round, int) else jnp.zeros((), jnp.int32)
        number: Any = round if isinstance(round, int) else jnp.asarray(round).astype(jnp.uint32)
        if self.seed is not None:
            start = hash32(self.seed & _MASK)
            number = hash32(number ^ (start if isinstance(round, int) else np.uint32(start)))
        index = number % len(self.graphs)
        return index if isinstance(round, int) else index.astype(jnp.int32)

    def graph(self, round: int) -> Graph:
        """The graph of a round."""
        return self.graphs[self.index(int(round))]

    def matrix(self, round: int) -> np.ndarray:
        """The mixing matrix of a round, float64 (W, W)."""
        return self.graph(round).matrix()

    @property
    def in_turn(self) -> bool:
        """Whether the rounds go through the graphs in a fixed order, of one graph too; else each round draws its own."""
        return self.seed is None or len(self.graphs) == 1

    @functools.cached_property
    def _gap(self) -> float:
        if self.num_workers == 1:
            return 1.0
        if self.in_turn:
            return max(0.0, 1.0 - self._growth_in_turn(np.ones((1, 1)), -np.ones((1, 1))))
        squares = sum(m.T @ m for m in (graph.matrix() for graph in self.graphs)) / len(self.graphs)
        # The mean over workers stays; what is left of everything else is its disagreement.
        ones = np.full_like(squares, 1.0 / self.num_workers)
        return float(1.0 - max(0.0, np.linalg.eigvalsh(squares - ones)[-1]))

    def expected_gap(self) -> float:
        """The squared disagreement of the workers shrinks by 1 - gap a round under mixing alone.

        Of graphs drawn at random: in expectation, 1 - lambda_2(E[W^T W]). Of one graph, or several in turn: in the long
        run, the geometric mean over a cycle, from the second largest eigenvalue of the product of its matrices; 1 where
        the product leaves no disagreement.

        Computed from this pool. In closed form, for n workers: random pairs n / (2 (n - 1)) for even n and 1/2 for odd;
        a uniformly random ring 2/3 + 2 / (3 (n - 1)); the complete graph 1, and so the exponential one where n is a power
        of 2. Of the fixed ring it falls as 1/n^2.
        """
        return self._gap

    def growth(self, carried: Any, mixed: Any) -> float:
        """By what factor the squared disagreement changes a round in the long run: at 1 or more it grows.

        For rules that are linear where nobody drifts. A worker holds n numbers for each parameter, that parameter among
        them, and s <- carried s + mixed (s - mix(s)) of which at least one column of `mixed` is not 0. Let L = I - W, so
        that s - mix(s) = L s.

        One graph, or several in turn: the numbers of all workers go on by A_r = C (x) I + M (x) L_r in the round of graph r.
        The largest eigenvalue of the product of all A_r, of what is not equal on all workers, is the factor of a cycle of R
        rounds, and that to the power 2/R the one of a round. It is exact.

        Graphs drawn at random: in expectation. The second moments S (n, n) along an eigenvector of E[L] go on by

            S <- C S C' + l1 (C S M' + M S C') + l2 M S M',    l1 = u' E[L] u,    l2 = u' E[L' L] u

        and the largest eigenvalue of this n*n by n*n matrix is the factor. It is exact for random pairs, since all workers
        are alike; an estimate for a small pool of rings.

        Args:
          carried, mixed: C and M, float (n, n).

        Returns:
          0 for one worker, which has nobody to disagree with.

        Example:
          >>> import gasloc_jax
          >>> pool = gasloc_jax.random_pairs().build(8)
          >>> round(pool.growth([[1]], [[-1]]), 4), round(1 - pool.expected_gap(), 4)  # theta <- mix(theta)
          (0.4286, 0.4286)
        """
        if self.num_workers == 1:
            return 0.0
        carried, mixed = np.asarray(carried, np.float64), np.asarray(mixed, np.float64)
        if self.in_turn:
            return self._growth_in_turn(carried, mixed)
        ones = np.ones((self.num_workers, self.num_workers)) / self.num_workers
        rests = [np.eye(self.num_workers) - graph.matrix() for graph in self.graphs]
        first, second = sum(rests) / len(rests), sum(rest.T @ rest for rest in rests) / len(rests)
        # L has the eigenvalue 0 for the mean over workers, which is no disagreement, and at most 2 else: 4 puts it last.
        _, modes = np.linalg.eigh(0.5 * (first + first.T) + ones * 4.0)
        modes = modes[:, :-1]
        l1, l2 = (np.einsum("im,ij,jm->m", modes, x, modes)[:, None, None] for x in (first, second))
        once = np.kron(carried, mixed) + np.kron(mixed, carried)
        moments = np.kron(carried, carried) + l1 * once + l2 * np.kron(mixed, mixed)
        return float(np.abs(np.linalg.eigvals(moments)).max())

    def _growth_in_turn(self, carried: np.ndarray, mixed: np.ndarray) -> float:
        eye = np.eye(self.num_workers)
        disagreement = eye - 1.0 / self.num_workers  # takes the mean over workers away, which no L moves
        cycle = np.eye(len(carried) * self.num_workers)
        for graph in self.graphs:
            cycle = (np.kron(carried, disagreement) + np.kron(mixed, eye - graph.matrix())) @ cycle
        return float(np.abs(np.linalg.eigvals(cycle)).max() ** (2.0 / len(self.graphs)))

    @functools.cached_property
    def _left(self) -> list[float]:
        """Where mixing alone ends all disagreement: what is left of it after each round, in the root mean square over
        starts, the last one 0. Else empty.
        """
        if not self.in_turn or self._gap < 1.0 - 1e-6:
            return []
        ones, left = np.full((self.num_workers, self.num_workers), 1.0 / self.num_workers), []
        product = np.eye(self.num_workers) - ones
        for round in range(self.num_workers * len(self.graphs)):  # no nilpotent cycle needs more
            product = (self.matrix(round) - ones) @ product
            left.append(float(np.linalg.norm(product)) / math.sqrt(max(1, self.num_workers - 1)))
            if left[-1] < 1e-12:
                return left
        return []

    def rounds_to_agree(self) -> int | None:
        """Rounds after which mixing alone leaves no disagreement, counted from round 0; None: some is always left."""
        return len(self._left) or None

    def rounds_to_halve(self) -> float:
        """Rounds until the workers' distance from their mean is halved by mixing alone, at least 1.

        From `expected_gap`, so that rounds of unequal effect count as their mean; a whole number where `rounds_to_agree`
        is one, since the gap tells nothing there.
        """
        if self._left:
            return 1.0 + next(n for n, left in enumerate(self._left) if left <= 0.5)
        left = 1.0 - self._gap
        if left <= 0.0:
            return 1.0
        return math.inf if left >= 1.0 - 1e-12 else max(1.0, 2.0 * math.log(2.0) / -math.log(left))

    def bytes_per_round(self, num_entries: int, payload: Payload, averaged: bool = True) -> int:
        """Bytes that a worker sends in a round of `num_entries` parameters; that of the busiest worker.

        averaged: False where values that differ at the start are mixed: compressed ones then need a message to each worker
        of the complete graph too.
        """
        if self.num_workers == 1:
            return 0
        if self.all_reduce and (averaged or payload.lossless):
            return payload.all_reduce_bytes(num_entries, self.num_workers)
        return int(self.graphs[0].sends().max(initial=0)) * payload.message_bytes(num_entries)

    # Tables for the device: looked up by graph and worker, so that branches of a switch hold nothing but messages.

    @property
    def receive_table(self) -> jax.Array:
        """float32 (G, K, W)."""
        return jnp.asarray(np.stack([graph.receive_weights for graph in self.graphs]), jnp.float32)

    @property
    def self_table(self) -> jax.Array:
        """float32 (G, W)."""
        return jnp.asarray(np.stack([graph.self_weights for graph in self.graphs]), jnp.float32)

    @property
    def sends_table(self) -> jax.Array:
        """bool (G, W): whether a worker sends anything."""
        return jnp.asarray(np.stack([graph.sends() > 0 for graph in self.graphs]))
