"""Exact top-k of |x| in each row by a Triton kernel: the row is read once and searched in registers.

The search of `pallas.py`. Ties are settled on the packed words, and only in a row that has some at its threshold.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _pallas, _triton
from pallas_kernels._rows import Rows
from pallas_kernels._triton_rows import keeps, pack_bits, popcount, tile
from pallas_kernels.select import pallas

# Fewer warps a row: each count of the search crosses them.
ENTRIES_A_THREAD = 32
GUESSES = tl.constexpr(pallas.GUESSES)


@triton.jit
def keys(x):
    """int32 keys that order like |x|, -1 for NaN."""
    if x.dtype == tl.float32:
        key = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        infinity = 0x7F800000
    else:
        key = x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        infinity = 0x7F80 if x.dtype == tl.bfloat16 else 0x7C00
    return tl.where(key > infinity, -1, key)


@triton.jit
def log(count):
    """int32, 2^23 log2(2 count + 1), linear between the powers of two."""
    return (2 * count + 1).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def value(pattern, shift: tl.constexpr):
    """float32, finite and proportional to the value of a key."""
    return tl.minimum(pattern << shift, 0x7F7FFFFF).to(tl.float32, bitcast=True)


@triton.jit
def lowest_bits(words, room):
    """The words with their lowest `room` set bits only, at most all."""
    end = tl.zeros_like(room)
    for i in tl.static_range(5):
        # So many of the lowest places hold no more than there is room for.
        trial = end + (16 >> i)
        below = (tl.full(trial.shape, 1, tl.uint32) << trial.to(tl.uint32)) - 1
        end = tl.where(popcount(words & below) <= room, trial, end)
    below = (tl.full(end.shape, 1, tl.uint32) << end.to(tl.uint32)) - 1
    return tl.where(popcount(words) <= room, words, words & below)


@triton.jit
def largest(x, candidate, k, key_bits: tl.constexpr):
    """uint32 (B / 32,): the packed min(k, candidates) largest |x| of a row, ties to the lower index.

    Args:
      x: float (B / 32, 32), held in registers.
      candidate: bool (B / 32, 32), entries that may be taken; NaN never is.
      k: int32 ().
      key_bits: of a key, 31 for float32 and 15 for the 16-bit types.
    """
    key = tl.where(candidate, keys(x), -1)
    # From a key to the bits of a float32 that is proportional to its value.
    shift: tl.constexpr = 13 if x.dtype == tl.float16 else 31 - key_bits
    log_k = log(k)
    step, low, high, reached, above = 0, 0, tl.max(key) + 1, -1, 0
    excess = (log(tl.full((), x.numel, tl.int32)) - log_k).to(tl.float32)
    lack = (log(tl.full((), 0, tl.int32)) - log_k).to(tl.float32)
    was_enough, stalled = k < 0, k < 0
    while (reached != k) & (high - low > 1):
        at_low, at_high = value(low, shift), value(high, shift)
        guess = at_low + (at_high - at_low) * (excess / (excess - lack))
        trial = guess.to(tl.int32, bitcast=True) >> shift
        trial = tl.where(step < GUESSES, trial, low + ((high - low) >> 1))
        if stalled:
            trial = tl.max(tl.where(key < high, key, -1))
        trial = tl.minimum(tl.maximum(trial, low + 1), high - 1)
        # As `pallas._reaching`.
        count = x.numel - tl.sum(((key - trial).to(tl.uint32) >> 31).to(tl.int32))
        enough, ratio = count >= k, (log(count) - log_k).to(tl.float32)
        weight = 1 - ratio / tl.where(enough, excess, lack)
        weight = tl.where(weight > 0, weight, 0.5)
        weight = tl.where(enough == was_enough, weight, 1.0)
        stalled = (count < k) & (count == above)
        low, high = tl.where(enough, trial, low), tl.where(enough, high, trial)
        reached, above = tl.where(enough, count, reached), tl.where(enough, above, count)
        excess, lack = tl.where(enough, ratio, excess * weight), tl.where(enough, lack * weight, ratio)
        was_enough, step = enough, step + 1
    if reached == k:
        words = pack_bits(key >= low)
    else:
        words = pack_bits(key > low)
        tied = pack_bits(key == low)
        number = popcount(tied)
        before = tl.cumsum(number) - number
        words |= lowest_bits(tied, k - tl.sum(popcount(words)) - before)
    return words


@triton.jit
def select_rows(
    x_ptr,
    first_row_ptr,
    k_ptr,
    words_ptr,
    windowed: tl.constexpr,
    given_k: tl.constexpr,
    num_words: tl.constexpr,
    size: tl.constexpr,
    count: tl.constexpr,
    k: tl.constexpr,
    k_last: tl.constexpr,
    block: tl.constexpr,
    key_bits: tl.constexpr,
):
    program = tl.program_id(0)
    row = program
    if windowed:
        row += tl.load(first_row_ptr)
    if given_k:
        keep = tl.load(k_ptr + program)
    else:
        keep = keeps(row, count, k, k_last)
    at = tile(row * block, block // 32)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0)
    words = largest(x, at < size, keep, key_bits)
    word = program * (block // 32) + tl.arange(0, block // 32)
    tl.store(words_ptr + word, words, mask=word < num_words)


def select(
    x: jax.Array,
    *window: jax.Array,
    rows: Rows,
    num_rows: int | None = None,
    given_k: bool = False,
    into: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """As `pallas.select`."""
    windowed = num_rows is not None
    num_words = rows.words if num_rows is None else num_rows * rows.row_words
    constants: dict[str, Any] = {
        "windowed": windowed,
        "given_k": given_k,
        "num_words": num_words,
        "size": rows.size,
        "count": rows.count,
        "k": rows.k,
        "k_last": rows.keeps_last,
        "block": rows.block,
        "key_bits": 8 * x.dtype.itemsize - 1,
    }
    (out,) = _triton.call(
        select_rows,
        "select_rows",
        rows.count if num_rows is None else num_rows,
        [x, window[0] if windowed else None, window[-1] if given_k else None],
        [(num_words, jnp.uint32)],
        constants=constants,
        into=None if into is None else {0: into},
        num_warps=_pallas.warps(rows.block, ENTRIES_A_THREAD),
        interpret=interpret,
    )
    return out
