"""Bit masks in plain JAX: the definition of the format, and the path that runs on CPU.

Entry i of a mask is bit i % 32 (lowest first) of word i // 32. A mask of n entries has ceil(n / 32) words; the pad bits
of the last word are written as zero and ignored when read.
"""

import jax
import jax.numpy as jnp
from jax import lax

WORD_BITS = 32


def num_words(size: int) -> int:
    """Words that hold `size` bits."""
    return -(-size // WORD_BITS)


def _lanes() -> jax.Array:
    return jnp.arange(WORD_BITS, dtype=jnp.uint32)


def pack(mask: jax.Array) -> jax.Array:
    """bool (..., n) -> uint32 (..., ceil(n / 32)).

    Example:
      >>> int(pack(jnp.array([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], bool))[0])
      4097
    """
    pad = num_words(mask.shape[-1]) * WORD_BITS - mask.shape[-1]
    if pad:
        mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, pad)])
    bits = mask.reshape(*mask.shape[:-1], num_words(mask.shape[-1]), WORD_BITS).astype(jnp.uint32)
    lanes = _lanes().reshape((1,) * (bits.ndim - 1) + (WORD_BITS,))
    return jnp.sum(bits << lanes, axis=-1, dtype=jnp.uint32)


def unpack(words: jax.Array, size: int) -> jax.Array:
    """uint32 (..., ceil(size / 32)) -> bool (..., size)."""
    lanes = _lanes().reshape((1,) * words.ndim + (WORD_BITS,))
    bits = ((words[..., None] >> lanes) & 1).reshape(*words.shape[:-1], words.shape[-1] * WORD_BITS) > 0
    return bits if bits.shape[-1] == size else bits[..., :size]


def bit_at(words: jax.Array, index: jax.Array) -> jax.Array:
    """The bits at the given entries: uint32 (n_words,), int32 (k,) -> bool (k,)."""
    word = words.at[index // WORD_BITS].get(mode="promise_in_bounds")
    return ((word >> (index % WORD_BITS).astype(jnp.uint32)) & 1) > 0


def ones_mask(size: int) -> jax.Array:
    """The full mask of `size` entries, uint32 (ceil(size / 32),)."""
    words = jnp.full((num_words(size),), 0xFFFFFFFF, jnp.uint32)
    return words.at[-1].set((1 << size % WORD_BITS) - 1) if size % WORD_BITS else words


def popcount(words: jax.Array, size: int | None = None) -> jax.Array:
    """Number of set bits among the first `size` entries (all by default) of uint32 (n_words,), int32 ()."""
    if size is not None:
        words = words[: num_words(size)]
        if size % WORD_BITS:
            words = words & ones_mask(size)
    return jnp.sum(lax.population_count(words).astype(jnp.int32), dtype=jnp.int32)
