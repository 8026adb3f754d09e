"""Exact top-k of |x| in each row in plain JAX, by a search for the threshold.

The bits of a non-negative float order like its value, so the k-th largest |x| of a row is found by narrowing an integer
interval of bit patterns; each step is one compare-and-count pass over the row, and nothing is sorted. The next trial is
where the logarithm of the count, taken as linear in |x|, would reach log k (regula falsi with Illinois weights): a
quarter of the passes of plain halving, to which the search falls back. Once at most `_FEW` entries of each row are left
in its interval, they are copied out and the search ends on them. Entries that tie at the threshold are taken from the
lowest index up, by a second search over the index that runs only where there is a tie.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._rows import Rows
from pallas_kernels.bits import pack
from pallas_kernels.compact import row_indices

_LARGEST_FINITE, _INFINITY = 0x7F7FFFFF, 0x7F800000
# Entries of a row that are copied out for the end of the search.
_FEW = 128
# Guided steps before the search halves the interval, which ends within 31 more.
_GUESSES = 24


class _Interval(NamedTuple):
    """Per row, int32 (R,) bit patterns with count(key >= low) = reached >= need > above = count(key >= high)."""

    low: jax.Array
    high: jax.Array
    reached: jax.Array
    above: jax.Array

    def open(self, need: jax.Array, few: int) -> jax.Array:
        """bool (R,): the threshold is not known, and more than `few` entries could be it."""
        unknown = (self.reached != need) & (self.high - self.low > 1)
        return unknown & (self.reached - self.above > few)


def _varying_like(x: jax.Array, like: jax.Array) -> jax.Array:
    # Under shard_map's check_vma a loop carry must start with the type it ends with.
    missing = tuple(jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def _fold(
    width: int, part: Callable[[slice], jax.Array], combine: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """part(slice of the columns) -> (R, n), combined over four slices that cover them (where four divides B).

    On CPU a reduction of integers vectorises only so, and only where each slice is computed by itself. More slices are
    a little faster, and take far longer to compile.
    """
    parts = math.gcd(width, 4)
    n = width // parts
    return functools.reduce(combine, [part(slice(i * n, (i + 1) * n)) for i in range(parts)])


def _count(width: int, chosen: Callable[[slice], jax.Array]) -> jax.Array:
    """int32 (R,): entries that are set in each row; chosen(columns) -> bool (R, n)."""
    folded = _fold(width, lambda columns: chosen(columns).astype(jnp.int32), jnp.add)
    # Float32 counts exactly up to 2^24 and is faster across lanes.
    return jnp.sum(folded.astype(jnp.float32 if width <= 1 << 24 else jnp.int32), axis=1).astype(jnp.int32)


def _as_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.minimum(bits, _LARGEST_FINITE), jnp.float32)


def _narrow(key: jax.Array, need: jax.Array, interval: _Interval, few: int) -> _Interval:
    """Narrows the interval of each row until it is no longer open."""

    def log_ratio(count):
        return jnp.log(jnp.maximum(count, 0.5).astype(jnp.float32) / jnp.maximum(need, 0.5))

    def step(state):
        i, now, excess, lack, was_enough = state
        guess = _as_float(now.low) + (_as_float(now.high) - _as_float(now.low)) * (excess / (excess - lack))
        guess = lax.bitcast_convert_type(guess, jnp.int32)
        trial = jnp.where(i < _GUESSES, guess, now.low + (now.high - now.low) // 2)
        trial = jnp.clip(trial, now.low + 1, jnp.maximum(now.high - 1, now.low + 1))
        count = _count(key.shape[1], lambda at: key[:, at] >= trial[:, None])
        enough, ratio = count >= need, log_ratio(count)
        raise_low, drop_high = (now.open(need, few) & side for side in (enough, ~enough))
        new = _Interval(
            jnp.where(raise_low, trial, now.low),
            jnp.where(drop_high, trial, now.high),
            jnp.where(raise_low, count, now.reached),
            jnp.where(drop_high, count, now.above),
        )
        lack = jnp.where(enough, jnp.where(was_enough, lack / 2, lack), ratio)
        excess = jnp.where(enough, ratio, jnp.where(was_enough, excess, excess / 2))
        return i + 1, new, excess, lack, enough

    start = (
        _varying_like(jnp.int32(0), key),
        interval,
        log_ratio(interval.reached),
        jnp.minimum(log_ratio(interval.above), -0.1),
        _varying_like(jnp.zeros(need.shape, bool), key),
    )
    return lax.while_loop(lambda state: jnp.any(state[1].open(need, few)), step, start)[1]


def select(x: jax.Array, k: jax.Array | int, valid: jax.Array | None = None) -> jax.Array:
    """Mask of the k largest |x| of each row; ties go to the lower index, NaN and invalid entries are never taken.

    Args:
      x: float32 (R, B).
      k: int32 () or (R,), entries kept in each row, 0 <= k <= B; may be traced.
      valid: bool (R, B) or None, entries that may be taken.

    Returns:
      bool (R, B) with exactly min(k, number of candidates) set in each row.
    """
    num_rows, width = x.shape
    key = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    key = jnp.where(key > _INFINITY, -1, key)
    if valid is not None:
        key = jnp.where(valid, key, -1)

    def start(fill):
        return _varying_like(jnp.full((num_rows,), fill, jnp.int32), key)

    candidates = start(width) if valid is None else _count(width, lambda at: valid[:, at])
    need = jnp.minimum(
        _varying_like(jnp.broadcast_to(jnp.asarray(k, jnp.int32), (num_rows,)), key), candidates
    )
    high = jnp.max(_fold(width, lambda at: key[:, at], jnp.maximum), axis=1, initial=-1) + 1
    # Nothing to search where nothing is wanted; such rows are settled below.
    reached = jnp.where(need == 0, need, candidates)
    interval = _Interval(start(0), high, reached, start(0))

    few = min(_FEW, width)
    interval = _narrow(key, need, interval, few)
    rest, below = _narrow_copied(key, need, interval, few)
    threshold = jnp.where(need == 0, jnp.iinfo(jnp.int32).max, rest)

    # Rows that reach more than they need have a tie at the threshold: keep those of index <= last.
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    index_bits = max(width - 1, 1).bit_length()

    def chosen(at, last):
        return (key[:, at] > threshold[:, None]) | (
            (key[:, at] == threshold[:, None]) & (column[:, at] <= last[:, None])
        )

    def halve_index(state):
        bit, last = state
        # `last` grows as long as the ties below it are still fewer than what is needed.
        trial = last | (jnp.int32(1) << bit)
        n = _count(width, lambda at: chosen(at, trial - 1))
        return bit - 1, jnp.where(n < need, trial, last)

    exact = jnp.all(below == need)
    steps = jnp.where(exact, -1, index_bits - 1)
    _, last = lax.while_loop(lambda s: s[0] >= 0, halve_index, (steps, start(0)))
    return chosen(slice(None), jnp.where(exact, width, last))


def _narrow_copied(
    key: jax.Array, need: jax.Array, interval: _Interval, few: int
) -> tuple[jax.Array, jax.Array]:
    """The end of the search, on a copy of the entries left in the interval: (threshold, count at or above it)."""
    num_rows, width = key.shape
    words = pack((key >= interval.low[:, None]) & (key < interval.high[:, None]))
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    left = key.reshape(-1).at[row * width + row_indices(words, few)].get(mode="promise_in_bounds")
    number = jnp.sum(lax.population_count(words), axis=1, keepdims=True).astype(jnp.int32)
    left = jnp.where(jnp.arange(few, dtype=jnp.int32)[None, :] < number, left, -1)
    rest = _Interval(
        interval.low, interval.high, interval.reached - interval.above, jnp.zeros_like(interval.above)
    )
    rest = _narrow(left, need - interval.above, rest, 0)
    return rest.low, rest.reached + interval.above


def select_words(
    x: jax.Array, *window: jax.Array, rows: Rows, num_rows: int | None = None, given_k: bool = False
) -> jax.Array:
    """`select` on the rows of a flat leaf, or on a window of them, packed; arguments as those of the kernel.

    Returns:
      uint32 (rows.words,), or (num_rows * B / 32,) for a window.
    """
    if not rows.count:
        return jnp.zeros(((num_rows or 0) * rows.row_words,), jnp.uint32)
    short = rows.block - rows.last
    grid = jnp.pad(x, (0, short), constant_values=jnp.nan).reshape(rows.count, rows.block)
    row = jnp.arange(rows.count if num_rows is None else num_rows, dtype=jnp.int32)
    if num_rows is not None:
        row = row + window[0]
        grid = grid.at[row].get(mode="fill", fill_value=jnp.nan)
    if given_k:
        k = window[-1]
    else:
        k = jnp.where(row == rows.count - 1, rows.keeps_last, rows.k)
    words = pack(select(grid, k)).reshape(-1)
    return words[: rows.words] if num_rows is None else words
