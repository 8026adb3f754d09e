"""Calls of `compact_rows`, `scatter_rows`, `index_rows` and `mask_rows` on real shapes."""

import jax
import jax.numpy as jnp

from pallas_kernels._arg_specs import LEAVES, Call

COMPACT_ROWS = {
    name: Call((leaf.entries(), leaf.words()), leaf.cut("k", "k_last", "block"))
    for name, leaf in LEAVES.items()
}
SCATTER_ROWS = {
    name: Call((leaf.entries(), leaf.payload(), leaf.words()), leaf.cut("k", "k_last", "block"))
    for name, leaf in LEAVES.items()
}
INDEX_ROWS = {name: Call((leaf.words(),), leaf.cut("size", "k", "block")) for name, leaf in LEAVES.items()}
MASK_ROWS = {
    name: Call((jax.ShapeDtypeStruct((leaf.rows.count, leaf.rows.k), jnp.uint16),), leaf.cut("size", "block"))
    for name, leaf in LEAVES.items()
}
