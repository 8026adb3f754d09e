"""Calls of `moment_pass` and `select_moment` on real shapes; the arrays are h, g, the last mask and this one (or k)."""

import jax
import jax.numpy as jnp

from pallas_kernels._arg_specs import LEAVES, Call, Leaf


def _buffer(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32)


def _payload(leaf: Leaf, **options: object) -> Call:
    arrays = _buffer(leaf), leaf.entries(), leaf.words(), leaf.words()
    return Call(arrays, leaf.cut("k", "k_last", "block") | {"b1": 0.9} | options)


def _window(leaf: Leaf, workers: int = 8) -> Call:
    owned = -(-leaf.rows.count // workers)
    arrays = _buffer(leaf), leaf.entries(), leaf.words(), jax.ShapeDtypeStruct((owned,), jnp.int32)
    return Call(arrays, leaf.cut("block") | {"b1": 0.9, "first_row": 0, "num_rows": owned})


MOMENT_PASS = {name: _payload(leaf) for name, leaf in LEAVES.items()} | {
    "kept_only": _payload(LEAVES["mlp_1"], squares=False),
    "bfloat16_payload": _payload(LEAVES["mlp_10"], dtype=jnp.bfloat16),
}
SELECT_MOMENT = {name: _window(leaf) for name, leaf in LEAVES.items()}
