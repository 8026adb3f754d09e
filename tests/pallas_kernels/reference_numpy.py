"""Bit packing and top-k in NumPy, for the tests beside it: `np.packbits` and a stable sort."""

import numpy as np


def numpy_pack(mask: np.ndarray) -> np.ndarray:
    """bool (..., n) -> uint32 (..., ceil(n / 32)): bytes from np.packbits, four to a word."""
    pad = -mask.shape[-1] % 32
    mask = np.concatenate([mask, np.zeros((*mask.shape[:-1], pad), bool)], axis=-1)
    return np.packbits(mask, axis=-1, bitorder="little").view("<u4")


def numpy_select(x: np.ndarray, k: np.ndarray | int, valid: np.ndarray | None = None) -> np.ndarray:
    """Mask of the k largest |x| of each row by a stable sort: ties by index, never NaN or invalid."""
    key = (x.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)
    key[key > 0x7F800000] = -1
    if valid is not None:
        key[~valid] = -1
    mask = np.zeros(x.shape, bool)
    for row, (keys, take) in enumerate(zip(key, np.broadcast_to(k, len(x)), strict=True)):
        order = np.argsort(-keys, kind="stable")[:take]
        mask[row, order[keys[order] >= 0]] = True
    return mask


def numpy_unpack(words: np.ndarray, size: int) -> np.ndarray:
    """uint32 (..., n_words) -> bool (..., size)."""
    return np.unpackbits(words.astype("<u4").view(np.uint8), axis=-1, bitorder="little")[..., :size] > 0


def numpy_kept(mask: np.ndarray, block: int, k: int, k_last: int) -> list[np.ndarray]:
    """For each row of `block` entries of a flat mask: the positions of its first k set bits (k_last in the last row)."""
    starts = range(0, mask.size, block)
    keeps = [k] * (len(starts) - 1) + [k_last]
    return [
        start + mask[start : start + block].nonzero()[0][:keep]
        for start, keep in zip(starts, keeps, strict=True)
    ]


def numpy_compact(x: np.ndarray, mask: np.ndarray, block: int, k: int, k_last: int) -> np.ndarray:
    """Values of the kept entries, each row's filled up with zeros, one row after the other."""
    kept = numpy_kept(mask, block, k, k_last)
    out = np.zeros(((len(kept) - 1) * k + k_last,), x.dtype)
    for row, at in enumerate(kept):
        out[row * k : row * k + at.size] = x[at]
    return out


def numpy_scatter(
    x: np.ndarray, values: np.ndarray, mask: np.ndarray, block: int, k: int, k_last: int
) -> np.ndarray:
    """x with its kept entries replaced by `values`."""
    x = x.copy()
    for row, at in enumerate(numpy_kept(mask, block, k, k_last)):
        x[at] = values[row * k : row * k + at.size]
    return x


def numpy_columns(mask: np.ndarray, block: int, k: int) -> np.ndarray:
    """uint16 (R, k) columns of the first k set bits of each row, 65535 where there are fewer."""
    kept = numpy_kept(mask, block, k, k)
    out = np.full((len(kept), k), 0xFFFF, np.uint16)
    for row, at in enumerate(kept):
        out[row, : at.size] = at - row * block
    return out
