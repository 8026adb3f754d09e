"""Packed masks against NumPy's own bit packing (`np.packbits`), at lengths around the word and the block.

Source of the numbers: a word is 32 entries, lowest bit first, so entries 0 and 12 of 13 give 0x1001.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.bits import bit_at, num_words, ones_mask, pack, popcount, unpack
from tests.pallas_kernels.reference_numpy import numpy_pack

BLOCK = 4096
LENGTHS = (0, 1, 13, 31, 32, 33, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1)

jit_pack, jit_bit_at = jax.jit(pack), jax.jit(bit_at)
jit_unpack, jit_popcount = (jax.jit(f, static_argnums=1) for f in (unpack, popcount))


def masks(lengths=LENGTHS) -> st.SearchStrategy[np.ndarray]:
    return st.sampled_from(lengths).flatmap(lambda n: hnp.arrays(bool, (n,)))


@given(masks())
def test_pack_is_numpys_little_endian_packing(mask):
    words = np.asarray(jit_pack(mask))
    assert words.dtype == np.uint32 and words.shape == (num_words(mask.size),)
    np.testing.assert_array_equal(words, numpy_pack(mask))


@given(masks(), st.integers(0, 2**32 - 1))
def test_unpack_inverts_pack_and_ignores_pad_bits(mask, garbage):
    """Catches a reader that lets the bits behind the last entry leak out."""
    words = numpy_pack(mask)
    if mask.size % 32:
        words[-1] |= np.uint32(garbage) & ~np.uint32((1 << mask.size % 32) - 1)
    back = jit_unpack(words, mask.size)
    assert back.dtype == bool and back.shape == mask.shape
    np.testing.assert_array_equal(back, mask)
    assert int(jit_popcount(words, mask.size)) == mask.sum()


@given(masks())
def test_pack_writes_zero_pad_bits(mask):
    words = np.asarray(jit_pack(mask))
    assert int(jit_popcount(words, None)) == mask.sum()
    if mask.size % 32:
        assert int(words[-1]) >> mask.size % 32 == 0


@given(masks(LENGTHS[1:]), st.data())
def test_bit_at_reads_any_entries_in_any_order(mask, data):
    index = data.draw(hnp.arrays(np.int32, 7, elements=st.integers(0, mask.size - 1)))
    got = jit_bit_at(numpy_pack(mask), index)
    assert got.dtype == bool
    np.testing.assert_array_equal(got, mask[index])


@pytest.mark.parametrize("size", LENGTHS)
def test_ones_mask_has_no_pad_bits(size):
    words = np.asarray(ones_mask(size))
    assert words.dtype == np.uint32
    np.testing.assert_array_equal(words, numpy_pack(np.ones(size, bool)))


def test_known_words():
    mask = np.zeros(13, bool)
    mask[[0, 12]] = True
    assert np.asarray(pack(mask)).tolist() == [0x1001]
    np.testing.assert_array_equal(unpack(jnp.array([0xFFFFE000 | 0x1001], jnp.uint32), 13), mask)
    assert int(popcount(jnp.array([0xFFFFE000 | 0x1001], jnp.uint32), 13)) == 2
    # Bit 31 is the sign bit of an int32: a signed shift would smear it.
    assert np.asarray(pack(np.arange(64) == 31)).tolist() == [0x80000000, 0]
    assert np.asarray(unpack(jnp.array([0x80000000], jnp.uint32), 32)).nonzero()[0].tolist() == [31]


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 64, 65])
def test_popcount_counts_only_the_first_entries(size):
    """Whatever the number of words given: also where `size` ends on a word and before the last word."""
    words = jnp.full((4,), 0xFFFFFFFF, jnp.uint32)
    count = popcount(words, size)
    assert count.dtype == jnp.int32 and int(count) == size


@pytest.mark.parametrize("shape", [(3, 0), (3, 1), (2, 3, 33), (0, 33), (5, 64)])
def test_leading_axes_are_kept(shape):
    mask = np.random.default_rng(0).random(shape) < 0.5
    words = pack(mask)
    assert words.shape == (*shape[:-1], num_words(shape[-1]))
    np.testing.assert_array_equal(words, numpy_pack(mask))
    np.testing.assert_array_equal(unpack(words, shape[-1]), mask)
