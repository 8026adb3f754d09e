"""Packed bit masks: 32 entries to a uint32 word, lowest bit first, pad bits zero.

`pack` and `unpack` are plain JAX and fuse with what stands around them; `pack_rows` and `unpack_rows` are the same
operations by a kernel of their own on a GPU.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._rows import BLOCK, Rows, no_kernel
from pallas_kernels.bits import pallas
from pallas_kernels.bits.reference import bit_at, num_words, ones_mask, pack, popcount, unpack

__all__ = ["bit_at", "num_words", "ones_mask", "pack", "pack_rows", "popcount", "unpack", "unpack_rows"]

MASK_DTYPES = ("bool", "int8", "uint8", "int32", "uint32")


def pack_rows(
    mask: jax.Array, *, block: int = BLOCK, implementation: str | None = None, interpret: bool = False
) -> jax.Array:
    """Packs each row of a mask: any shape (..., n) -> uint32 (..., ceil(n / 32)), pad bits zero.

    Args:
      mask: bool, or an integer type whose nonzero entries are set.
      block: entries that one program of the kernel packs, a power of two.
      implementation: None, "xla" or "pallas", see `pallas_kernels`.
      interpret: run the kernel on any device, slowly; for tests.

    Raises:
      ValueError: `block` is not allowed; names the allowed ones.
      TypeError: `mask` is neither bool nor an integer array.
      NotImplementedError: the named implementation is not for this call or this device.

    Example:
      >>> int(pack_rows(jnp.array([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], bool))[0])
      4097
    """
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.integer):
        raise TypeError(
            f"mask must be bool or an integer array, got {mask.dtype}. Compare it with what is set."
        )
    return _dispatch.run(
        "pack_rows",
        mask,
        reference=lambda mask: pack(mask != 0),
        kernels={"pallas": functools.partial(pallas.pack, block=block)},
        implementation=implementation,
        unsupported=no_kernel(Rows(mask.size, block), mask.dtype, allowed=MASK_DTYPES),
        interpret=interpret,
    )


def unpack_rows(
    words: jax.Array,
    size: int,
    *,
    block: int = BLOCK,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Inverse of `pack_rows`: uint32 (..., ceil(size / 32)) -> bool (..., size), whatever the pad bits hold.

    Arguments and errors as for `pack_rows`; also ValueError where the number of words is not that of `size`.
    """
    words = jnp.asarray(words)
    if words.dtype != jnp.uint32 or words.ndim == 0 or words.shape[-1] != num_words(size):
        raise ValueError(
            f"words must be uint32 (..., {num_words(size)}) for {size} entries, got {words.dtype} {words.shape}."
        )
    entries = words.size // max(words.shape[-1], 1) * size
    return _dispatch.run(
        "unpack_rows",
        words,
        reference=functools.partial(unpack, size=size),
        kernels={"pallas": functools.partial(pallas.unpack, size=size, block=block)},
        implementation=implementation,
        unsupported=no_kernel(Rows(entries, block), allowed=()),
        interpret=interpret,
    )
