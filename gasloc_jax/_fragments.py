"""The model in F fragments of near equal bytes, dealt by layer, of which each round exchanges one.

Source: streaming DiLoCo (arXiv 2501.18512). A fragment has the same shapes whatever its number, so that one program
serves all: of a leaf whose first axis is the layers, fragment f takes layers f, f + F, ..; of any other, rows that lie
together. Where the rows do not divide, the last fragments hold rows of others too, which are sent and then dropped.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gasloc_jax._checks import check_whole_number, path_name


def layers_are_stacked(path: str) -> bool:
    """Whether a leaf's first axis is the layers: all below a part of the path called "layers", as in `models`."""
    return "layers" in path.split("/")


@dataclasses.dataclass(frozen=True)
class Fragments:
    """How trees are cut.

    Attributes:
      count: F.
      stacked: path -> whether the leaf's first axis is the layers.
    """

    count: int
    stacked: Callable[[str], bool] = layers_are_stacked

    def check(self, params: Any) -> None:
        """Raises ValueError unless there is a layer for each fragment."""
        check_whole_number("fragments", self.count, 1, "1 exchanges the whole model in every round.")
        if self.count == 1:
            return
        layers = {
            path_name(path): jnp.shape(leaf)[0]
            for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
            if self.stacked(path_name(path)) and jnp.ndim(leaf)
        }
        if not layers:
            raise ValueError(
                f"fragments must have layers to deal, got {self.count} fragments and no leaf whose first axis is the "
                "layers. Say which are by stacked=, a function of the path, or use fragments=1."
            )
        name = min(layers, key=lambda path: layers[path])
        if self.count > layers[name]:
            raise ValueError(
                f"fragments must be at most the layers, got {self.count} fragments for the {layers[name]} layers of "
                f"{name!r}. Use fragments <= {layers[name]}."
            )

    def take(self, tree: Any, number: jax.Array) -> Any:
        """Fragment `number` (int32 (), traced) of a tree like the parameters."""
        if self.count == 1:
            return tree

        def one(path, leaf):
            runs = self._runs(path, leaf, number)
            return jnp.concatenate([_run(_rows(leaf), start, length) for start, _, length in runs])

        return jax.tree_util.tree_map_with_path(one, tree)

    def put(self, tree: Any, fragment: Any, number: jax.Array) -> Any:
        """`tree` with its fragment `number` replaced."""
        if self.count == 1:
            return fragment

        def one(path, leaf, new):
            whole, at = _rows(leaf), 0
            for start, first, length in self._runs(path, leaf, number):
                part = new[at : at + length].astype(leaf.dtype)
                if whole.shape[0] % self.count:
                    rows = start + jnp.arange(length)
                    own = (rows >= first).reshape(-1, *[1] * (whole.ndim - 1))
                    part = jnp.where(own, part, _run(whole, start, length))
                whole, at = lax.dynamic_update_slice_in_dim(whole, part, start, 0), at + length
            return whole.reshape(leaf.shape)

        return jax.tree_util.tree_map_with_path(one, tree, fragment)

    def _runs(self, path: Any, leaf: Any, number: jax.Array) -> list[tuple[jax.Array, jax.Array, int]]:
        """Runs of rows that lie together: (where it starts, the first row of it that is this fragment's, its length).

        Slices, since XLA on CPU gathers and scatters entry by entry. One that would end past the leaf starts earlier, at
        rows that are another fragment's.
        """
        size = _rows(leaf).shape[0]
        share = -(-size // self.count)
        if self.stacked(path_name(path)) and leaf.ndim:
            wanted, length = [number + self.count * j for j in range(share)], 1
        else:
            wanted, length = [number * share], share
        return [(jnp.minimum(first, size - length), first, length) for first in wanted]


def _run(rows: jax.Array, start: jax.Array, length: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(rows, start, length, 0)


def _rows(leaf: jax.Array) -> jax.Array:
    return leaf.reshape(1) if leaf.ndim == 0 else leaf
