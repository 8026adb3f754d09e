"""Calls of `apply_pass` on real shapes: theta, h, g, both masks, the summed payload, the numbers, ages if followed."""

import jax
import jax.numpy as jnp

from pallas_kernels._arg_specs import LEAVES, Call, Leaf
from pallas_kernels.apply_pass.reference import NUM_SCALARS


def _call(leaf: Leaf, age: bool = False, **options: object) -> Call:
    total = jax.ShapeDtypeStruct((leaf.rows.kept,), jnp.float32)
    arrays: tuple[jax.ShapeDtypeStruct, ...] = (
        leaf.entries(),
        jax.ShapeDtypeStruct(leaf.shape, jnp.float32),
        leaf.entries(),
        leaf.words(),
        leaf.words(),
        total,
        jax.ShapeDtypeStruct((NUM_SCALARS,), jnp.float32),
    )
    if age:
        arrays = (*arrays, jax.ShapeDtypeStruct(leaf.shape, jnp.uint8))
    return Call(arrays, leaf.cut("k", "k_last", "block") | options)


APPLY_PASS = {name: _call(leaf) for name, leaf in LEAVES.items()} | {
    "ages": _call(LEAVES["mlp_10"], age=True, staleness_power=1.0),
    "literal": _call(LEAVES["mlp_10"], bias_correction="none", clip_all=False),
    "momentum": _call(LEAVES["odd_tail"], bias_correction="momentum"),
    "update": _call(LEAVES["mlp_1"], update_dtype=jnp.float32),
    "bfloat16_update": _call(LEAVES["odd_tail_bfloat16"], update_dtype=jnp.bfloat16),
}
