"""Calls of `pack_rows` and `unpack_rows` on real shapes."""

import jax
import jax.numpy as jnp

from pallas_kernels._arg_specs import LEAVES, Call

PACK_ROWS = {
    **{
        name: Call((jax.ShapeDtypeStruct((leaf.size,), jnp.bool_),), leaf.cut("block"))
        for name, leaf in LEAVES.items()
    },
    "rows_of_37": Call((jax.ShapeDtypeStruct((1000, 37), jnp.bool_),), {}),
    "rows_of_37_uint8": Call((jax.ShapeDtypeStruct((1000, 37), jnp.uint8),), {}),
    "rows_of_37_uint32": Call((jax.ShapeDtypeStruct((1000, 37), jnp.uint32),), {}),
}
UNPACK_ROWS = {
    **{name: Call((leaf.words(),), leaf.cut("size", "block")) for name, leaf in LEAVES.items()},
    "rows_of_37": Call((jax.ShapeDtypeStruct((1000, 2), jnp.uint32),), {"size": 37}),
}
