"""Exact top-k of |x| in each row by a Pallas kernel: the row is read once and searched in registers.

The bits of a non-negative float order like its value. The threshold, the k-th largest |x|, lies in an interval of bit
patterns, which each count of the entries at or above a trial narrows until exactly k reach it or one pattern is left.
The trial is guessed as in `reference.py`, by regula falsi on the logarithm of the count against |x|: 5 to 8 counts in a
row of 4096 normal entries, where halving takes 16 to 18.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import _pallas
from pallas_kernels._rows import Rows

# Fewer warps a row: each count of the search crosses them.
ENTRIES_A_THREAD = 32
# Bit pattern of infinity; what lies above it is NaN.
_INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
# A key shifted by this is the pattern of a float32 that is proportional to the value.
_SHIFT = {"float32": 0, "bfloat16": 16, "float16": 13}
_LARGEST_FINITE = 0x7F7FFFFF
# Guided steps before the search halves the interval, which ends it within 31 more halvings.
GUESSES = 12


def _keys(x: jax.Array, candidate: jax.Array) -> jax.Array:
    """int32 keys that order like |x|, -1 for NaN and what is no candidate."""
    if x.dtype.itemsize == 4:
        key = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    else:
        key = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32) & 0x7FFF
    return jnp.where(candidate & (key <= _INFINITY[x.dtype.name]), key, -1)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask.astype(jnp.int32))


def _reaching(key: jax.Array, trial: jax.Array) -> jax.Array:
    """int32 (), keys >= trial, by the sign of their difference: two instructions each, where a comparison takes three."""
    return key.size - jnp.sum(lax.shift_right_logical(key - trial, jnp.int32(31)))


def _log(count: jax.Array) -> jax.Array:
    """int32, 2^23 log2(2 count + 1) as the bits of a float have it: linear between the powers of two."""
    return lax.bitcast_convert_type((2 * count + 1).astype(jnp.float32), jnp.int32)


class _Search(NamedTuple):
    """Scalars, with count(key >= low) = reached >= k > above = count(key >= high), but for the ends not counted yet."""

    step: jax.Array
    low: jax.Array
    high: jax.Array
    reached: jax.Array  # -1 at first: low = 0 may be reached by fewer than k
    above: jax.Array
    excess: jax.Array  # log(reached / k) and log(above / k), either with a weight below one
    lack: jax.Array
    was_enough: jax.Array  # of the last count
    stalled: jax.Array  # it found nothing between its trial and what was `high` before


def search(key: jax.Array, k: jax.Array, shift: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A threshold that exactly k keys of a row reach, or the k-th largest key where ties leave none.

    Args:
      key: int32 (B,), -1 for what is not to be taken.
      k: int32 ().
      shift: from a key to the bits of a float32 that is proportional to its value.

    Returns:
      int32 (): the threshold; how many keys reach it, -1 where that is not known, at 0; the counts that it took.
    """
    log_k = _log(k)

    def log_ratio(count):
        return (_log(count) - log_k).astype(jnp.float32)

    def value(pattern):
        bits = jnp.minimum(lax.shift_left(pattern, jnp.int32(shift)), jnp.int32(_LARGEST_FINITE))
        return lax.bitcast_convert_type(bits, jnp.float32)

    def narrow(now):
        low, high = value(now.low), value(now.high)
        guess = low + (high - low) * (now.excess / (now.excess - now.lack))
        guess = lax.shift_right_logical(lax.bitcast_convert_type(guess, jnp.int32), jnp.int32(shift))
        middle = now.low + lax.shift_right_logical(now.high - now.low, jnp.int32(1))
        guess = jnp.where(now.step < GUESSES, guess, middle)
        # Nothing lies right below `high`: the largest key that does. With ties it may be the threshold, which no guess
        # would meet.
        trial = lax.cond(now.stalled, lambda: jnp.max(jnp.where(key < now.high, key, -1)), lambda: guess)
        trial = jnp.minimum(jnp.maximum(trial, now.low + 1), now.high - 1)
        count = _reaching(key, trial)
        enough, ratio = count >= k, log_ratio(count)
        # Anderson and Bjoerck's weight for the end that stays where it was twice.
        weight = 1 - ratio / jnp.where(enough, now.excess, now.lack)
        weight = jnp.where(weight > 0, weight, jnp.float32(0.5))
        weight = jnp.where(enough == now.was_enough, weight, jnp.float32(1))
        return _Search(
            now.step + 1,
            jnp.where(enough, trial, now.low),
            jnp.where(enough, now.high, trial),
            jnp.where(enough, count, now.reached),
            jnp.where(enough, now.above, count),
            jnp.where(enough, ratio, now.excess * weight),
            jnp.where(enough, now.lack * weight, ratio),
            enough,
            ~enough & (count == now.above),
        )

    start = _Search(
        jnp.int32(0),
        jnp.int32(0),
        jnp.max(key) + 1,
        jnp.int32(-1),
        jnp.int32(0),
        log_ratio(jnp.int32(key.size)),
        log_ratio(jnp.int32(0)),
        jnp.bool_(False),
        jnp.bool_(False),
    )
    end = lax.while_loop(lambda now: (now.reached != k) & (now.high - now.low > 1), narrow, start)
    return end.low, end.reached, end.step


def largest(x: jax.Array, candidate: jax.Array, k: jax.Array) -> jax.Array:
    """bool (B,): the min(k, candidates) largest |x| of a row held in registers, ties to the lower index.

    Args:
      x: float32, bfloat16 or float16 (B,).
      candidate: bool (B,), entries that may be taken; NaN never is.
      k: int32 ().
    """
    key = _keys(x, candidate)
    threshold, reached, _ = search(key, k, _SHIFT[x.dtype.name])

    def settle_ties():
        above, tied = key > threshold, key == threshold
        return above | (tied & (jnp.cumsum(tied.astype(jnp.int32)) <= k - _count(above)))

    return lax.cond(reached == k, lambda: key >= threshold, settle_ties)


def select(
    x: jax.Array,
    *window: jax.Array,
    rows: Rows,
    num_rows: int | None = None,
    given_k: bool = False,
    into: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Packed mask of all rows, or of a window of them.

    Args:
      x: float (size,).
      *window: first_row, int32 (), where num_rows is given; then k, int32 (R,) or (num_rows,), where given_k.
      rows: how x is cut, and what is kept where k is not given.
      num_rows: rows of the window; None takes all.
      given_k: k comes as an array.
      into: as in `_pallas.call`.
      interpret: as in `_pallas.call`.

    Returns:
      uint32 (rows.words,), or (num_rows * B / 32,) for a window.
    """
    windowed = num_rows is not None
    programs = rows.count if num_rows is None else num_rows
    num_words = rows.words if num_rows is None else num_rows * rows.row_words

    def kernel(x_ref, *refs):
        *refs, words_ref = refs
        program = pl.program_id(0)
        row = refs[0][0] + program if windowed else program
        keep = refs[-1][program] if given_k else _pallas.keeps(row, rows)
        at, inside = _pallas.entries(row, rows)
        values = plt.load(x_ref.at[at], mask=inside, other=jnp.zeros((), x_ref.dtype))
        words = _pallas.pack_bits(largest(values, inside, keep).reshape(-1, 32))
        word = program * rows.row_words + lax.iota(jnp.int32, rows.row_words)
        plt.store(words_ref.at[word], words, mask=word < num_words)

    (out,) = _pallas.call(
        kernel,
        "select_rows",
        programs,
        [x, *window],
        [(num_words, jnp.uint32)],
        into=None if into is None else {0: into},
        num_warps=_pallas.warps(rows.block, ENTRIES_A_THREAD),
        interpret=interpret,
    )
    return out
