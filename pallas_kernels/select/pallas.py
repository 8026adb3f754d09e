"""Exact top-k of |x| in each row by a Pallas kernel: the row is read once and searched in registers.

The bits of a non-negative float order like its value. The threshold, the k-th largest |x|, is found bit by bit from the
highest down: a bit stays set if at least k entries still reach the threshold. The search ends early where exactly k do.
"""

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


def _keys(x: jax.Array) -> tuple[jax.Array, int]:
    """int32 keys that order like |x|, -1 for NaN, and the number of their bits."""
    infinity = _INFINITY[x.dtype.name]
    if x.dtype.itemsize == 4:
        key, bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF, 31
    else:
        key, bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32) & 0x7FFF, 15
    return jnp.where(key > infinity, -1, key), bits


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask.astype(jnp.int32))


def largest(x: jax.Array, candidate: jax.Array, k: jax.Array) -> jax.Array:
    """bool (B,): the min(k, candidates) largest |x| of a row held in registers, ties to the lower index.

    Args:
      x: float32, bfloat16 or float16 (B,).
      candidate: bool (B,), entries that may be taken; NaN never is.
      k: int32 ().
    """
    key, bits = _keys(x)
    key = jnp.where(candidate, key, -1)

    def narrow(state):
        bit, threshold, reached = state
        trial = threshold | lax.shift_left(jnp.int32(1), bit)
        count = _count(key >= trial)
        enough = count >= k
        return bit - 1, jnp.where(enough, trial, threshold), jnp.where(enough, count, reached)

    start = jnp.int32(bits - 1), jnp.int32(0), jnp.int32(-1)
    _, threshold, _ = lax.while_loop(lambda s: (s[0] >= 0) & (s[2] != k), narrow, start)
    above, tied = key > threshold, key == threshold
    return above | (tied & (jnp.cumsum(tied.astype(jnp.int32)) <= k - _count(above)))


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
