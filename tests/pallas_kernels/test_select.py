"""Exact top-k of |x| per row against a stable NumPy sort of the bit patterns.

Denormals: the selection itself is exact for them. |x| clears the sign bit and integers are compared, so
nothing is flushed, although XLA on CPU flushes denormals to zero in every floating-point sum, product and
comparison (`test_denormals_are_ordered_by_their_bits` shows both). A score that is computed before the
selection, as SCAPE's is, is flushed there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.select import pallas, select
from tests.pallas_kernels.reference_numpy import numpy_select

BLOCK = 4096
ROWS, WIDTHS = 3, (1, 31, 32, 33, 65)
POSITIVE = np.array([0.0, 1.0, 2.0, np.inf, np.nan, 1e-45, 1e-40, 1.1754944e-38, 3.4e38], np.float32)
SPECIAL = np.concatenate([POSITIVE, -POSITIVE])
FEW = np.array([0.0, -0.0, 1.0, -1.0], np.float32)

jit_select = jax.jit(select)


@st.composite
def problems(draw):
    """Rows of any bit patterns, few values (ties) or special values, with a k for each row."""
    shape = (ROWS, draw(st.sampled_from(WIDTHS)))  # few shapes: each is a compilation
    kind = draw(st.sampled_from(("bits", "ties", "special")))
    if kind == "bits":
        x = draw(hnp.arrays(np.uint32, shape)).view(np.float32)
    else:
        pool = SPECIAL if kind == "special" else FEW
        x = pool[draw(hnp.arrays(np.int32, shape, elements=st.integers(0, len(pool) - 1)))]
    k = draw(hnp.arrays(np.int32, ROWS, elements=st.integers(0, shape[1])))
    valid = draw(st.none() | hnp.arrays(bool, shape))
    return x, k, valid


@given(problems())
def test_equals_a_stable_sort(problem):
    x, k, valid = problem
    mask = jit_select(x, k, valid)
    assert mask.dtype == bool and mask.shape == x.shape
    np.testing.assert_array_equal(mask, numpy_select(x, k, valid))


@given(problems())
def test_exactly_k_of_the_candidates(problem):
    """Says the contract once more without the reference above, so that both cannot be wrong in one way."""
    x, k, valid = problem
    mask = np.asarray(jit_select(x, k, valid))
    candidate = ~np.isnan(x) & (True if valid is None else valid)
    np.testing.assert_array_equal(mask.sum(1), np.minimum(k, candidate.sum(1)))
    assert not (mask & ~candidate).any()
    for row in range(ROWS):
        kept, left = np.abs(x[row][mask[row]]), np.abs(x[row][candidate[row] & ~mask[row]])
        if kept.size and left.size:
            assert kept.min() >= left.max()
            tied = np.flatnonzero(candidate[row] & (np.abs(x[row]) == kept.min()))
            taken = mask[row, tied]
            assert taken.tolist() == sorted(taken.tolist(), reverse=True), "a tie must go to the lower index"


@pytest.mark.parametrize("width", [BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("kind", ["normal", "bfloat16 steps", "equal"])
def test_wide_rows(width, kind):
    x = np.random.default_rng(width).standard_normal((4, width)).astype(np.float32)
    if kind == "bfloat16 steps":
        x = np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))
    if kind == "equal":
        x = np.full_like(x, -0.25)
    for k in (0, 1, 41, 705, width - 1, width):
        np.testing.assert_array_equal(jit_select(x, k), numpy_select(x, k))


@pytest.mark.parametrize("value", SPECIAL)
def test_equal_rows_keep_the_first_k(value):
    mask = np.asarray(jit_select(np.full((2, 33), value, np.float32), np.array([0, 5], np.int32)))
    expected = 0 if np.isnan(value) else 5
    assert mask[0].sum() == 0
    assert mask[1].nonzero()[0].tolist() == list(range(expected))


def test_zeros_of_both_signs_tie():
    assert np.asarray(jit_select(np.array([[-0.0, 0.0, -0.0]], np.float32), 2)).tolist() == [
        [True, True, False]
    ]


def test_denormals_are_ordered_by_their_bits():
    x = np.array([[1, 0x80000003, 2, 0, 0x007FFFFF, 0x80000001]], np.uint32).view(np.float32)
    for fn in (select, jit_select):
        assert np.asarray(fn(x, 3)).tolist() == [[False, True, True, False, True, False]]
    # What select must not do: on CPU a comparison of floats sees only zeros here.
    if jax.default_backend() == "cpu":
        assert not np.asarray(jax.jit(lambda v: v != 0)(x)).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_floats_are_selected_by_value(dtype):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 65)), dtype)
    np.testing.assert_array_equal(jit_select(x, 7), numpy_select(np.asarray(x.astype(jnp.float32)), 7))


def test_k_may_be_traced_and_rows_are_independent():
    x = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
    k = np.array([64, 0, 9], np.int32)
    together = np.asarray(jit_select(x, k))
    for row in range(3):
        np.testing.assert_array_equal(together[row : row + 1], jit_select(x[row : row + 1], k[row : row + 1]))


def test_no_rows():
    assert select(np.zeros((0, 32), np.float32), 3).shape == (0, 32)


# The kernels' search, which the forms of test_rows.py also run -------------------------------------------------------


def gradients(kind):
    """float32 (64, 4096), rows that occur in training, or that no guess is good for."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((64, BLOCK))
    if kind == "momentum":
        x *= np.exp(rng.standard_normal(x.shape))
    elif kind == "embedding":
        x *= rng.random(x.shape) < 0.1
    elif kind == "equal":
        x[:] = x[:, :1]
    elif kind == "powers":
        x[:] = 2.0 ** -(np.arange(BLOCK) % 149)
    elif kind == "bits":
        return rng.integers(0, 0x7F800001, x.shape, np.int32).view(np.float32)
    return x.astype(np.float32)


search_rows = jax.jit(jax.vmap(lambda key, k: pallas.search(key, k, shift=0), in_axes=(0, None)))


# Mean counts of a row of each kind. Halving the interval of bit patterns takes 14 to 18 for the first two, and 31 where
# many are equal.
@pytest.mark.parametrize(
    ("kind", "most"),
    [("normal", 9), ("momentum", 10), ("embedding", 12), ("equal", 13), ("powers", 25), ("bits", 25)],
)
@pytest.mark.parametrize("k", [0, 41, 410, 2048, BLOCK])
def test_the_kernels_search_is_guided(kind, most, k):
    key = np.abs(gradients(kind)).view(np.int32)
    threshold, reached, counts = (np.asarray(a) for a in search_rows(key, np.int32(k)))
    assert counts.mean() < most
    assert counts.max() <= pallas.GUESSES + 62
    number = (key >= threshold[:, None]).sum(1)
    # Where a tie keeps it from exactly k, the k-th largest itself.
    kth = np.sort(key, axis=1)[:, ::-1][:, max(k - 1, 0)]
    assert ((number == k) | (threshold == kth)).all()
    assert ((reached == number) | (threshold == 0)).all()
