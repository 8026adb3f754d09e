"""What a SCAPE step does before its exchange, by Triton kernels: the payload in one, the next mask in the other.

Source: arXiv 2607.01678, Algorithm 1. The twins of `pallas.py`: the same buffers, each entry read as often.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _pallas, _triton
from pallas_kernels._rows import Rows
from pallas_kernels._triton_rows import keeps, load_words, popcount, ranks, tile, unpack_bits
from pallas_kernels.moment_pass.pallas import ENTRIES_A_THREAD, SELECT_ENTRIES_A_THREAD
from pallas_kernels.moment_pass.reference import LARGEST
from pallas_kernels.select.triton import largest

largest_gradient = tl.constexpr(LARGEST)


@triton.jit
def semi_updated(h, g, had_m, b1, rest, finite: tl.constexpr):
    """mt = b1 m_{t-1} + (1-b1) g + e, as `reference.semi_updated`."""
    if finite:
        g = tl.where(tl.abs(g) < largest_gradient, g, 0.0)
    return tl.where(had_m, b1 * h, h) + rest * g


@triton.jit
def moment_pass(
    h_ptr,
    g_ptr,
    last_ptr,
    words_ptr,
    rest_ptr,
    payload_ptr,
    squares_ptr,
    squares: tl.constexpr,
    first: tl.constexpr,
    size: tl.constexpr,
    count: tl.constexpr,
    k: tl.constexpr,
    k_last: tl.constexpr,
    block: tl.constexpr,
    slots: tl.constexpr,
):
    row = tl.program_id(0)
    row_words: tl.constexpr = block // 32
    words = load_words(words_ptr, row * row_words, row_words, size)
    at, bits = tile(row * block, row_words), unpack_bits(words)
    residual = bits & (unpack_bits(load_words(last_ptr, row * row_words, row_words, size)) == 0)
    e = tl.load(h_ptr + at, mask=residual, other=0.0)
    g = tl.load(g_ptr + at, mask=at < size if squares else bits, other=0.0).to(tl.float32)
    if squares:
        tl.store(squares_ptr + row, tl.sum(g * g))
    rank, keep = ranks(words), keeps(row, count, k, k_last)
    taken = g + e / tl.load(rest_ptr)
    start = payload_ptr + first + row * k
    tl.store(start + rank, taken.to(payload_ptr.dtype.element_ty), mask=bits & (rank < keep))
    # A row with fewer set bits than it keeps.
    slot = tl.arange(0, slots)
    rest = (slot >= tl.sum(popcount(words))) & (slot < keep)
    tl.store(start + slot, tl.zeros((slots,), payload_ptr.dtype.element_ty), mask=rest)


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
    """As `pallas.payload`."""
    constants: dict[str, Any] = {
        "squares": squares,
        "first": first,
        "size": rows.size,
        "count": rows.count,
        "k": rows.k,
        "k_last": rows.keeps_last,
        "block": rows.block,
        "slots": triton.next_power_of_2(rows.k),
    }
    return tuple(
        _triton.call(
            moment_pass,
            "moment_pass",
            rows.count,
            [h, g, last, words, rest],
            [(size, dtype), *([(rows.count, jnp.float32)] if squares else [])],
            constants=constants if squares else constants | {"squares_ptr": None},
            into=dict(enumerate(buffer)),
            num_warps=_pallas.warps(rows.block, ENTRIES_A_THREAD),
            interpret=interpret,
        )
    )


@triton.jit
def select_moment(
    h_ptr,
    g_ptr,
    last_ptr,
    rates_ptr,
    k_ptr,
    first_row_ptr,
    words_ptr,
    finite: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0)
    row = tl.load(first_row_ptr) + program
    row_words: tl.constexpr = block // 32
    at = tile(row * block, row_words)
    h = tl.load(h_ptr + at, mask=at < size, other=0.0)
    g = tl.load(g_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    had_m = unpack_bits(load_words(last_ptr, row * row_words, row_words, size))
    score = semi_updated(h, g, had_m, tl.load(rates_ptr), tl.load(rates_ptr + 1), finite)
    words = largest(score, at < size, tl.load(k_ptr + program), 31)
    tl.store(words_ptr + program * row_words + tl.arange(0, row_words), words)


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
    """As `pallas.select`."""
    (out,) = _triton.call(
        select_moment,
        "select_moment",
        num_rows,
        [h, g, last, rates, k, first_row],
        [(num_rows * rows.row_words, jnp.uint32)],
        constants={"finite": finite, "size": rows.size, "block": rows.block},
        into=None if into is None else {0: into},
        num_warps=_pallas.warps(rows.block, SELECT_ENTRIES_A_THREAD),
        interpret=interpret,
    )
    return out
