"""Named real shapes for tests and benchmarks: the leaves that the operations meet, and calls made from them."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._rows import BLOCK, Rows


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter, and how much of each of its rows is kept."""

    shape: tuple[int, ...]
    density: float
    dtype: str = "float32"
    block: int = BLOCK

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> Rows:
        """max(1, round(density * length)) entries are kept in a row, and in a short last one."""
        whole = Rows(self.size, self.block)
        k, k_last = (max(1, round(self.density * n)) for n in (self.block, whole.last))
        return Rows(self.size, self.block, k if whole.count > 1 else k_last, k_last)

    def entries(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def words(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows.words,), jnp.uint32)

    def payload(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows.kept,), self.dtype)

    def cut(self, *names: str) -> dict[str, Any]:
        """The settings of the cut that an operation takes by name."""
        values = {"k": self.rows.k, "k_last": self.rows.k_last, "block": self.block, "size": self.size}
        return {name: values[name] for name in names}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an operation: operation(*arrays, **static)."""

    arrays: tuple[jax.ShapeDtypeStruct, ...]
    static: dict[str, Any]


# llama500m's leaves at the densities that SCAPE is run at, then shapes with an end that no block meets.
LEAVES = {
    "mlp_10": Leaf((16, 4096, 1536), 0.1),
    "mlp_1": Leaf((16, 4096, 1536), 0.01),
    "embedding_1": Leaf((32000, 1536), 0.01),
    "attention_bfloat16_10": Leaf((16, 1536, 768), 0.1, "bfloat16"),
    "odd_tail": Leaf((1000, 37), 0.1),
    "odd_tail_bfloat16": Leaf((1000, 37), 0.172, "bfloat16"),
    "block_plus_1": Leaf((BLOCK + 1,), 1.0),
    "short_rows": Leaf((1000, 37), 0.1, block=256),
    "long_rows": Leaf((1000, 37), 0.1, block=8192),
    "tiny": Leaf((13,), 0.2),
}
