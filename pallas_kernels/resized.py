"""Values of W workers for another number of them, with the same mean; no kernel, but both libraries' states need it."""

import jax
import jax.numpy as jnp


def resized(x: jax.Array, num_workers: int) -> jax.Array:
    """(W, ...) -> (W', ...) with the same mean over the workers, taken in float32.

    More workers: the new ones are the mean. Fewer: what the first W' lack of the mean of all is added to each.
    """
    mean = jnp.mean(x, axis=0, keepdims=True, dtype=jnp.float32)
    more = num_workers - x.shape[0]
    if more >= 0:
        return jnp.concatenate([x, jnp.broadcast_to(mean.astype(x.dtype), (more, *x.shape[1:]))])
    stay = x[:num_workers]
    left = mean - jnp.mean(stay, axis=0, keepdims=True, dtype=jnp.float32)
    return (stay + left).astype(x.dtype)
