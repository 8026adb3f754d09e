"""Compaction of packed masks and the blocked row sum against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.compact import (
    cumsum_rows,
    in_turn,
    is_computed,
    is_scattered,
    mask_from_indices,
    materialize,
    put_kept,
    row_indices,
    word_starts,
)
from tests.pallas_kernels.reference_numpy import numpy_pack

BLOCK = 4096
LENGTHS = (1, 31, 32, 33, 1000)
SHARES = (0.0, 0.05, 1.0)

jit_row_indices, jit_mask = (jax.jit(f, static_argnums=1) for f in (row_indices, mask_from_indices))
jit_cumsum_rows = jax.jit(cumsum_rows)
jit_word_starts, jit_put_kept = (
    jax.jit(word_starts, static_argnums=1),
    jax.jit(put_kept, static_argnames="add"),
)


def rows_with_k_bits(seed: int, rows: int, length: int, k: int) -> np.ndarray:
    """bool (rows, length) with k random bits set in each row."""
    order = np.argsort(np.random.default_rng(seed).random((rows, length)), axis=1)
    mask = np.zeros((rows, length), bool)
    np.put_along_axis(mask, order[:, :k], True, axis=1)
    return mask


@given(st.integers(0, 2**32 - 1), st.sampled_from(LENGTHS), st.sampled_from(SHARES))
def test_row_indices_are_numpys_nonzero(seed, length, share):
    k = round(share * length)
    mask = rows_with_k_bits(seed, 2, length, k)
    index = jit_row_indices(numpy_pack(mask), k)
    assert index.dtype == jnp.int32
    np.testing.assert_array_equal(index, mask.nonzero()[1].reshape(2, k))


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("k", [0, 1, 41, 705, BLOCK - 1])
def test_row_indices_of_whole_blocks(length, k):
    """k = 705 is odd and no power of two; the lengths stand on both sides of a block."""
    mask = rows_with_k_bits(k, 5, length, k)
    np.testing.assert_array_equal(jit_row_indices(numpy_pack(mask), k), mask.nonzero()[1].reshape(5, k))


def test_row_indices_of_a_full_row():
    np.testing.assert_array_equal(
        jit_row_indices(numpy_pack(np.ones((2, BLOCK), bool)), BLOCK), np.tile(np.arange(BLOCK), (2, 1))
    )


def test_bits_at_the_ends_of_words():
    """Bit 31 of a word is where a signed shift or an off-by-one of the halving would show."""
    mask = np.zeros((1, 128), bool)
    mask[0, [0, 31, 32, 63, 95, 96, 127]] = True
    assert jit_row_indices(numpy_pack(mask), 7).tolist() == [[0, 31, 32, 63, 95, 96, 127]]


@given(hnp.arrays(bool, st.tuples(st.just(2), st.sampled_from((32, 1056)))), st.sampled_from((1, 32)))
def test_rows_with_more_or_fewer_bits(mask, k):
    """The first k where there are more; where there are fewer, those, then columns inside the row."""
    index = np.asarray(jit_row_indices(numpy_pack(mask), k))
    assert ((index >= 0) & (index < mask.shape[1])).all()
    for row, columns in zip(mask, index, strict=True):
        want = row.nonzero()[0][:k]
        np.testing.assert_array_equal(columns[: len(want)], want)


def test_no_rows():
    assert row_indices(jnp.zeros((0, 4), jnp.uint32), 3).shape == (0, 3)


@given(st.integers(0, 2**32 - 1), st.sampled_from(LENGTHS), st.sampled_from(SHARES))
def test_mask_from_indices_inverts_row_indices(seed, length, share):
    k = round(share * length)
    words = numpy_pack(rows_with_k_bits(seed, 2, length, k))
    back = jit_mask(jit_row_indices(words, k)[0], words.shape[1])
    assert back.dtype == jnp.uint32
    np.testing.assert_array_equal(back, words[0])


def test_mask_from_indices_known_word():
    assert mask_from_indices(jnp.array([0, 12], jnp.int32), 1).tolist() == [0x1001]
    ends = jnp.array([31, 32, 63], jnp.int32)
    assert mask_from_indices(ends, 2).tolist() == [0x80000000, 0x80000001]


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from((1, 31, 32, 64, 1024, 1056, BLOCK)),
    st.sampled_from(("float32", "int32")),
)
def test_cumsum_rows_counts_exactly(seed, length, dtype):
    x = np.random.default_rng(seed).integers(0, 33, (2, length)).astype(dtype)
    total = jit_cumsum_rows(x)
    assert total.dtype == dtype
    np.testing.assert_array_equal(total, np.cumsum(x.astype(np.int64), axis=1))


def test_cumsum_rows_is_exact_up_to_its_limit():
    """float32 holds every whole number up to 2^24; TF32 or bfloat16 products would not."""
    x = np.full((1, BLOCK), 4095.0, np.float32)
    x[0, 0] = (1 << 24) - 4095 * (BLOCK - 1)
    total = np.asarray(cumsum_rows(jnp.asarray(x)))
    np.testing.assert_array_equal(total, np.cumsum(x.astype(np.int64), axis=1))
    assert total[0, -1] == 1 << 24


@given(st.integers(0, 2**32 - 1), st.sampled_from((1, 2, 20, 64)), st.booleans())
def test_put_kept_by_either_way(seed, k, add):
    """3 rows of 64 in an array of (17, 10), the last row short with fewer kept; k = 1, 2 scatter, more go by rank."""
    rng = np.random.default_rng(seed)
    mask = rows_with_k_bits(seed, 3, 64, k)
    last = max(1, k * 42 // 64)
    mask[2] = np.arange(64) < 42
    mask[2, :42] = rows_with_k_bits(seed + 1, 1, 42, last)[0]
    otherwise = rng.standard_normal((17, 10)).astype(np.float32)
    values = rng.standard_normal(2 * k + last).astype(np.float32)
    kept = mask.reshape(-1)[:170]
    words = numpy_pack(mask)
    starts = jit_word_starts(words, k).reshape(-1)[:6]
    assert starts.tolist() == [int(kept[: 32 * i].sum()) for i in range(6)]
    assert is_scattered(values.size, 170) == (k < 3)
    at = kept.nonzero()[0].astype(np.int32)
    put = functools.partial(jit_put_kept, values, at, words.reshape(-1), starts, otherwise, add=add)
    wanted = otherwise.reshape(-1).copy()
    wanted[kept] = wanted[kept] + values if add else values
    np.testing.assert_array_equal(put(), wanted.reshape(17, 10))
    np.testing.assert_array_equal(put(where=np.array(True)), wanted.reshape(17, 10))
    np.testing.assert_array_equal(put(where=np.array(False)), otherwise)


@pytest.mark.parametrize("first", [0.0, -1.0, np.nan, np.inf, -np.inf, 1e-45])
def test_order_of_writes_depends_on_no_value(first):
    """`is_computed` is true and `materialize` the identity for every value, NaN and infinity too."""
    x = np.array([first, 2.0], np.float32)
    assert bool(jax.jit(is_computed)(x))
    got = jax.jit(materialize)((x, x[::-1].copy()))
    np.testing.assert_array_equal(got, (x, x[::-1]))
    assert bool(is_computed(np.array([7], np.uint32)))


def test_in_turn_is_the_function_itself():
    """Trees in, trees out; the branch that is never taken must not show, and must have the same types."""
    x = np.array([np.nan, 2.0], np.float32)

    def both(tree):
        return {"sum": tree["x"] + tree["n"], "bits": tree["x"] > 0}

    got = jax.jit(lambda x, n: in_turn(is_computed(x), both, {"x": x, "n": n}))(x, np.array([1, 2], np.int32))
    np.testing.assert_array_equal(got["sum"], [np.nan, 4.0])
    assert got["bits"].tolist() == [False, True]
