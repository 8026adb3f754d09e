"""What a SCAPE step does before its exchange, by Pallas kernels: the payload in one, the next mask in the other.

Source: arXiv 2607.01678, Algorithm 1. Neither writes into h: whether the step is taken at all is known after the exchange.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import _pallas
from pallas_kernels._rows import Rows
from pallas_kernels.moment_pass.reference import semi_updated
from pallas_kernels.select.pallas import ENTRIES_A_THREAD as SELECT_ENTRIES_A_THREAD
from pallas_kernels.select.pallas import largest

ENTRIES_A_THREAD = 16


def payload(
    h: jax.Array,
    g: jax.Array,
    last: jax.Array,
    words: jax.Array,
    rest: jax.Array,
    *buffer: jax.Array,
    rows: Rows,
    size: int,
    first: int,
    dtype: jnp.dtype,
    squares: bool,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """g + e / (1-b1) of the kept entries, and the sum of g^2 of each row.

    Read: h where a kept entry was not kept last time, g there, or all of g for its squares.

    Args:
      h: float32 (size,).
      g: float32 or bfloat16 (size,).
      last: uint32 (words,), where h holds m.
      words: uint32 (words,), the entries to take.
      rest: float32 (1,), 1 - b1.
      *buffer: dtype (size,), at most one: the payload is written into it.
      rows: how the leaf is cut and what is kept.
      size: entries of the buffer that is written, at least first + rows.kept.
      first: place in it of the first entry.
      dtype: of the payload.
      squares: return the sums of squares too.
      interpret: as in `_pallas.call`.

    Returns:
      (the buffer, undefined where nothing was written; float32 (R,) if `squares`).
    """

    def kernel(h_ref, g_ref, last_ref, words_ref, rest_ref, payload_ref, *squares_ref):
        row = pl.program_id(0)
        words = _pallas.load_words(words_ref, row, rows)
        at, bits = _pallas.tile(row, rows), _pallas.unpack_bits(words)
        residual = bits & ~_pallas.unpack_bits(_pallas.load_words(last_ref, row, rows))
        e = plt.load(h_ref.at[at], mask=residual, other=jnp.float32(0))
        g_mask = at < rows.size if squares else bits
        g = plt.load(g_ref.at[at], mask=g_mask, other=jnp.zeros((), g_ref.dtype)).astype(jnp.float32)
        for ref in squares_ref:
            # Two sums: in one, JAX 0.12 does not find the sharding of the result under a mesh of explicit axes.
            ref[row] = jnp.sum(jnp.sum(g * g, axis=1))
        place, kept = _pallas.ranks(words, row, rows)
        taken = (g + e / rest_ref[0]).astype(payload_ref.dtype)
        plt.store(payload_ref.at[first + place], taken, mask=kept)
        _pallas.fill_rest(payload_ref, words, row, rows, 0, first)

    return tuple(
        _pallas.call(
            kernel,
            "moment_pass",
            rows.count,
            [h, g, last, words, rest],
            [(size, dtype), *([(rows.count, jnp.float32)] if squares else [])],
            into=dict(enumerate(buffer)),
            num_warps=_pallas.warps(rows.block, ENTRIES_A_THREAD),
            interpret=interpret,
        )
    )


def select(
    h: jax.Array,
    g: jax.Array,
    last: jax.Array,
    rates: jax.Array,
    k: jax.Array,
    first_row: jax.Array,
    *,
    rows: Rows,
    num_rows: int,
    finite: bool,
    into: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Packed mask of the k largest |mt| of each row in a window of rows; mt itself is never stored.

    Args:
      h: float32 (size,).
      g: float32 or bfloat16 (size,).
      last: uint32 (words,), where h holds m.
      rates: float32 (2,), b1 and 1 - b1.
      k: int32 (num_rows,).
      first_row: int32 ().
      rows: how the leaf is cut.
      num_rows: rows of the window; those behind the last row are empty.
      finite: a gradient that is not, or is beyond LARGEST, counts as zero.
      into: as in `_pallas.call`.
      interpret: as in `_pallas.call`.

    Returns:
      uint32 (num_rows * B / 32,).
    """

    def kernel(h_ref, g_ref, last_ref, rates_ref, k_ref, first_ref, words_ref):
        program = pl.program_id(0)
        row = first_ref[0] + program
        at, inside = _pallas.tile(row, rows), _pallas.tile(row, rows) < rows.size
        old = plt.load(h_ref.at[at], mask=inside, other=jnp.float32(0))
        new = plt.load(g_ref.at[at], mask=inside, other=jnp.zeros((), g_ref.dtype)).astype(jnp.float32)
        had_m = _pallas.unpack_bits(_pallas.load_words(last_ref, row, rows))
        score = semi_updated(old, new, had_m, rates_ref[0], rates_ref[1], finite)
        chosen = largest(score.reshape(rows.block), inside.reshape(rows.block), k_ref[program])
        word = program * rows.row_words + lax.iota(jnp.int32, rows.row_words)
        plt.store(words_ref.at[word], _pallas.pack_bits(chosen.reshape(-1, 32)))

    (out,) = _pallas.call(
        kernel,
        "select_moment",
        num_rows,
        [h, g, last, rates, k, first_row],
        [(num_rows * rows.row_words, jnp.uint32)],
        into=None if into is None else {0: into},
        num_warps=_pallas.warps(rows.block, SELECT_ENTRIES_A_THREAD),
        interpret=interpret,
    )
    return out
