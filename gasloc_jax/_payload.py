"""How numbers travel: float32, bfloat16, or int8 with a scale for each block."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gasloc_jax._checks import check_whole_number

_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int8))
_LARGEST = 127  # of int8, the same on both sides of 0


@dataclasses.dataclass(frozen=True)
class Payload:
    """The form of a message of n float32 numbers; n must be a multiple of `granularity`.

    Attributes:
      dtype: float32, bfloat16 or int8.
      block_size: entries that share a scale in int8.
    """

    dtype: Any = dataclasses.field(default_factory=lambda: jnp.dtype(jnp.float32))
    block_size: int = 256

    @property
    def lossless(self) -> bool:
        return self.dtype == jnp.float32

    @property
    def granularity(self) -> int:
        return self.block_size if self.dtype == jnp.int8 else 1

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """float32 (n,) -> what is sent: float32 (n,), or uint16 (n,), or int8 (n,) and its scales, float32 (blocks,)."""
        if self.dtype == jnp.float32:
            return (x,)
        if self.dtype == jnp.bfloat16:
            # As integers: XLA on CPU would widen a bfloat16 collective to float32.
            return (lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16),)
        blocks = x.reshape(-1, self.block_size)
        scale = jnp.max(jnp.abs(blocks), axis=1) / _LARGEST
        # A block below the smallest normal number is sent as zeros: 1 / scale would not be finite.
        usable = scale >= np.finfo(np.float32).tiny
        inverse = jnp.where(usable, 1.0 / jnp.where(usable, scale, 1.0), 0.0)
        whole = jnp.clip(jnp.round(blocks * inverse[:, None]), -_LARGEST, _LARGEST).astype(jnp.int8)
        return whole.reshape(-1), jnp.where(usable, scale, 0.0)

    def decode(self, message: tuple[jax.Array, ...]) -> jax.Array:
        """What was sent -> float32 (n,); a message of zeros, which is what a missing one is, gives zeros."""
        if self.dtype == jnp.float32:
            return message[0]
        if self.dtype == jnp.bfloat16:
            return lax.bitcast_convert_type(message[0], jnp.bfloat16).astype(jnp.float32)
        whole, scale = message
        return (whole.reshape(-1, self.block_size).astype(jnp.float32) * scale[:, None]).reshape(-1)

    def message_bytes(self, num_entries: int) -> int:
        """Bytes of a message that holds `num_entries` numbers, with padding to whole blocks and scales."""
        blocks = -(-num_entries // self.granularity)
        entry_bytes = blocks * self.granularity * int(self.dtype.itemsize)
        return entry_bytes + (4 * blocks if self.dtype == jnp.int8 else 0)

    def all_reduce_bytes(self, num_entries: int, num_workers: int) -> int:
        """Bytes that a worker sends in a mean over all workers: to each other one its part, and its mean of one part."""
        share = -(-num_entries // num_workers)
        return 2 * (num_workers - 1) * self.message_bytes(share)


def make_payload(dtype: Any, block_size: int = 256) -> Payload:
    """The payload of that dtype; None is float32.

    Raises:
      ValueError: another dtype, or a block size that is not a whole number >= 1.
    """
    try:
        given = jnp.dtype(jnp.float32 if dtype is None else dtype)
    except TypeError:
        given = dtype
    if given not in _DTYPES:
        raise ValueError(
            f"payload_dtype must be jnp.float32, jnp.bfloat16 or jnp.int8, got {given!r}. Use one of these."
        )
    check_whole_number("payload_block_size", block_size, 1, "Typical: 256.")
    return Payload(given, int(block_size))
