"""Static-size compaction in plain JAX: the columns of the set bits of each row, in order.

No sort, and no scan over the entries: a popcount prefix over the row's words finds the word of the j-th set bit, five
halvings find the bit inside the word. `optimization_barrier` keeps XLA from fusing a gather with its producer, which
would compute the prefix anew for every gathered element.
"""

from typing import Any

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

    def halve(i, state):
        word, rank, position = state
        half = jnp.uint32(16) >> i.astype(jnp.uint32)
        low = word & ((jnp.uint32(1) << half) - 1)
        below = lax.population_count(low)
        upper = rank >= below
        return (
            jnp.where(upper, word >> half, low),
            jnp.where(upper, rank - below, rank),
            jnp.where(upper, position + half, position),
        )

    # A loop, because its result is stored: straight code would be fused into, and computed anew by, each of the
    # gathers and scatters that use the positions.
    _, _, position = lax.fori_loop(0, 5, halve, (word, rank, jnp.zeros_like(rank)))
    return word_id * 32 + position.astype(jnp.int32)


def word_starts(words: jax.Array, k: int) -> jax.Array:
    """Rank of the first entry of each word among all kept entries, when every row but the last keeps k.

    Args:
      words: uint32 (R, n_words), the packed rows.
      k: set bits of a row.

    Returns:
      int32 (R, n_words).
    """
    num_rows, num_words = words.shape
    padded = jnp.pad(words, ((0, 0), (0, _round_up(num_words) - num_words)))
    counts = lax.population_count(padded).astype(jnp.float32 if num_words * 32 < _MAX_EXACT else jnp.int32)
    before = (cumsum_rows(counts) - counts)[:, :num_words].astype(jnp.int32)
    return before + jnp.arange(num_rows, dtype=jnp.int32)[:, None] * k


def materialize(tree: Any) -> Any:
    """The same arrays, computed once.

    XLA's CPU backend fuses a producer into a gather of its result and then computes it for every gathered element; it
    drops optimization_barrier before that. A branch that is always taken, which XLA cannot know, is kept.
    """
    zeros = lambda x: jax.tree.map(jnp.zeros_like, x)  # noqa: E731
    known = is_computed(jax.tree.leaves(tree)[0])
    return lax.platform_dependent(
        tree,
        cpu=lambda x: lax.cond(known, lambda y: y, zeros, x),
        # Leaf by leaf: under check_vma one barrier makes all its results varying where one operand is.
        default=lambda x: jax.tree.map(lax.optimization_barrier, x),
    )


def is_computed(x: jax.Array) -> jax.Array:
    """True, whatever `x` holds, but only once x is computed; XLA does not see through it. bool ()."""
    first = jnp.ravel(x)[0].astype(jnp.float32)
    return (first == first) | (first != first)


def put_kept(
    values: jax.Array,
    at: jax.Array,
    words: jax.Array,
    starts: jax.Array,
    otherwise: jax.Array,
    add: bool = False,
) -> jax.Array:
    """`otherwise` with its kept entries replaced by `values`, or with `values` added to them.

    Two ways with one result. Few entries are scattered into the buffer. Where more than one in 32 is kept, each entry
    fetches its value instead, by its rank starts[i / 32] + popcount of the bits below it in its word: an elementwise
    pass that XLA fuses with what makes `otherwise` and with what uses the result.

    Args:
      values: (K,) in the order of the set bits.
      at: int32 (K,), flat positions, ascending.
      words: uint32 (n_words,), packed mask with K set bits.
      starts: int32 (n_words,), from `word_starts`.
      otherwise: any shape of at most 32 * n_words entries.

    Returns:
      Like `otherwise`.
    """
    if values.size * 32 <= otherwise.size:
        # N-dimensional positions: XLA scatters into a donated buffer in place only where no reshape stands between.
        place = otherwise.at[jnp.unravel_index(at, otherwise.shape)]
        write = place.add if add else place.set
        return write(values, mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True)
    lane = jnp.arange(32, dtype=jnp.uint32)[None, :]
    below = words[:, None] & ((jnp.uint32(1) << lane) - 1)
    rank = starts[:, None] + lax.population_count(below).astype(jnp.int32)
    kept = ((words[:, None] >> lane) & 1) > 0
    shaped = lambda x: x.reshape(-1)[: otherwise.size].reshape(otherwise.shape)  # noqa: E731
    fetched = values.at[shaped(rank)].get(mode="clip")
    return jnp.where(shaped(kept), otherwise + fetched if add else fetched, otherwise)


def mask_from_indices(index: jax.Array, num_words: int) -> jax.Array:
    """Packed mask with the given entries set, distinct and ascending: int32 (k,) -> uint32 (num_words,)."""
    bit = jnp.uint32(1) << (index % 32).astype(jnp.uint32)
    words = jnp.zeros((num_words,), jnp.uint32)
    return words.at[index // 32].add(bit, mode="promise_in_bounds", indices_are_sorted=True)
