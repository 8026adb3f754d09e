"""The model in F fragments of near equal bytes, dealt by layer, of which each round exchanges one.

Source: streaming DiLoCo (arXiv 2501.18512). A fragment has the same shapes whatever its number, so that one program
serves all: of a leaf whose first axis is the layers, fragment f takes layers f, f + F, ..; of any other, rows that lie
together. Where the rows do not divide, the last fragments repeat a row, which is sent and then dropped.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

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
        take = lambda leaf, rows: jnp.take(_rows(leaf), rows, axis=0, mode="clip")  # noqa: E731
        return self._map(take, tree, number)

    def put(self, tree: Any, fragment: Any, number: jax.Array) -> Any:
        """`tree` with its fragment `number` replaced."""
        if self.count == 1:
            return fragment

        def put(leaf, rows, new):
            # Repeated rows lie past the end, where "drop" leaves them.
            target = _rows(leaf).at[rows]
            whole = target.set(
                new.astype(leaf.dtype), mode="drop", unique_indices=True, indices_are_sorted=True
            )
            return whole.reshape(leaf.shape)

        return self._map(put, tree, number, fragment)

    def _map(self, fn: Callable, tree: Any, number: jax.Array, *rest: Any) -> Any:
        def one(path, leaf, *others):
            size = _rows(leaf).shape[0]
            share = -(-size // self.count)
            if self.stacked(path_name(path)) and leaf.ndim:
                rows = number + self.count * jnp.arange(share)
            else:
                rows = number * share + jnp.arange(share)
            return fn(leaf, rows, *others)

        return jax.tree_util.tree_map_with_path(one, tree, *rest)


def _rows(leaf: jax.Array) -> jax.Array:
    return leaf.reshape(1) if leaf.ndim == 0 else leaf
