"""Static-size compaction in plain JAX: the columns of the set bits of each row, in order.

No sort, and no scan over the entries: a popcount prefix over the row's words finds the word of the j-th set bit, five
halvings find the bit inside the word. `optimization_barrier` keeps XLA from fusing a gather with its producer, which
would compute the prefix anew for every gathered element.
"""

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK = 32
# float32 counts exactly up to here.
_MAX_EXACT = 1 << 24


def cumsum_rows(x: jax.Array) -> jax.Array:
    """Inclusive sum along each row of (R, n), n a multiple of 32 or below it; float32 totals must stay below 2^24.

    A scan is slow on every backend. Blocks against a triangle of ones are exact in float32 and cost one small product.
    """
    num_rows, n = x.shape
    if x.dtype != jnp.float32:
        return jnp.cumsum(x, axis=1)
    block = min(n, _BLOCK)
    triangle = jnp.triu(jnp.ones((block, block), jnp.float32))
    blocks = n // block if n else 0
    inside = jnp.dot(x.reshape(num_rows * blocks, block), triangle, precision=lax.Precision.HIGHEST)
    inside = inside.reshape(num_rows, blocks, block)
    if blocks > 1:
        totals = jnp.pad(inside[:, :, -1], ((0, 0), (0, -blocks % _BLOCK if blocks > _BLOCK else 0)))
        before = cumsum_rows(totals) - totals
        inside = inside + before[:, :blocks, None]
    return inside.reshape(num_rows, n)


def _round_up(n: int) -> int:
    return n if n < _BLOCK else -(-n // _BLOCK) * _BLOCK


def row_indices(words: jax.Array, k: int) -> jax.Array:
    """Columns of the first k set bits of each row, ascending.

    Args:
      words: uint32 (R, n_words), the packed rows.
      k: entries per row. A row with fewer set bits is filled up with columns inside the row, of no meaning.

    Returns:
      int32 (R, k).
    """
    num_rows, num_words = words.shape
    dtype = jnp.float32 if num_words * 32 < _MAX_EXACT else jnp.int32
    words = jnp.pad(words, ((0, 0), (0, _round_up(num_words) - num_words)))
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    counts = lax.population_count(words).astype(dtype)
    ends = cumsum_rows(counts)
    starts, ends = lax.optimization_barrier(((ends - counts).astype(jnp.int32), ends.astype(jnp.int32)))

    # The word of output j is the number of words that end at or before it.
    width = _round_up(k + 1)
    ended = jnp.zeros((num_rows * width,), dtype)
    slot = (row * width + jnp.minimum(ends, k)).reshape(-1)
    ended = ended.at[slot].add(1, mode="promise_in_bounds", indices_are_sorted=True)
    word_id = cumsum_rows(lax.optimization_barrier(ended).reshape(num_rows, width))[:, :k]
    word_id = lax.optimization_barrier(jnp.minimum(word_id.astype(jnp.int32), num_words - 1))

    flat = row * words.shape[1] + word_id
    start, word = lax.optimization_barrier(
        tuple(a.reshape(-1).at[flat].get(mode="promise_in_bounds") for a in (starts, words))
    )
    rank = (jnp.arange(k, dtype=jnp.int32)[None, :] - start).astype(jnp.uint32)
    position = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << half) - 1)
        below = lax.population_count(low)
        upper = rank >= below
        rank = jnp.where(upper, rank - below, rank)
        word = jnp.where(upper, word >> half, low)
        position = jnp.where(upper, position + half, position)
    return word_id * 32 + position.astype(jnp.int32)


def mask_from_indices(index: jax.Array, num_words: int) -> jax.Array:
    """Packed mask with the given entries set, distinct and ascending: int32 (k,) -> uint32 (num_words,)."""
    bit = jnp.uint32(1) << (index % 32).astype(jnp.uint32)
    words = jnp.zeros((num_words,), jnp.uint32)
    return words.at[index // 32].add(bit, mode="promise_in_bounds", indices_are_sorted=True)
