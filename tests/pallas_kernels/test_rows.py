"""The operations on rows against NumPy, each in every form that runs here: plain JAX, and the kernels interpreted.

Bit for bit, because none of them computes with a value. Buffers that a kernel writes are longer than what it should
write, and so are those it reads: the rest must stay as it was and have no influence. A negative position would wrap
around into that rest.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels import bits, compact, select
from pallas_kernels._rows import Rows
from tests.helpers import assert_bit_equal
from tests.pallas_kernels.reference_numpy import (
    numpy_columns,
    numpy_compact,
    numpy_pack,
    numpy_scatter,
    numpy_select,
    numpy_unpack,
)
from tests.pallas_kernels.triton_on_cpu import both_kernels, needs_triton

FORMS = {"xla": {"implementation": "xla"}, "pallas": {"implementation": "pallas", "interpret": True}}
# Of the operations that have a Triton kernel too.
FORMS_WITH_TRITON = {**FORMS, "triton": {"implementation": "triton", "interpret": True}}
every_form = pytest.mark.parametrize("form", [*FORMS, pytest.param("triton", marks=needs_triton)])
B = 64
# Entries and what each row keeps: one row, a full row, one more, a short last row that keeps less, all.
CUTS = [
    Rows(1, B, 1),
    Rows(B - 1, B, 7),
    Rows(B, B, B),
    Rows(B + 1, B, 21, 1),
    Rows(3 * B + 13, B, 21, 4),
    Rows(2 * B + 33, B, B),
]
SENTINELS = 70  # more than a row

few = settings(max_examples=12)
many_rows = st.sampled_from(CUTS)


@functools.cache
def jitted(op, form, **static):
    return jax.jit(functools.partial(op, **static, **FORMS_WITH_TRITON[form]))


def in_every_form(op, *arrays, **static):
    """The result, equal in all forms, as NumPy array."""
    results = [np.asarray(jitted(op, form, **static)(*arrays)) for form in FORMS]
    for other in results[1:]:
        assert_bit_equal(other, results[0])
    return results[0]


def as_dtype(x: np.ndarray, dtype) -> np.ndarray:
    """Bit patterns: bfloat16 is the upper half of a float32, so NaN, infinities, zeros and denormals stay such."""
    if dtype == jnp.float32:
        return x
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(jnp.bfloat16)


@st.composite
def leaves(draw, size, dtype=jnp.float32):
    """Any bits, few values (ties), one value, or special ones."""
    kind = draw(st.sampled_from(("bits", "ties", "equal", "special")))
    if kind == "bits":
        bits = draw(hnp.arrays(np.uint32, size))
    else:
        pool = {
            "ties": [0x3F800000, 0xBF800000, 0, 0x80000000],
            "equal": [draw(st.integers(0, 2**32 - 1))],
            "special": [
                0,
                1,
                0x00400000,
                0x007F0000,
                0x00800000,
                0x7F7F0000,
                0x7F800000,
                0x7F810000,
                0x7FC00000,
            ],
        }[kind]
        bits = np.array(pool, np.uint32)[
            draw(hnp.arrays(np.int8, size, elements=st.integers(0, len(pool) - 1)))
        ]
        if kind == "special":
            bits = bits | (draw(hnp.arrays(bool, size)).astype(np.uint32) << 31)
    return as_dtype(bits.view(np.float32), dtype)


def with_garbage(words, size, garbage):
    """The words with the pad bits of each last one set from `garbage`."""
    words = words.copy()
    if size % 32:
        words[..., -1] |= np.uint32(garbage << size % 32 & 0xFFFFFFFF)
    return words


@st.composite
def masks(draw, rows):
    """Exactly what each row keeps, or any number of bits; with garbage in the pad bits."""
    if draw(st.booleans()):
        mask = draw(hnp.arrays(bool, rows.size))
    else:
        order = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        mask = np.zeros(rows.size, bool)
        for start in range(0, rows.size, rows.block):
            row = mask[start : start + rows.block]
            last = start + rows.block >= rows.size
            row[order.permutation(row.size)[: rows.keeps_last if last else rows.k]] = True
    return mask, with_garbage(numpy_pack(mask), rows.size, draw(st.integers(0, 2**32 - 1)))


def wide(x: np.ndarray, fill) -> np.ndarray:
    """x with entries behind it that no kernel may read or write."""
    return np.concatenate([x, np.full((SENTINELS,), fill, x.dtype)])


# Packing ----------------------------------------------------------------------------------------------------------


@few
@given(st.data(), st.sampled_from([(0,), (1,), (31,), (33,), (B - 1,), (B,), (B + 1,), (3, 37), (2, 2, B)]))
def test_pack_and_unpack(data, shape):
    mask = data.draw(hnp.arrays(bool, shape))
    if mask.size == 0:  # no kernel for nothing
        assert bits.pack_rows(mask, block=B).shape == (0,)
        assert bits.unpack_rows(np.zeros(0, np.uint32), 0, block=B).shape == (0,)
        return
    words = in_every_form(bits.pack_rows, mask, block=B)
    assert_bit_equal(words, numpy_pack(mask))
    words = with_garbage(words, shape[-1], data.draw(st.integers(0, 2**32 - 1)))
    assert_bit_equal(in_every_form(bits.unpack_rows, words, size=shape[-1], block=B), mask)


@pytest.mark.parametrize("dtype", bits.MASK_DTYPES)
def test_pack_takes_masks_of_any_integer_dtype(dtype):
    """Set is what is not zero: a 2 is one bit, not the bit beside it."""
    mask = (np.arange(45) % 3).astype(dtype)
    assert_bit_equal(in_every_form(bits.pack_rows, mask, block=32), numpy_pack(mask != 0))


def test_known_word():
    """Case 7: entries 0 and 12 of 13 are 0x1001, and garbage behind them is no entry."""
    mask = np.isin(np.arange(13), [0, 12])
    assert in_every_form(bits.pack_rows, mask, block=B).tolist() == [0x1001]
    garbage = np.array([0xFFFFE000 | 0x1001], np.uint32)
    assert_bit_equal(in_every_form(bits.unpack_rows, garbage, size=13, block=B), mask)


# Selection --------------------------------------------------------------------------------------------------------


@every_form
@few
@given(data=st.data(), size=st.sampled_from((1, B - 1, B, B + 1, 2 * B + 33)))
def test_select(form, data, size):
    rows = Rows(size, B)
    x = data.draw(leaves(size))
    k = data.draw(hnp.arrays(np.int32, rows.count, elements=st.integers(0, B)))
    got = jitted(select.select_rows, form, block=B)(x, k)
    assert_bit_equal(np.asarray(got), numpy_pack(selected(x, k, B)))


def selected(x, k, block):
    grid = np.full((-(-x.size // block), block), np.nan, np.float32)
    grid.reshape(-1)[: x.size] = x.astype(np.float32)
    return numpy_select(grid, k).reshape(-1)[: x.size]


@every_form
@few
@given(x=leaves(2 * B + 33, jnp.bfloat16), k=st.sampled_from((5, 21)))
def test_select_of_bfloat16_with_a_static_k(form, x, k):
    got = jitted(select.select_rows, form, k=k, k_last=3, block=B)(x)
    assert_bit_equal(np.asarray(got), numpy_pack(selected(x, [k, k, 3], B)))


@every_form
def test_select_of_float16(form):
    """Infinity and NaN have other bits there."""
    x = np.random.default_rng(3).standard_normal(2 * B + 33).astype(np.float16)
    x[::5], x[1::7] = np.nan, -np.inf
    got = jitted(select.select_rows, form, k=21, k_last=13, block=B)(x)
    assert_bit_equal(np.asarray(got), numpy_pack(selected(x, [21, 21, 13], B)))


def window(x, first, **options):
    return select.select_rows(x, 5, first_row=first, num_rows=2, **options)


@every_form
@few
@given(x=leaves(2 * B + 33), first=st.integers(0, 5))
def test_select_of_a_window(form, x, first):
    """One worker's rows, which may end behind the last one: no bits there, and nothing of other rows here."""
    got = jitted(window, form, block=B)(x, np.int32(first))
    whole = np.zeros(8 * B, bool)
    whole[: x.size] = selected(x, [5, 5, 5], B)
    assert_bit_equal(np.asarray(got), numpy_pack(whole[first * B : (first + 2) * B]))


@every_form
def test_select_at_the_default_block(form):
    """k odd; equal rows, normal ones, a short last row."""
    x = np.random.default_rng(0).standard_normal(2 * 4096 + 100).astype(np.float32)
    x[:4096] = -0.25
    got = jitted(select.select_rows, form, k=705, k_last=17)(x)
    assert_bit_equal(np.asarray(got), numpy_pack(selected(x, [705, 705, 17], 4096)))


# Kept entries -----------------------------------------------------------------------------------------------------


def cut_of(rows):
    return {"k": rows.k, "k_last": rows.k_last, "block": rows.block}


@few
@given(st.data(), many_rows)
def test_compact_and_scatter(data, rows):
    """Rows with too many or too few set bits too: what is read and written stays inside the row's own part."""
    x = data.draw(leaves(rows.size))
    mask, words = data.draw(masks(rows))
    values = in_every_form(compact.compact_rows, x, words, **cut_of(rows))
    assert_bit_equal(values, numpy_compact(x, mask, rows.block, rows.k, rows.keeps_last))
    new = data.draw(leaves(rows.kept))
    got = in_every_form(compact.scatter_rows, x, new, words, **cut_of(rows))
    assert_bit_equal(got, numpy_scatter(x, new, mask, rows.block, rows.k, rows.keeps_last))


@few
@given(st.data(), many_rows)
def test_columns_and_back(data, rows):
    mask, words = data.draw(masks(rows))
    columns = in_every_form(compact.index_rows, words, size=rows.size, k=rows.k, block=rows.block)
    assert_bit_equal(columns, numpy_columns(mask, rows.block, rows.k))
    back = in_every_form(compact.mask_rows, columns, size=rows.size, block=rows.block)
    assert_bit_equal(back, numpy_first(mask, rows))


def numpy_first(mask, rows):
    """The packed mask of the first k set bits of each row."""
    ones = np.ones(rows.count * rows.k, bool)
    return numpy_pack(numpy_scatter(np.zeros(rows.size, bool), ones, mask, rows.block, rows.k, rows.k))


def test_bfloat16_and_the_default_block():
    """The whole way at once: select, compact, scatter into another buffer, columns and back."""
    x = as_dtype(np.random.default_rng(1).standard_normal(4096 + 100).astype(np.float32), jnp.bfloat16)
    cut = {"k": 705, "k_last": 17, "block": 4096}
    words = in_every_form(select.select_rows, x, **cut)
    mask = numpy_unpack(words, x.size)
    assert mask.sum() == 722
    values = in_every_form(compact.compact_rows, x, words, **cut)
    assert_bit_equal(values, x[mask])
    back = in_every_form(compact.scatter_rows, np.zeros_like(x), values, words, **cut)
    assert_bit_equal(back, np.where(mask, x, np.zeros_like(x)))
    columns = in_every_form(compact.index_rows, words, size=x.size, k=705)
    assert_bit_equal(in_every_form(compact.mask_rows, columns, size=x.size), words)


# Outside of the buffers -------------------------------------------------------------------------------------------


def check_inside(kernel, wanted, sentinel, *arrays, **static):
    """The kernel's output in the front of a longer buffer of sentinels, and the sentinels behind it."""
    into = wide(np.full(wanted.shape, sentinel, wanted.dtype), sentinel)
    got = np.asarray(kernel(*arrays, **static, into=into, interpret=True))
    assert_bit_equal(got, wide(wanted, sentinel))


@both_kernels("select", "select")
@pytest.mark.parametrize("rows", CUTS[3:5], ids=str)
def test_select_stays_inside_its_buffers(rows, kernel):
    """What lies behind x would be selected before all else."""
    x = np.random.default_rng(0).standard_normal(rows.size).astype(np.float32)
    mask = selected(x, [rows.k] * (rows.count - 1) + [rows.keeps_last], rows.block)
    check_inside(kernel, numpy_pack(mask), 7, wide(x, np.inf), rows=rows)


@pytest.mark.parametrize("every", [1, 40], ids=["more than is kept", "fewer than is kept"])
@pytest.mark.parametrize("rows", CUTS[3:5], ids=str)
def test_kernels_stay_inside_their_buffers(rows, every):
    """What lies behind a buffer is NaN, inf or ones. Too many set bits must not run over the end, nor what stands for
    the missing ones where there are too few.
    """
    mask = np.arange(rows.size) % every == 0
    words, x = numpy_pack(mask), np.random.default_rng(0).standard_normal(rows.size).astype(np.float32)
    cut, all_k = (rows.block, rows.k, rows.keeps_last), (rows.block, rows.k, rows.k)
    check_inside(bits.pallas.pack, words, 7, mask, block=rows.block)
    check_inside(bits.pallas.unpack, mask, False, words, size=rows.size, block=rows.block)
    words = wide(words, 0xFFFFFFFF)
    values = numpy_compact(x, mask, *cut)
    check_inside(compact.pallas.compact, values, 7.0, wide(x, np.nan), words, rows=rows)
    columns = numpy_columns(mask, rows.block, rows.k)
    listed = Rows(rows.size, *all_k)
    check_inside(compact.pallas.indices, columns.reshape(-1), 7, words, rows=listed)
    check_inside(compact.pallas.mask, numpy_first(mask, rows), 7, wide(columns.reshape(-1), 0), rows=listed)
    got = compact.pallas.scatter(wide(x, 7.0), wide(values * 2, 9.0), words, rows=rows, interpret=True)
    assert_bit_equal(np.asarray(got), wide(numpy_scatter(x, values * 2, mask, *cut), 7.0))
