"""Kept entries of a row to a short list and back by Pallas kernels: a prefix sum inside the row, no scan across rows.

Row r's list starts at r * k whatever the other rows hold, because every row but the last keeps k. One program a row.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import _pallas
from pallas_kernels._rows import Rows
from pallas_kernels.compact.reference import NO_COLUMN

# 32 need twice the registers, which leaves room for fewer programs.
ENTRIES_A_THREAD = 16


def compact(
    x: jax.Array, words: jax.Array, *, rows: Rows, into: jax.Array | None = None, interpret: bool = False
) -> jax.Array:
    """(size,), packed mask -> (rows.kept,) kept entries; `into` as in `_pallas.call`."""

    def kernel(x_ref, words_ref, out_ref):
        row = pl.program_id(0)
        words = _pallas.load_words(words_ref, row, rows)
        # Loaded where a bit is set, not where it counts: the load need not wait for the ranks.
        values = plt.load(
            x_ref.at[_pallas.tile(row, rows)],
            mask=_pallas.unpack_bits(words),
            other=jnp.zeros((), x_ref.dtype),
        )
        place, kept = _pallas.ranks(words, row, rows)
        plt.store(out_ref.at[place], values, mask=kept)
        _pallas.fill_rest(out_ref, words, row, rows, 0)

    (out,) = _pallas.call(
        kernel,
        "compact_rows",
        rows.count,
        [x, words],
        [(rows.kept, x.dtype)],
        into=None if into is None else {0: into},
        num_warps=_pallas.warps(rows.block, ENTRIES_A_THREAD),
        interpret=interpret,
    )
    return out


def scatter(
    buffer: jax.Array, values: jax.Array, words: jax.Array, *, rows: Rows, interpret: bool = False
) -> jax.Array:
    """(>= size,) buffer with its kept entries replaced by `values` (rows.kept,), in place where it is donated."""

    def kernel(values_ref, words_ref, out_ref):
        row = pl.program_id(0)
        place, kept = _pallas.ranks(_pallas.load_words(words_ref, row, rows), row, rows)
        new = plt.load(values_ref.at[place], mask=kept, other=jnp.zeros((), values_ref.dtype))
        plt.store(out_ref.at[_pallas.tile(row, rows)], new, mask=kept)

    (out,) = _pallas.call(
        kernel,
        "scatter_rows",
        rows.count,
        [values, words],
        [(rows.size, buffer.dtype)],
        into={0: buffer},
        num_warps=_pallas.warps(rows.block, ENTRIES_A_THREAD),
        interpret=interpret,
    )
    return out


def indices(
    words: jax.Array, *, rows: Rows, into: jax.Array | None = None, interpret: bool = False
) -> jax.Array:
    """Packed mask -> uint16 (rows.kept,) columns, NO_COLUMN where a row has fewer; `into` as in `_pallas.call`."""

    def kernel(words_ref, out_ref):
        row = pl.program_id(0)
        words = _pallas.load_words(words_ref, row, rows)
        place, kept = _pallas.ranks(words, row, rows)
        column = _pallas.tile(row, rows) - row * rows.block
        plt.store(out_ref.at[place], column.astype(jnp.uint16), mask=kept)
        _pallas.fill_rest(out_ref, words, row, rows, NO_COLUMN)

    (out,) = _pallas.call(
        kernel,
        "index_rows",
        rows.count,
        [words],
        [(rows.kept, jnp.uint16)],
        into=None if into is None else {0: into},
        num_warps=_pallas.warps(rows.block, ENTRIES_A_THREAD),
        interpret=interpret,
    )
    return out


def mask(
    columns: jax.Array, *, rows: Rows, into: jax.Array | None = None, interpret: bool = False
) -> jax.Array:
    """(R * k,) ascending columns -> packed mask; columns behind the row's end are none; `into` as in `_pallas.call`.

    Each word finds its first column by bisection of the row's list, then takes columns as long as they are its own.
    No atomics, so nothing need be zeroed before.
    """

    def kernel(columns_ref, words_ref):
        row = pl.program_id(0)
        word = lax.iota(jnp.int32, rows.row_words)
        length = jnp.minimum(rows.size - row * rows.block, rows.block)

        def column_at(j):
            at = jnp.where(j < rows.k, row * rows.k + j, 0)
            value = plt.load(columns_ref.at[at], mask=j < rows.k, other=jnp.zeros((), columns_ref.dtype))
            return jnp.where(j < rows.k, value.astype(jnp.int32), NO_COLUMN)

        def halve(i, found):
            # The number of columns below the word, bit by bit from the highest.
            trial = found + lax.shift_left(jnp.int32(1), rows.k.bit_length() - 1 - i)
            return jnp.where((trial <= rows.k) & (column_at(trial - 1) < word * 32), trial, found)

        first = lax.fori_loop(0, rows.k.bit_length(), halve, jnp.zeros((rows.row_words,), jnp.int32))

        def mine(j):
            column = column_at(j)
            return column, (column < length) & (column < word * 32 + 32)

        def take(state):
            j, packed, column, more = state
            bit = lax.shift_left(jnp.uint32(1), (column & 31).astype(jnp.uint32))
            packed = jnp.where(more, packed | bit, packed)
            return j + 1, packed, *mine(j + 1)

        start = first, jnp.zeros((rows.row_words,), jnp.uint32), *mine(first)
        _, packed, _, _ = lax.while_loop(lambda s: jnp.max(s[3].astype(jnp.int32)) > 0, take, start)
        at = row * rows.row_words + word
        plt.store(words_ref.at[at], packed, mask=at < rows.words)

    (out,) = _pallas.call(
        kernel,
        "mask_rows",
        rows.count,
        [columns],
        [(rows.words, jnp.uint32)],
        into=None if into is None else {0: into},
        num_warps=1,
        interpret=interpret,
    )
    return out
