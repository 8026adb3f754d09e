"""From a bit mask with a fixed number of set bits per row to the list of its entries, and back."""

from pallas_kernels.compact.reference import (
    cumsum_rows,
    in_turn,
    is_computed,
    is_scattered,
    mask_from_indices,
    materialize,
    put_kept,
    row_indices,
    word_starts,
)

__all__ = [
    "cumsum_rows",
    "in_turn",
    "is_computed",
    "is_scattered",
    "mask_from_indices",
    "materialize",
    "put_kept",
    "row_indices",
    "word_starts",
]
