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
