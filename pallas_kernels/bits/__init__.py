"""Packed bit masks: 32 entries to a uint32 word, lowest bit first, pad bits zero."""

from pallas_kernels.bits.reference import bit_at, num_words, ones_mask, pack, popcount, unpack

__all__ = ["bit_at", "num_words", "ones_mask", "pack", "popcount", "unpack"]
