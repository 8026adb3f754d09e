"""Bit masks by Pallas kernels: one program a block of one row."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import _pallas
from pallas_kernels.bits.reference import num_words

ENTRIES_A_THREAD = 32


def _block_of(size: int, block: int) -> tuple[int, jax.Array, jax.Array]:
    """(number of blocks in a row of `size`, this program's row, its block)."""
    blocks = -(-size // block)
    program = pl.program_id(0)
    row = lax.div(program, jnp.int32(blocks))
    return blocks, row, program - row * blocks


def pack(mask: jax.Array, block: int, *, into: jax.Array | None = None, interpret: bool = False) -> jax.Array:
    """bool or integer (..., n) -> uint32 (..., ceil(n / 32)); `into` as in `_pallas.call`, flat."""
    *lead, size = mask.shape
    words = num_words(size)

    def kernel(mask_ref, words_ref):
        _, row, part = _block_of(size, block)
        column = part * block + lax.iota(jnp.int32, block)
        bits = plt.load(
            mask_ref.at[row * size + column], mask=column < size, other=jnp.zeros((), mask_ref.dtype)
        )
        word = part * (block // 32) + lax.iota(jnp.int32, block // 32)
        packed = _pallas.pack_bits(((bits != 0) & (column < size)).reshape(-1, 32))
        plt.store(words_ref.at[row * words + word], packed, mask=word < words)

    programs = math.prod(lead) * -(-size // block)
    total = math.prod(lead) * words
    (out,) = _pallas.call(
        kernel,
        "pack_rows",
        programs,
        [mask],
        [(total, jnp.uint32)],
        into=None if into is None else {0: into},
        num_warps=_pallas.warps(block, ENTRIES_A_THREAD),
        interpret=interpret,
    )
    return out.reshape(*lead, words) if into is None else out


def unpack(
    words: jax.Array, size: int, block: int, *, into: jax.Array | None = None, interpret: bool = False
) -> jax.Array:
    """uint32 (..., ceil(size / 32)) -> bool (..., size); `into` as in `_pallas.call`, flat."""
    *lead, num = words.shape

    def kernel(words_ref, mask_ref):
        _, row, part = _block_of(size, block)
        word = part * (block // 32) + lax.iota(jnp.int32, block // 32)
        packed = plt.load(words_ref.at[row * num + word], mask=word < num, other=jnp.uint32(0))
        bits = _pallas.unpack_bits(packed).reshape(block)
        column = part * block + lax.iota(jnp.int32, block)
        plt.store(mask_ref.at[row * size + column], bits, mask=column < size)

    programs = math.prod(lead) * -(-size // block)
    (out,) = _pallas.call(
        kernel,
        "unpack_rows",
        programs,
        [words],
        [(math.prod(lead) * size, jnp.bool_)],
        into=None if into is None else {0: into},
        num_warps=_pallas.warps(block, ENTRIES_A_THREAD),
        interpret=interpret,
    )
    return out.reshape(*lead, size) if into is None else out
