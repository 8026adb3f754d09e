"""Which workers meet in a round: random pairs, random rings, a fixed ring, the exponential graph, all, or your matrix.

Source: GASLoC (arXiv 2606.11081), 1-peer and 2-peer random graphs. Every mixing matrix is doubly stochastic, so that
mixing keeps the mean over the workers.
"""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gasloc_jax._checks import check_whole_number
from gasloc_jax._graphs import Graph, Graphs, Pool, graph_of, seeded_permutation


@dataclasses.dataclass(frozen=True)
class Topology:
    """A rule that gives the graphs for any number of workers; made by `random_pairs`, `random_ring` and the others."""

    name: str
    make: Callable[[int], Pool] = dataclasses.field(repr=False)

    def build(self, num_workers: int) -> Pool:
        """The static pool of graphs for W workers.

        Raises:
          ValueError: num_workers is below 1, or not what a given matrix is for.
        """
        check_whole_number("num_workers", num_workers, 1, "One worker is an axis of size 1.")
        return self.make(int(num_workers))


def check_topology(value: Any) -> None:
    """Raises TypeError unless a Topology; says what to write for a name, a factory that was not called, or a matrix."""
    if isinstance(value, Topology):
        return
    call = "random_pairs()"
    name = value if isinstance(value, str) else getattr(value, "__name__", "")
    if name in ("random_pairs", "random_ring", "ring", "exponential", "complete"):
        call = f"{name}()"
    elif name == "mixing_matrix" or isinstance(value, list | tuple) or hasattr(value, "shape"):
        call = "mixing_matrix(your matrix)"
    given = f"the function {name}" if inspect.isroutine(value) else repr(value)
    raise TypeError(f"topology must be a gasloc_jax.Topology, got {given}. Write topology=gasloc_jax.{call}.")


def _matrix(matrix: Any) -> np.ndarray:
    """A copy in float64."""
    try:
        given = np.asarray(matrix)
        if given.dtype.kind in "cSUMm":
            raise TypeError(f"dtype {given.dtype}")
        return given.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a mixing matrix must hold real numbers in rows of equal length, got {matrix!r}. Give one row for each "
            "worker, with a weight for each worker."
        ) from error


def _alone(name: str) -> Pool:
    return Pool(name, 1, (graph_of(np.ones((1, 1))),))


def _check_seed(seed: Any) -> None:
    check_whole_number("seed", seed, 0, "All processes must use the same one.")


def _pairing(pairs: list[tuple[int, int]], num_workers: int) -> Graph:
    """Pairs average; a worker in no pair keeps its own value."""
    both = tuple(sorted([*pairs, *((b, a) for a, b in pairs)]))
    receive = np.zeros((1, num_workers))
    receive[0, [destination for _, destination in both]] = 0.5
    return Graph((both,), receive, 1.0 - receive[0])


def random_pairs(seed: int = 0) -> Topology:
    """1-peer gossip: in each round disjoint random pairs average; with an odd W one worker rests.

    The pool is the W - 1 (even W) or W (odd W) matchings of a round-robin tournament with workers relabelled by the
    seed, drawn uniformly: every pair is equally likely. A worker sends one payload a round.

    Args:
      seed: chooses relabelling and draws; the same on all processes.

    Raises:
      ValueError: seed is not a whole number >= 0.

    Example:
      >>> import gasloc_jax
      >>> pool = gasloc_jax.random_pairs(seed=1).build(8)
      >>> len(pool.graphs), round(pool.expected_gap(), 3)
      (7, 0.571)
    """
    _check_seed(seed)

    def make(size: int) -> Pool:
        if size == 1:
            return _alone("random_pairs")
        label = seeded_permutation(seed, 0, size)
        wheel = size - 1 if size % 2 == 0 else size  # the even case's last worker stands in the hub

        def matching(turn: int) -> Graph:
            pairs = [((turn + i) % wheel, (turn - i) % wheel) for i in range(1, (wheel + 1) // 2)]
            if size % 2 == 0:
                pairs.append((turn, size - 1))
            return _pairing([(int(label[a]), int(label[b])) for a, b in pairs], size)

        return Pool("random_pairs", size, Graphs(wheel, matching), seed)

    return Topology("random_pairs", make)


def _ring(order: Any) -> Graph:
    """Each worker takes a third of its own value and of each neighbour's; two workers average."""
    size = len(order)
    if size == 2:
        return _pairing([(int(order[0]), int(order[1]))], 2)
    after = tuple(sorted((int(order[i]), int(order[(i + 1) % size])) for i in range(size)))
    before = tuple(sorted((b, a) for a, b in after))
    return Graph((after, before), np.full((2, size), 1 / 3), np.full(size, 1 / 3))


def random_ring(seed: int = 0, pool: int = 64) -> Topology:
    """2-peer gossip: in each round a random ring through all workers, weights 1/3.

    A worker sends two payloads a round.

    Args:
      seed: chooses rings and draws; the same on all processes.
      pool: rings to draw from, all different; all (W-1)!/2 where that is fewer. A small pool has a smaller spectral gap
        than uniformly random rings: `expected_gap` tells that of the pool.

    Raises:
      ValueError: seed is not a whole number >= 0, pool not one >= 1.

    Example:
      >>> import gasloc_jax
      >>> len(gasloc_jax.random_ring().build(5).graphs)
      12
    """
    _check_seed(seed)
    check_whole_number("pool", pool, 1, "Typical: 64.")

    def make(size: int) -> Pool:
        if size == 1:
            return _alone("random_ring")
        most = math.factorial(size - 1) // 2 if size < 12 else pool
        rings: dict[tuple[int, ...], None] = {}
        for number in itertools.count():
            if len(rings) >= min(pool, max(most, 1)):
                break
            order = seeded_permutation(seed, number, size)
            order = np.roll(order, -int(np.argmin(order)))  # written from worker 0 on ...
            if (
                size > 2 and order[1] > order[-1]
            ):  # ... towards its smaller neighbour: one spelling for each ring
                order = np.roll(order[::-1], 1)
            rings[tuple(order.tolist())] = None
        return Pool("random_ring", size, tuple(_ring(order) for order in rings), seed)

    return Topology("random_ring", make)


def ring() -> Topology:
    """The fixed ring 0, 1, .., W-1, weights 1/3: two payloads a round, a spectral gap that falls as 1/W^2."""
    return Topology(
        "ring", lambda size: _alone("ring") if size == 1 else Pool("ring", size, (_ring(range(size)),))
    )


def exponential() -> Topology:
    """In round t each worker averages with the value of the worker 2^(t mod ceil(log2 W)) places before it.

    One payload a round. After log2 W rounds all workers agree if W is a power of 2 and nothing else moves them. Momentum
    does: under Nesterov's with rate 0.7 and momentum 0.9 the squared disagreement shrinks to 0.61 of itself a round with
    8 workers and grows, by 1.008 with 16 and 1.20 with 32; see `Pool.growth`.
    """

    def make(size: int) -> Pool:
        if size == 1:
            return _alone("exponential")
        graphs = []
        for power in range(math.ceil(math.log2(size))):
            pairs = tuple((i, (i + 2**power) % size) for i in range(size))
            graphs.append(Graph((pairs,), np.full((1, size), 0.5), np.full(size, 0.5)))
        return Pool("exponential", size, tuple(graphs))

    return Topology("exponential", make)


def complete() -> Topology:
    """All workers average in every round by one all-reduce: this is DiLoCo."""

    def make(size: int) -> Pool:
        everybody = Graphs(1, lambda _: graph_of(np.full((size, size), 1 / size)))
        return Pool("complete", size, everybody, all_reduce=True)

    return Topology("complete", make)


def mixing_matrix(matrix: Any) -> Topology:
    """The same graph in every round, by its mixing matrix: z_i = sum_j matrix[i, j] y_j.

    A message is sent for each non-zero weight off the diagonal.

    Args:
      matrix: (W, W), not negative, rows and columns summing to 1 within 1e-6.

    Raises:
      ValueError: it is not doubly stochastic, which would move the mean over the workers, not square, or not of real
        numbers. A number of workers that is not W is refused by `make_round`.

    Example:
      >>> import gasloc_jax
      >>> gasloc_jax.mixing_matrix([[0.75, 0.25], [0.25, 0.75]]).build(2).expected_gap()
      0.75
    """
    given = _matrix(matrix)
    if given.ndim != 2 or given.shape[0] != given.shape[1] or given.size == 0:
        raise ValueError(
            f"a mixing matrix must be square, got shape {given.shape}. Give one row for each worker."
        )
    if not np.isfinite(given).all() or (given < 0).any():
        raise ValueError(
            f"a mixing matrix must hold finite weights >= 0, got {given.min()} as its least. Use 0 for no message."
        )
    for axis, kind in ((1, "row"), (0, "column")):
        sums = given.sum(axis=axis)
        worst = int(np.argmax(np.abs(sums - 1)))
        if abs(sums[worst] - 1) > 1e-6:
            raise ValueError(
                f"a mixing matrix must be doubly stochastic, but {kind} {worst} sums to {sums[worst]:.6g}. Rows and "
                "columns must each sum to 1, or the mean over the workers would move."
            )

    def make(size: int) -> Pool:
        if size != given.shape[0]:
            raise ValueError(
                f"the mixing matrix must have a row for each worker, got {given.shape[0]} rows for {size} workers. "
                "Give a matrix of that size, or use random_pairs(), which fits any number."
            )
        return Pool("mixing_matrix", size, (graph_of(given),))

    return Topology("mixing_matrix", make)
