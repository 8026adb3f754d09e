"""Calls of `select_rows` on real shapes: whole leaves, and the window of one worker of eight with k as an array."""

import jax
import jax.numpy as jnp

from pallas_kernels._arg_specs import LEAVES, Call, Leaf


def _window(leaf: Leaf, workers: int = 8) -> Call:
    owned = -(-leaf.rows.count // workers)
    arrays = leaf.entries(), jax.ShapeDtypeStruct((owned,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    return Call(arrays, leaf.cut("block") | {"num_rows": owned})


SELECT_ROWS = {
    name: Call((leaf.entries(),), leaf.cut("k", "k_last", "block")) for name, leaf in LEAVES.items()
}
# The arrays are x, k and first_row.
SELECT_WINDOW = {name: _window(LEAVES[name]) for name in ("mlp_10", "odd_tail", "odd_tail_bfloat16")}
