"""Static-size compaction in plain JAX: the columns of the set bits of each row, in order.

No sort, and no scan over the entries: a popcount prefix over the row's words finds the word of the j-th set bit, five
halvings find the bit inside the word. What others gather from, or use more than once, is stored first (`materialize`):
XLA would compute it anew for every gathered element.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._rows import Rows
from pallas_kernels.bits import ones_mask

# What stands in a row's list of columns behind its last kept entry; no row is so long.
NO_COLUMN = 0xFFFF

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
    return materialize(before + jnp.arange(num_rows, dtype=jnp.int32)[:, None] * k)


def row_indices(words: jax.Array, k: int, starts: jax.Array | None = None) -> jax.Array:
    """Columns of the first k set bits of each row, ascending.

    Args:
      words: uint32 (R, n_words), the packed rows.
      k: entries per row. A row with fewer set bits is filled up with columns inside the row, of no meaning.
      starts: word_starts(words, k) where the caller has it.

    Returns:
      int32 (R, k).
    """
    num_rows, num_words = words.shape
    if num_rows == 0:
        return jnp.zeros((0, k), jnp.int32)
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    starts = (word_starts(words, k) if starts is None else starts) - row * k
    ends = starts + lax.population_count(words).astype(jnp.int32)

    # The word of output j is the number of words that end at or before it.
    width = _round_up(k + 1)
    ended = jnp.zeros((num_rows * width,), jnp.float32 if k < _MAX_EXACT else jnp.int32)
    slot = (row * width + jnp.minimum(ends, k)).reshape(-1)
    ended = ended.at[slot].add(1, mode="promise_in_bounds", indices_are_sorted=True)
    word_id = cumsum_rows(ended.reshape(num_rows, width))[:, :k]
    word_id = jnp.minimum(word_id.astype(jnp.int32), num_words - 1)

    flat = row * num_words + word_id
    start, word = (a.reshape(-1).at[flat].get(mode="promise_in_bounds") for a in (starts, words))
    rank = (jnp.arange(k, dtype=jnp.int32)[None, :] - start).astype(jnp.uint32)
    position = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << half) - 1)
        below = lax.population_count(low)
        upper = rank >= below
        word = jnp.where(upper, word >> half, low)
        rank = jnp.where(upper, rank - below, rank)
        position = jnp.where(upper, position + half, position)
    return word_id * 32 + position.astype(jnp.int32)


def materialize(tree: Any) -> Any:
    """The same arrays, computed once.

    XLA's CPU backend fuses a producer into a gather of its result and then computes it for every gathered element; it
    drops optimization_barrier before that. A branch that is always taken, which XLA cannot know, is kept.
    """
    return in_turn(is_computed(jax.tree.leaves(tree)[0]), lambda x: x, tree)


def in_turn(turn: jax.Array, fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args), computed once, not before `turn` is known, and with nothing of its inside kept.

    Args:
      turn: bool (), not known to XLA: from `is_computed`, perhaps and-ed with others. False makes the result meaningless.
      fn: arrays -> a tree of arrays, without collectives.
    """
    like = jax.eval_shape(fn, *args)

    def never(*_: Any) -> Any:
        def zeros(x: Any) -> jax.Array:
            kind = x.manual_axis_type
            axes = tuple(kind.varying) if kind else ()
            value = jnp.zeros(x.shape, x.dtype)
            return lax.pcast(value, axes, to="varying") if axes else value

        return jax.tree.map(zeros, like)

    return lax.platform_dependent(
        turn,
        *args,
        cpu=lambda turn, *args: lax.cond(turn, fn, never, *args),
        # Leaf by leaf: under check_vma one barrier makes all its results varying where one operand is.
        default=lambda turn, *args: jax.tree.map(lax.optimization_barrier, fn(*args)),
    )


def is_computed(x: jax.Array) -> jax.Array:
    """True, whatever `x` holds, but only once x is computed; XLA does not see through it. bool ()."""
    if x.size == 0:
        return jnp.ones((), bool)
    first = jnp.ravel(x)[0].astype(jnp.float32)
    return (first == first) | (first != first)


def put_kept(
    values: jax.Array,
    at: jax.Array,
    words: jax.Array,
    starts: jax.Array,
    otherwise: jax.Array,
    *,
    add: bool = False,
    where: jax.Array | bool = True,
) -> jax.Array:
    """`otherwise` with its kept entries replaced by `values`, or with `values` added to them; nothing unless `where`.

    Two ways with one result. Few entries are scattered into the buffer. Where more than one in 32 is kept, each entry
    fetches its value instead, by its rank starts[i / 32] + popcount of the bits below it in its word: an elementwise
    pass that XLA fuses with what makes `otherwise` and with what uses the result.

    Args:
      values: (K,) in the order of the set bits.
      at: int32 (K,), flat positions, ascending.
      words: uint32 (n_words,), packed mask with K set bits.
      starts: int32 (n_words,), from `word_starts`.
      otherwise: any shape of at most 32 * n_words entries.
      add: add instead of replacing.
      where: bool (), False leaves everything as it is.

    Returns:
      Like `otherwise`.
    """
    if is_scattered(values.size, otherwise.size):
        # N-dimensional positions: XLA scatters into a donated buffer in place only where no reshape stands between.
        first, *rest = jnp.unravel_index(at, otherwise.shape)
        place = otherwise.at[(jnp.where(where, first, otherwise.shape[0]), *rest)]
        write = place.add if add else place.set
        return write(values, mode="drop", unique_indices=True, indices_are_sorted=True)
    lane = jnp.arange(32, dtype=jnp.uint32)[None, :]
    below = words[:, None] & ((jnp.uint32(1) << lane) - 1)
    rank = starts[:, None] + lax.population_count(below).astype(jnp.int32)
    kept = (((words[:, None] >> lane) & 1) > 0) & where
    shaped = lambda x: x.reshape(-1)[: otherwise.size].reshape(otherwise.shape)  # noqa: E731
    fetched = values.at[shaped(rank)].get(mode="clip")
    return jnp.where(shaped(kept), otherwise + fetched if add else fetched, otherwise)


def is_scattered(kept: int, size: int) -> bool:
    """Whether `put_kept` needs positions (few entries are kept) or the packed mask and its ranks."""
    return kept * 32 <= size


def mask_from_indices(index: jax.Array, num_words: int) -> jax.Array:
    """Packed mask with the given entries set, distinct and ascending: int32 (k,) -> uint32 (num_words,)."""
    bit = jnp.uint32(1) << (index % 32).astype(jnp.uint32)
    words = jnp.zeros((num_words,), jnp.uint32)
    return words.at[index // 32].add(bit, mode="promise_in_bounds", indices_are_sorted=True)


def _listed(words: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """int32 (R, k) columns of the first k set bits of each row, bool (R, k) which of them there are."""
    if rows.size % 32 and rows.size:
        words = words & ones_mask(rows.size)
    words = jnp.pad(words, (0, rows.count * rows.row_words - rows.words)).reshape(rows.count, rows.row_words)
    count = jnp.sum(lax.population_count(words).astype(jnp.int32), axis=1, keepdims=True)
    keeps = jnp.full((rows.count, 1), rows.k, jnp.int32)
    if rows.count:
        keeps = keeps.at[-1].set(rows.keeps_last)
    there = jnp.arange(rows.k, dtype=jnp.int32)[None, :] < jnp.minimum(count, keeps)
    return row_indices(words, rows.k), there


def _positions(words: jax.Array, rows: Rows) -> jax.Array:
    """int32 (rows.kept,) flat positions of the kept entries; `rows.size` where there is none."""
    columns, there = _listed(words, rows)
    start = jnp.arange(rows.count, dtype=jnp.int32)[:, None] * rows.block
    return jnp.where(there, start + columns, rows.size).reshape(-1)[: rows.kept]


def compact(x: jax.Array, words: jax.Array, *, rows: Rows) -> jax.Array:
    """(size,), packed mask -> (rows.kept,) kept entries, 0 where a row has fewer."""
    return x.at[materialize(_positions(words, rows))].get(mode="fill", fill_value=0)


def scatter(buffer: jax.Array, values: jax.Array, words: jax.Array, *, rows: Rows) -> jax.Array:
    """(size,) buffer with its kept entries replaced by `values` (rows.kept,)."""
    return buffer.at[_positions(words, rows)].set(values, mode="drop")


def indices(words: jax.Array, *, rows: Rows) -> jax.Array:
    """Packed mask -> uint16 (rows.kept,) columns, NO_COLUMN where a row has fewer."""
    columns, there = _listed(words, rows)
    return jnp.where(there, columns, NO_COLUMN).astype(jnp.uint16).reshape(-1)[: rows.kept]


def mask(columns: jax.Array, *, rows: Rows) -> jax.Array:
    """(R * k,) distinct columns -> packed mask; columns behind the row's end are none."""
    columns = columns.reshape(rows.count, rows.k).astype(jnp.int32)
    row = jnp.arange(rows.count, dtype=jnp.int32)[:, None]
    at = row * rows.block + columns
    at = jnp.where((columns < rows.block) & (at < rows.size), at, rows.words * 32)
    bit = jnp.uint32(1) << (columns % 32).astype(jnp.uint32)
    return jnp.zeros((rows.words,), jnp.uint32).at[at // 32].add(bit, mode="drop")
