"""The mask of one leaf inside a step: its packed words, where its entries are, and how values are taken and put by it.

Source: arXiv 2607.01678, Algorithm 1, M_{t-1}. What is large is made in turn (`in_turn`): positions are stored before others
gather by them, and one leaf's are gone before the next one's are made.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.compact import (
    in_turn,
    is_scattered,
    mask_from_indices,
    put_kept,
    row_indices,
    word_starts,
)
from scape_jax._layout import LeafLayout


@functools.partial(jax.tree_util.register_dataclass, data_fields=("words", "at", "starts"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Kept:
    """The mask of one leaf in this step: packed words, and where its entries are (None: everywhere).

    A mask that came as indices has no words until they are asked for; a dense leaf has neither.
    """

    words: Any = None
    at: Any = None  # (kept,) int32, positions in the flat leaf
    starts: Any = None  # (words,) int32, rank of each word's first entry among the kept ones

    def packed(self, layout: LeafLayout) -> Any:
        """uint32 (words,), or None for a dense leaf."""
        if self.words is None and self.at is not None:
            return mask_from_indices(self.at, layout.mask_words)
        return self.words

    def count(self, layout: LeafLayout) -> int:
        """Entries kept."""
        return layout.size if self.at is None else self.at.size

    def take(self, x: jax.Array) -> jax.Array:
        """The kept entries of x, flat."""
        x = x.reshape(-1)
        return x if self.at is None else x.at[self.at].get(mode="promise_in_bounds")

    def put(self, x: jax.Array, values: jax.Array, where: jax.Array) -> jax.Array:
        """x with its kept entries replaced by `values`; x unless `where`."""
        if self.at is None:
            return jnp.where(where, values.reshape(x.shape), x)
        return put_kept(values, self.at, self.words, self.starts, x, where=where)

    def add(self, x: jax.Array, values: jax.Array) -> jax.Array:
        """x with `values` added to its kept entries."""
        if self.at is None:
            return x + values.reshape(x.shape)
        return put_kept(values, self.at, self.words, self.starts, x, add=True)


def flat_positions(columns: jax.Array, layout: LeafLayout, density: float) -> jax.Array:
    """int32 (>= R, k) columns of kept entries -> int32 (entries kept,) positions in the flat leaf."""
    start = jnp.arange(layout.rows, dtype=jnp.int32)[:, None] * layout.row
    return (columns[: layout.rows] + start).reshape(-1)[: layout.kept(density)[2]]


def located(kept: Kept, layout: LeafLayout, density: float, turn: jax.Array) -> Kept:
    """The mask with its positions and ranks, each stored before others gather by it."""
    k, _, total = layout.kept(density)

    def ranks(kept):
        words = jnp.pad(kept.packed(layout), (0, layout.rows * layout.row_words - layout.mask_words))
        words = words.reshape(layout.rows, -1)
        starts = word_starts(words, k)
        return words, starts, starts.reshape(-1)[: layout.mask_words]

    def positions_and_ranks(kept):
        words, starts, flat_starts = ranks(kept)
        return flat_positions(row_indices(words, k, starts), layout, density), flat_starts

    if kept.at is None:
        at, starts = in_turn(turn, positions_and_ranks, kept)
        return Kept(kept.words, at, starts)
    if is_scattered(total, layout.size):
        return kept
    return dataclasses.replace(kept, starts=in_turn(turn, lambda kept: ranks(kept)[2], kept))


def kept_in_turn(turn: jax.Array, kept: Kept, layout: LeafLayout) -> Kept:
    """The same mask, but what is made from its positions is made only once `turn` is known."""
    if kept.at is None:
        return kept
    later = dataclasses.replace(kept, at=jnp.where(turn, kept.at, 0))
    return dataclasses.replace(later, words=later.packed(layout))
