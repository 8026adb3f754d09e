"""What the Triton kernels do to a row: its packed bits, the entries under them and the places of the kept ones.

The functions of `_pallas.py`, for `@triton.jit` kernels. Import it in `<op>/triton.py` only: it needs Triton.
"""

import triton
import triton.language as tl


@triton.jit
def tile(first, words: tl.constexpr):
    """int32 (words, 32): positions from `first` on, a word's in a line."""
    return first + tl.arange(0, words)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def load_words(words_ptr, first, words: tl.constexpr, size: tl.constexpr):
    """uint32 (words,) from number `first` on of the packed mask of `size` entries, zero behind the last entry."""
    num_words: tl.constexpr = (size + 31) // 32
    word = first + tl.arange(0, words)
    bits = tl.load(words_ptr + word, mask=word < num_words, other=0)
    if size % 32 != 0:
        bits &= tl.where(word == num_words - 1, (1 << (size % 32)) - 1, 0xFFFFFFFF)
    return bits


@triton.jit
def pack_bits(bits):
    """bool (n, 32) -> uint32 (n,), lowest bit first."""
    lane = tl.arange(0, 32)[None, :].to(tl.uint32)
    # The bits are disjoint: their sum is their "or".
    return tl.sum(bits.to(tl.uint32) << lane, axis=1)


@triton.jit
def unpack_bits(words):
    """uint32 (n,) -> bool (n, 32)."""
    lane = tl.arange(0, 32)[None, :].to(tl.uint32)
    return ((words[:, None] >> lane) & 1) != 0


@triton.jit
def popcount(words):
    """int32, set bits of each uint32, by sums of ever wider fields."""
    fields = (words & 0x55555555) + ((words >> 1) & 0x55555555)
    fields = (fields & 0x33333333) + ((fields >> 2) & 0x33333333)
    fields = (fields & 0x0F0F0F0F) + ((fields >> 4) & 0x0F0F0F0F)
    return ((fields * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def ranks(words):
    """int32 (n, 32): set bits before each, by a prefix sum over words and popcounts inside a word."""
    number = popcount(words)
    below = (1 << tl.arange(0, 32).to(tl.uint32)) - 1
    return (tl.cumsum(number) - number)[:, None] + popcount(words[:, None] & below[None, :])


@triton.jit
def keeps(row, count: tl.constexpr, k: tl.constexpr, k_last: tl.constexpr):
    """int32 (): entries that a row keeps, none behind the last row."""
    return tl.where(row < count - 1, k, tl.where(row == count - 1, k_last, 0))
