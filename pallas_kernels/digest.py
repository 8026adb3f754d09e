"""A number that tells whether two arrays are equal bit for bit, for comparing what devices hold."""

import jax
import jax.numpy as jnp
from jax import lax

_UINT = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def digest(x: jax.Array) -> jax.Array:
    """uint32 (): another one where a single bit is another, or two entries are swapped."""
    if x.size == 0:
        return jnp.zeros((), jnp.uint32)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = lax.bitcast_convert_type(x, _UINT[x.dtype.itemsize]).reshape(-1).astype(jnp.uint32)
    # The odd weights make a swap of two entries visible.
    weight = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435761) | jnp.uint32(1)
    return jnp.sum(bits * weight, dtype=jnp.uint32)
