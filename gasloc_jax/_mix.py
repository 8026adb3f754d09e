"""The exchange itself: z_i = sum_j W_ij y_j over a round's graph, and the mean over all workers, of whole trees.

A tree travels as ONE array a message, so that a slow link pays its latency once. With a payload of less than float32 the
mean over the workers is kept all the same:

    q_j = Q(y_j + e_j),   e_j <- y_j + e_j - q_j,   z_i = y_i + sum_j W_ij (q_j - q_i)

sums over i to the sum of y, since W is doubly stochastic; what a worker could not say is said in later rounds.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gasloc_jax._graphs import Graph, Pool
from gasloc_jax._payload import Payload
from gasloc_jax._topology import Topology


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


@dataclasses.dataclass(frozen=True)
class Mixer:
    """Mixes trees over the workers of one mesh axis, under shard_map.

    Attributes:
      topology: who meets in a round.
      axis_name: mesh axis of the workers; None: one worker.
      payload: how numbers travel.
      island_axis: mesh axis inside a worker over which its values are equal: each device sends its part only, and the
        parts are gathered over the fast links of the island.
    """

    topology: Topology
    axis_name: str | None
    payload: Payload
    island_axis: str | None = None

    def pool(self) -> Pool:
        return self.topology.build(num_workers_of(self.axis_name))

    def init(self, tree: Any) -> jax.Array | None:
        """The residual e of this device, float32 (1, n), n the padded entries that it sends; None if nothing is lost."""
        workers = num_workers_of(self.axis_name)
        size = sum(math.prod(jnp.shape(x)) for x in jax.tree.leaves(tree))
        if self.payload.lossless or workers == 1:
            return None
        islands = num_workers_of(self.island_axis)
        return jnp.zeros((1, self._padded(size, workers) // islands), jnp.float32)

    def mix(self, tree: Any, residual: jax.Array | None, round: jax.Array) -> tuple[Any, jax.Array | None]:
        """(z, new residual): the graph of this round applied to every leaf, float32.

        Communicated: one message a neighbour with every entry of the tree, see `Pool.bytes_per_round`.
        """
        pool = self.pool()
        if pool.num_workers == 1:
            return jax.tree.map(lambda x: x.astype(jnp.float32), tree), residual
        own = self._own_part(self._flatten(tree, pool.num_workers))
        if pool.all_reduce and self.payload.lossless:
            mixed = lax.psum(own, self.axis_name) / pool.num_workers
        else:
            mixed, residual = self._gossip(own, residual, pool, round)
        return self._unflatten(self._whole(mixed), tree), residual

    def mean(self, tree: Any, residual: jax.Array | None) -> tuple[Any, jax.Array | None]:
        """(mean over all workers, new residual), bit-equal on all of them.

        Communicated: float32 as one all-reduce. Less than that as an all-to-all of parts, averaged in float32 by each
        part's owner, and an all-gather of the means, both in the payload's form: the bytes of a ring all-reduce. What
        the owner loses in rounding a mean enters its own residual W-fold, so that nothing is lost for good.
        """
        workers = num_workers_of(self.axis_name)
        if workers == 1:
            return jax.tree.map(lambda x: x.astype(jnp.float32), tree), residual
        if residual is None and num_workers_of(self.island_axis) == 1:
            # Leaf by leaf: XLA makes one all-reduce of them, and no copy is needed.
            total = lax.psum(jax.tree.map(lambda x: x.astype(jnp.float32), tree), self.axis_name)
            return jax.tree.map(lambda x: x / workers, total), None
        own = self._own_part(self._flatten(tree, workers))
        if residual is None:
            return self._unflatten(self._whole(lax.psum(own, self.axis_name) / workers), tree), None
        encode, decode = jax.vmap(self.payload.encode), jax.vmap(self.payload.decode)
        wanted = (own + residual[0]).reshape(workers, -1)
        messages = encode(wanted)
        lost = wanted - decode(messages)
        received = lax.all_to_all(messages, self.axis_name, 0, 0)
        mean = jnp.mean(decode(received), axis=0)
        message = self.payload.encode(mean)
        lost = lost.at[lax.axis_index(self.axis_name)].add(workers * (mean - self.payload.decode(message)))
        means = decode(lax.all_gather(message, self.axis_name))
        return self._unflatten(self._whole(means.reshape(-1)), tree), lost.reshape(1, -1)

    # One message --------------------------------------------------------------------------------------------------

    def _gossip(
        self, own: jax.Array, residual: jax.Array | None, pool: Pool, round: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        index, worker = pool.index(round), lax.axis_index(self.axis_name)
        weights = pool.receive_table[index, :, worker]
        wanted = own if residual is None else own + residual[0]
        message = self.payload.encode(wanted)
        received = [self.payload.decode(x) for x in self._send(message, pool.graphs, index)]
        if residual is None:
            mixed = pool.self_table[index, worker] * own
            for weight, x in zip(weights, received, strict=True):
                mixed = mixed + weight * x
            return mixed, None
        said, mixed = self.payload.decode(message), own
        for weight, x in zip(weights, received, strict=True):
            # A missing message is zeros with weight 0.
            mixed = mixed + weight * (x - said)
        lost = jnp.where(pool.sends_table[index, worker], wanted - said, residual[0])
        return mixed, lost[None]

    def _send(self, message: jax.Array, graphs: tuple[Graph, ...], index: jax.Array) -> tuple[jax.Array, ...]:
        """What this worker receives in each message of the graph number `index`; zeros where it receives none."""

        def branch(graph: Graph):
            return lambda x: tuple(lax.ppermute(x, self.axis_name, pairs) for pairs in graph.messages)

        if len(graphs) == 1:
            return branch(graphs[0])(message)
        return lax.switch(index, [branch(graph) for graph in graphs], message)

    # Trees and the vector that travels ----------------------------------------------------------------------------

    def _padded(self, size: int, workers: int) -> int:
        """Entries of the vector: whole blocks for each device of an island and, where all average, for each owner."""
        parts = num_workers_of(self.island_axis)
        if self.topology.build(workers).all_reduce and not self.payload.lossless:
            parts *= workers
        multiple = parts * self.payload.granularity
        return -(-size // multiple) * multiple

    def _flatten(self, tree: Any, workers: int) -> jax.Array:
        leaves = [x.astype(jnp.float32).reshape(-1) for x in jax.tree.leaves(tree)]
        size = sum(x.size for x in leaves)
        padding = jnp.zeros((self._padded(size, workers) - size,), jnp.float32)
        return jnp.concatenate([*leaves, padding])

    def _unflatten(self, flat: jax.Array, like: Any) -> Any:
        leaves, treedef = jax.tree.flatten(like)
        ends = np.cumsum([x.size for x in leaves])
        return treedef.unflatten(
            [flat[end - x.size : end].reshape(x.shape) for x, end in zip(leaves, ends, strict=True)]
        )

    def _own_part(self, flat: jax.Array) -> jax.Array:
        if num_workers_of(self.island_axis) == 1:
            return flat
        return flat.reshape(num_workers_of(self.island_axis), -1)[lax.axis_index(self.island_axis)]

    def _whole(self, part: jax.Array) -> jax.Array:
        if num_workers_of(self.island_axis) == 1:
            return part
        return lax.all_gather(part, self.island_axis, tiled=True)
