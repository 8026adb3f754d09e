"""How each parameter is cut into rows, how many entries of a row are kept, and who selects them.

Source: SCAPE (arXiv 2607.01678), Algorithm 1, `refresh`; the row form of it is ours (README, "Rows").

A leaf of N entries is read as R rows of B consecutive entries; the last row may be short. Exactly max(1, round(d * B))
entries are kept in each row, so every count below is static. Worker n owns rows n*R_w .. (n+1)*R_w, R_w = ceil(R / W).
`selection="leaf"` is the same thing with one row per worker.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_DENSE_NAME = re.compile(r"(^|[/_.])(bias|scale|norm\w*|\w*norm)($|[/_.])", re.IGNORECASE)
INDEX16_MAX_ROW = 1 << 16


def path_name(path: tuple) -> str:
    """A leaf's path as text, "layers/attention/query/kernel"; flax.nnx's trailing `.value` is dropped."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return re.sub(r"[/.]value$", "", name) or "(root)"


def keep_of(length: int, density: float) -> int:
    """Entries kept in a row of `length` entries."""
    return max(1, int(np.floor(density * length + 0.5)))


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The rows of one leaf. Everything here is static."""

    path: str
    shape: tuple[int, ...]
    sparse: bool
    row: int = 0  # B, entries of a full row, a multiple of 32
    num_workers: int = 1

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def rows(self) -> int:
        return -(-self.size // self.row)

    @property
    def last_row(self) -> int:
        return self.size - (self.rows - 1) * self.row

    @property
    def row_words(self) -> int:
        return self.row // 32

    @property
    def mask_words(self) -> int:
        return -(-self.size // 32)

    @property
    def owned_rows(self) -> int:
        return -(-self.rows // self.num_workers)

    def kept(self, density: float) -> tuple[int, int, int]:
        """(k of a full row, k of the last row, entries kept in the leaf)."""
        k, last = keep_of(self.row, density), keep_of(self.last_row, density)
        if self.rows == 1:
            k = last
        return k, last, (self.rows - 1) * k + last


def check_real(name: str, leaf: Any) -> None:
    """Raises TypeError unless `leaf` is a real floating-point array; `name` is its path."""
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"every parameter must be a real floating-point array, got {name!r} of dtype {dtype}. "
            "Leave it out with optax.masked or optax.partition."
        )


def leaf_layouts(
    tree: Any,
    *,
    density: float,
    block_size: int,
    selection: str,
    dense: Callable[[str], bool] | None,
    num_workers: int,
) -> tuple[list[LeafLayout], Any]:
    """The layout of every leaf, in tree order, and the tree's structure.

    Never sparse: scalars, vectors, leaves named as norm scales or biases, leaves smaller than one block, and what the
    `dense` predicate names.

    Raises:
      TypeError: a leaf is not a real floating-point array; names its path.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    layouts = []
    for path, leaf in flat:
        name = path_name(path)
        check_real(name, leaf)
        shape = tuple(jnp.shape(leaf))
        size = int(np.prod(shape, dtype=np.int64))
        sparse = (
            density < 1
            and len(shape) > 1
            and size >= block_size
            and not _DENSE_NAME.search(name)
            and not (dense is not None and dense(name))
        )
        row = block_size
        if selection == "leaf":
            row = (-(-size // num_workers) + 31) // 32 * 32
        layouts.append(LeafLayout(name, shape, sparse, row if sparse else 0, num_workers))
    return layouts, treedef


def density_levels(density: float, warmup_steps: int) -> tuple[float, ...]:
    """The few densities that a run goes through: 1, (warm-up levels,) density. Shapes stay static for each."""
    if density >= 1:
        return (1.0,)
    if not warmup_steps:
        return (1.0, density)
    n = max(2, min(8, round(np.log2(1 / density) + 0.5)))
    return (*(float(density ** (j / n)) for j in range(n)), density)


def level_of(count: Any, num_levels: int, warmup_steps: int, mask_every: int) -> Any:
    """Index of the density level used by the step that follows `count` steps (int or traced int32).

    d_t = d^(min(1, t / T)), rounded up to a level; the mask of step t + 1 is selected in step t. Step 1 is dense.
    """
    where, minimum = (np.where, np.minimum) if isinstance(count, int) else (jnp.where, jnp.minimum)
    selected = (count - 1) // mask_every * mask_every + 1
    if warmup_steps:
        level = minimum(selected, warmup_steps) * (num_levels - 1) // warmup_steps
    else:
        level = where(count > 0, num_levels - 1, 0)
    level = where(count > 0, level, 0)
    return int(level) if isinstance(count, int) else level.astype(jnp.int32)


def final_count(num_levels: int, warmup_steps: int, mask_every: int) -> int:
    """From this many finished steps on, the level is the last one for good."""
    if num_levels == 1:
        return 0
    return warmup_steps + mask_every if warmup_steps else 1
