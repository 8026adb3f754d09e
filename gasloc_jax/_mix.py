"""The exchange itself: z_i = sum_j W_ij y_j over a round's graph, and the mean over all workers, of whole trees.

A tree travels as a few flat pieces: large leaves as they lie, without a copy, and all small ones together, so that a slow
link pays its latency a few times only. With a payload of less than float32 the mean over the workers is kept all the same:

    q_j = Q(y_j + e_j),   e_j <- y_j + e_j - q_j,   z_i = y_i + sum_j W_ij (q_j - q_i)

sums over i to the sum of y, since W is doubly stochastic; what a worker could not say is said in later rounds.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gasloc_jax._graphs import Graph, Pool
from gasloc_jax._payload import Payload
from gasloc_jax._topology import Topology, check_topology
from pallas_kernels import gloo

# Leaves of fewer entries travel together: below this a message costs its latency rather than its bytes.
SMALL = 1 << 16


def num_workers_of(axis_name: str | None) -> int:
    """Workers on the axis; 1 without an axis.

    Raises:
      ValueError: the axis is not bound here.
    """
    if axis_name is None:
        return 1
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis_name must name an axis of the surrounding shard_map, got {axis_name!r}, which is not bound here. "
            "Use gasloc_jax.make_round (its init() makes the state), call init and update inside shard_map, or pass "
            "axis_name=None for one worker."
        ) from error


def is_typed(tree: Any, axis_name: str | None) -> bool:
    """Whether shard_map checks what varies over the axis (check_vma=True); all-reduces of groups are not made for that."""
    return any(axis_name in jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree))


@dataclasses.dataclass(frozen=True)
class Mixer:
    """Mixes trees over the workers of one mesh axis, under shard_map.

    Attributes:
      topology: who meets in a round.
      axis_name: mesh axis of the workers; None: one worker.
      payload: how numbers travel.
      island_axis: mesh axis inside a worker over which its values are equal: each device sends its part only, and the
        parts are gathered over the fast links of the island.
      averages: whether the complete graph is used by `mean`, of values whose starts are equal, or by `mix`.
    """

    topology: Topology
    axis_name: str | None
    payload: Payload
    island_axis: str | None = None
    averages: bool = True

    def __post_init__(self) -> None:
        check_topology(self.topology)

    def pool(self) -> Pool:
        return self.topology.build(num_workers_of(self.axis_name))

    def init(self, tree: Any) -> tuple[jax.Array, ...] | None:
        """The residual e of this device, float32 (1, entries that it sends) a piece; None if nothing is lost.

        Raises:
          ValueError: the topology does not fit the workers.
        """
        self.pool()
        workers, devices = num_workers_of(self.axis_name), num_workers_of(self.island_axis)
        if self.payload.lossless or workers == 1:
            return None
        sizes = (self._padded(size, workers) // devices for size in piece_sizes(tree))
        return tuple(jnp.zeros((1, size), jnp.float32) for size in sizes)

    def mix(
        self, tree: Any, residual: Any, round: jax.Array, turn: jax.Array | None = None
    ) -> tuple[Any, Any]:
        """(z, new residual): the graph of this round applied to every leaf, float32.

        turn: exchanges of this fragment so far, by which graphs are taken in turn; None: `round`. By rounds, F fragments
        and F graphs would leave each fragment with one graph for ever.

        Communicated: every entry of the tree to each neighbour, see `Pool.bytes_per_round`.
        """
        pool = self.pool()
        if pool.num_workers == 1:
            return jax.tree.map(lambda x: x.astype(jnp.float32), tree), residual
        if pool.in_turn and turn is not None:
            round = turn
        own = self._own_parts(tree, pool.num_workers)
        if pool.all_reduce and residual is None:
            mixed = [x / pool.num_workers for x in lax.psum(own, self.axis_name)]
        else:
            mixed, residual = self._gossip(own, residual, pool, round)
        return self._whole(mixed, tree), residual

    def mean(self, tree: Any, residual: Any) -> tuple[Any, Any]:
        """(mean over all workers, new residual), bit-equal on all of them.

        Communicated: float32 as one all-reduce. Less than that as an all-to-all of parts, averaged in float32 by each
        part's owner, and an all-gather of the means, both in the payload's form: the bytes of a ring all-reduce. What
        the owner loses in rounding a mean enters its own residual W-fold, so that nothing is lost for good.
        """
        workers = num_workers_of(self.axis_name)
        if workers == 1:
            return jax.tree.map(lambda x: x.astype(jnp.float32), tree), residual
        if residual is None and num_workers_of(self.island_axis) == 1:
            # Leaf by leaf: XLA makes one all-reduce of them.
            total = lax.psum(jax.tree.map(lambda x: x.astype(jnp.float32), tree), self.axis_name)
            return jax.tree.map(lambda x: x / workers, total), None
        own = self._own_parts(tree, workers)
        if residual is None:
            return self._whole([x / workers for x in lax.psum(own, self.axis_name)], tree), None
        means, lost = zip(
            *(self._compressed_mean(x, e[0], workers) for x, e in zip(own, residual, strict=True)),
            strict=True,
        )
        return self._whole(means, tree), lost

    # Pieces of one device, each float32 (n,) ----------------------------------------------------------------------

    def _compressed_mean(self, own: jax.Array, owed: jax.Array, workers: int) -> tuple[jax.Array, jax.Array]:
        encode, decode = jax.vmap(self.payload.encode), jax.vmap(self.payload.decode)
        wanted = (own + owed).reshape(workers, -1)
        parts = encode(wanted)
        lost = wanted - decode(parts)
        received = self._all_to_all(parts, workers)
        mean = jnp.mean(decode(received), axis=0)
        said = self.payload.encode(mean)
        lost = lost.at[lax.axis_index(self.axis_name)].add(workers * (mean - self.payload.decode(said)))
        return decode(lax.all_gather(said, self.axis_name)).reshape(-1), lost.reshape(1, -1)

    def _gossip(
        self, own: list[jax.Array], residual: Any, pool: Pool, round: jax.Array
    ) -> tuple[list[jax.Array], Any]:
        index, worker = pool.index(round), lax.axis_index(self.axis_name)
        weights, kept = pool.receive_table[index, :, worker], pool.self_table[index, worker]
        if residual is None:
            received = self._send([self.payload.encode(x) for x in own], pool.graphs, index)
            mixed = [kept * x for x in own]
            for weight, messages in zip(weights, received, strict=True):
                mixed = [x + weight * self.payload.decode(m) for x, m in zip(mixed, messages, strict=True)]
            return mixed, None
        wanted = [x + e[0] for x, e in zip(own, residual, strict=True)]
        said = [self.payload.encode(x) for x in wanted]
        received, heard = self._send(said, pool.graphs, index), [self.payload.decode(m) for m in said]
        mixed = own
        for weight, messages in zip(weights, received, strict=True):
            # A missing message is zeros with weight 0.
            mixed = [
                x + weight * (self.payload.decode(m) - q)
                for x, m, q in zip(mixed, messages, heard, strict=True)
            ]
        sends = pool.sends_table[index, worker]
        lost = tuple(
            jnp.where(sends, x - q, e[0])[None] for x, q, e in zip(wanted, heard, residual, strict=True)
        )
        return mixed, lost

    def _send(self, messages: Any, graphs: Sequence[Graph], index: jax.Array) -> tuple[Any, ...]:
        """What this worker receives along each permutation of the graph number `index`; zeros where it receives none."""
        axis, typed = self.axis_name, is_typed(messages, self.axis_name)

        def branch(graph: Graph):
            permuted = lambda x: tuple(lax.ppermute(x, axis, pairs) for pairs in graph.messages)  # noqa: E731
            if typed or not graph.messages or not jax.tree.leaves(messages):
                return permuted
            return lambda x: lax.platform_dependent(x, cpu=_on_cpu(graph, axis), default=permuted)

        if len(graphs) == 1:
            return branch(graphs[0])(messages)
        return lax.switch(index, [branch(graph) for graph in graphs], messages)

    def _all_to_all(self, parts: Any, workers: int) -> Any:
        """Row i of each array (W, ...) to worker i, and a row from each."""
        axis = self.axis_name
        plain = lambda tree: jax.tree.map(lambda x: lax.all_to_all(x, axis, 0, 0), tree)  # noqa: E731
        if workers % 2 or is_typed(parts, axis):
            return plain(parts)
        assert axis is not None
        swapped = lambda tree: jax.tree.map(lambda x: gloo.all_to_all(x, axis, workers), tree)  # noqa: E731
        return lax.platform_dependent(parts, cpu=swapped, default=plain)

    # From a tree to pieces and back -------------------------------------------------------------------------------

    def _padded(self, size: int, workers: int) -> int:
        """Entries of a piece: whole blocks for each device of an island and, where all average, for each owner."""
        parts = num_workers_of(self.island_axis)
        if self.averages and not self.payload.lossless and self.topology.build(workers).all_reduce:
            parts *= workers
        multiple = parts * self.payload.granularity
        return -(-size // multiple) * multiple

    def _own_parts(self, tree: Any, workers: int) -> list[jax.Array]:
        """The part of each piece that this device sends: flat, but for a piece that travels whole as it lies."""
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]
        small = [x.reshape(-1) for x in leaves if x.size < SMALL]
        pieces = [x for x in leaves if x.size >= SMALL] + ([jnp.concatenate(small)] if small else [])
        devices = num_workers_of(self.island_axis)
        if self.payload.lossless and devices == 1:
            # Arithmetic across a reshape costs XLA on CPU its vector instructions.
            return pieces
        flat = [jnp.pad(x.reshape(-1), (0, self._padded(x.size, workers) - x.size)) for x in pieces]
        return (
            [x.reshape(devices, -1)[lax.axis_index(self.island_axis)] for x in flat] if devices > 1 else flat
        )

    def _whole(self, parts: Sequence[jax.Array], like: Any) -> Any:
        """The tree of all devices' parts."""
        if num_workers_of(self.island_axis) > 1:
            parts = [lax.all_gather(x, self.island_axis, tiled=True) for x in parts]
        leaves, treedef = jax.tree.flatten(like)
        large, start, out = iter(parts), 0, []
        for x in leaves:
            if x.size >= SMALL:
                part = next(large)
                out.append(part if part.shape == x.shape else part[: x.size].reshape(x.shape))
            else:
                out.append(parts[-1][start : start + x.size].reshape(x.shape))
                start += x.size
        return treedef.unflatten(out)


def _on_cpu(graph: Graph, axis_name: str | None) -> Callable[[Any], tuple[Any, ...]]:
    """How gloo brings a tree along the graph at the speed of the links."""
    assert axis_name is not None
    pairs, matchings = graph.pairs(), graph.matchings()
    if pairs is not None:
        return lambda tree: (gloo.swap(tree, axis_name, pairs),)
    if matchings is not None:
        return lambda tree: gloo.swap_in_turn(tree, axis_name, *matchings)
    return lambda tree: gloo.permute_in_turn(tree, axis_name, graph.messages)


def piece_sizes(tree: Any) -> list[int]:
    """Entries of each piece that a tree travels as, without padding."""
    sizes = [math.prod(jnp.shape(x)) for x in jax.tree.leaves(tree)]
    small = [size for size in sizes if size < SMALL]
    return [size for size in sizes if size >= SMALL] + ([sum(small)] if small else [])
