"""The payload and the next mask against NumPy, in every form that runs here. Buffers end in what nothing may touch."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import moment_pass as op
from pallas_kernels._rows import Rows
from tests.helpers import assert_bit_equal, assert_close
from tests.pallas_kernels.reference_numpy import numpy_compact, numpy_pack
from tests.pallas_kernels.test_rows import (
    CUTS,
    FORMS_WITH_TRITON,
    B,
    cut_of,
    every_form,
    jitted,
    leaves,
    masks,
    selected,
    wide,
)
from tests.pallas_kernels.triton_on_cpu import both_kernels

# XLA may divide by 1 - b1 or multiply by its inverse. Where bits are compared, b1 is HALF: there both are exact.
B1, HALF = np.float32(0.9), np.float32(0.5)
few = settings(max_examples=12)


def numpy_taken(h, g, had_m, b1=HALF):
    with np.errstate(all="ignore"):
        return (g.astype(np.float32) + np.where(had_m, np.float32(0), h) / (1 - b1)).astype(np.float32)


def ordinary(x):
    """Without what is so small that a sum or difference of two may be denormal: XLA on CPU makes zeros of those."""
    return np.where(np.abs(x) < 2.0**-100, 0, x).astype(x.dtype)


@every_form
@few
@given(data=st.data(), rows=st.sampled_from(CUTS), dtype=st.sampled_from((jnp.float32, jnp.bfloat16)))
def test_payload(form, data, rows, dtype):
    """Any bits in h and g, masks with any counts; NaN and infinities where they belong."""
    h, g = ordinary(data.draw(leaves(rows.size))), ordinary(data.draw(leaves(rows.size, dtype)))
    had_m, last = data.draw(masks(rows))
    mask, words = data.draw(masks(rows))
    want = numpy_compact(numpy_taken(h, g, had_m, B1), mask, rows.block, rows.k, rows.keeps_last)
    assert_close(jitted(taken_only, form, rows=rows)(h, g, last, words, B1), want)


def taken_only(h, g, last, words, b1, rows, **options):
    cut = cut_of(rows)
    return op.moment_pass(h, g, last, words, cut.pop("k"), b1=b1, squares=False, **cut, **options)[0]


def both(h, g, last, words, b1, rows, **options):
    cut = cut_of(rows)
    return op.moment_pass(h, g, last, words, cut.pop("k"), b1=b1, dtype=jnp.bfloat16, **cut, **options)


@every_form
@pytest.mark.parametrize("rows", CUTS, ids=str)
def test_squares_of_whole_rows_and_a_bfloat16_payload(form, rows):
    """All entries count, kept or not; the payload is rounded once."""
    h, g = np.random.default_rng(0).standard_normal((2, rows.size)).astype(np.float32)
    last, words = np.arange(rows.size) % 3 == 0, np.arange(rows.size) % 2 == 0
    kept, squares = jitted(both, form, rows=rows)(h, g, numpy_pack(last), numpy_pack(words), HALF)
    cut = (rows.block, rows.k, rows.keeps_last)
    assert kept.dtype == jnp.bfloat16
    assert_bit_equal(
        np.asarray(kept), numpy_compact(numpy_taken(h, g, last).astype(jnp.bfloat16), words, *cut)
    )
    grid = np.zeros(rows.count * rows.block)
    grid[: rows.size] = g
    assert_close(
        squares, np.sum(np.square(grid.reshape(rows.count, -1)), axis=1), terms=rows.block, dtype=jnp.float32
    )


@every_form
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_squares_show_what_is_not_finite(form, value):
    """Also in the last entry of a short row, and where nothing is kept."""
    rows = CUTS[4]
    g = np.zeros(rows.size, np.float32)
    g[-1] = value
    nothing = np.zeros(rows.words, np.uint32)
    _, squares = jitted(both, form, rows=rows)(np.zeros_like(g), g, nothing, nothing, B1)
    assert np.isfinite(squares[:-1]).all()
    assert not np.isfinite(squares[-1])


def written_into(h, g, last, words, b1, buffer, rows, first, **options):
    cut = cut_of(rows)
    return op.moment_pass(
        h, g, last, words, cut.pop("k"), b1=b1, squares=False, into=buffer, first=first, **cut, **options
    )[0]


@every_form
@pytest.mark.parametrize("every", [1, 40], ids=["more than is kept", "fewer than is kept"])
@pytest.mark.parametrize("rows", CUTS[3:5], ids=str)
def test_the_payload_lies_between_its_neighbours(rows, every, form):
    """In a buffer of many leaves: what stands before and behind stays, also where a row has too many or few bits."""
    h, g = np.random.default_rng(0).standard_normal((2, rows.size)).astype(np.float32)
    mask, nothing = np.arange(rows.size) % every == 0, np.zeros(rows.words, np.uint32)
    buffer = np.full(5 + rows.kept + 70, 7, np.float32)
    want = buffer.copy()
    cut = (rows.block, rows.k, rows.keeps_last)
    want[5 : 5 + rows.kept] = numpy_compact(numpy_taken(h, g, np.zeros_like(mask)), mask, *cut)
    arrays = (h, g, nothing, numpy_pack(mask), HALF, buffer)
    assert_bit_equal(np.asarray(jitted(written_into, form, rows=rows, first=5)(*arrays)), want)


@both_kernels("moment_pass", "payload")
def test_the_kernel_reads_inside_its_buffers(kernel):
    """Behind h and g stands NaN, behind the masks all is set."""
    rows = CUTS[4]
    h, g = np.random.default_rng(0).standard_normal((2, rows.size)).astype(np.float32)
    mask, last = np.arange(rows.size) % 2 == 0, np.arange(rows.size) % 3 == 0
    ones, rest = 0xFFFFFFFF, np.array([HALF])
    options = {"rows": rows, "size": rows.kept, "first": 0, "dtype": jnp.dtype(jnp.float32), "squares": True}
    masks = [wide(numpy_pack(m), ones) for m in (last, mask)]
    kept, squares = kernel(wide(h, np.nan), wide(g, np.nan), *masks, rest, **options, interpret=True)
    want = numpy_compact(numpy_taken(h, g, last), mask, rows.block, rows.k, rows.keeps_last)
    assert_bit_equal(np.asarray(kept), want)
    assert np.isfinite(squares).all()


# The next mask ----------------------------------------------------------------------------------------------------


@every_form
@few
@given(
    data=st.data(),
    size=st.sampled_from((B - 1, B + 1, 3 * B + 13)),
    dtype=st.sampled_from((jnp.float32, jnp.bfloat16)),
)
def test_next_mask(form, data, size, dtype):
    """b1 and 1 - b1 are 1/2 here, so that the score is exact and the mask can be compared bit for bit."""
    rows = Rows(size, B)
    h, g = ordinary(data.draw(leaves(size))), ordinary(data.draw(leaves(size, dtype)))
    had_m, last = data.draw(masks(Rows(size, B, 7)))
    first, k = data.draw(st.integers(0, 3)), data.draw(st.integers(0, B))
    arrays = (h, g, last, np.full(2, k, np.int32), np.int32(first))
    got = np.asarray(jitted(next_mask, form, num_rows=2)(*arrays))
    whole = np.zeros(8 * B, bool)
    whole[:size] = selected(numpy_score(h, g, had_m), [k] * rows.count, B)
    assert_bit_equal(got, numpy_pack(whole[first * B : (first + 2) * B]))


def numpy_score(h, g, had_m):
    half = np.float32(0.5)
    with np.errstate(all="ignore"):
        return (np.where(had_m, half * h, h) + half * g.astype(np.float32)).astype(np.float32)


def next_mask(h, g, last, k, first, num_rows, **options):
    return op.select_moment(h, g, last, k, b1=0.5, first_row=first, num_rows=num_rows, block=B, **options)


@every_form
def test_next_mask_at_the_default_block(form):
    rng = np.random.default_rng(3)
    size = 2 * 4096 + 100
    h, g = rng.standard_normal((2, size)).astype(np.float32)
    had_m = rng.random(size) < 0.1
    call = functools.partial(op.select_moment, b1=0.5, first_row=1, num_rows=2, **FORMS_WITH_TRITON[form])
    got = call(h, g, numpy_pack(had_m), np.array([705, 17], np.int32))
    want = np.zeros(4 * 4096, bool)
    want[:size] = selected(numpy_score(h, g, had_m), [410, 705, 17], 4096)
    assert_bit_equal(np.asarray(got), numpy_pack(want[4096 : 3 * 4096]))


def test_no_entries():
    """No kernel for nothing, and no error: an empty leaf, and rows that keep nothing."""
    none, no_words = np.zeros(0, np.float32), np.zeros(0, np.uint32)
    kept, squares = op.moment_pass(none, none, no_words, no_words, 3, b1=0.9)
    assert (kept.shape, squares.shape) == ((0,), (0,))
    got = op.select_moment(none, none, no_words, np.ones(2, np.int32), b1=0.9, first_row=0, num_rows=2)
    assert_bit_equal(np.asarray(got), np.zeros(256, np.uint32))
    x, words = np.ones(70, np.float32), np.full(3, 0xFFFFFFFF, np.uint32)
    kept, squares = op.moment_pass(x, x, words, words, 0, b1=0.9, block=B)
    assert (kept.shape, squares.tolist()) == ((0,), [64.0, 6.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h": np.zeros(70, jnp.bfloat16)}, "h must be float32 with 70 entries"),
        ({"g": np.zeros(69, np.float32)}, "g must be floating-point with 70 entries"),
        ({"last": np.zeros(2, np.uint32)}, r"words must be uint32 \(3,\)"),
        ({"block": 1000}, "block must be one of 32, 64"),
        ({"into": np.zeros(13, np.float32), "first": 4}, r"at least first \+ 10 entries"),
    ],
)
def test_arguments_are_checked(change, message):
    arguments = {
        "h": np.zeros(70, np.float32),
        "g": np.zeros(70, np.float32),
        "last": np.zeros(3, np.uint32),
        "words": np.zeros(3, np.uint32),
        "k": 5,
        "b1": 0.9,
        "block": 64,
    } | change
    with pytest.raises(ValueError, match=message):
        op.moment_pass(**arguments)
