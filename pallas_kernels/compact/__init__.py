"""From a bit mask with a fixed number of set bits per row to the list of its entries, and back.

The functions of `reference.py` are plain JAX; `compact_rows`, `scatter_rows`, `index_rows` and `mask_rows` are kernels
on a GPU.
"""

from pallas_kernels.compact._rows_ops import compact_rows, index_rows, mask_rows, scatter_rows
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
    "compact_rows",
    "cumsum_rows",
    "in_turn",
    "index_rows",
    "is_computed",
    "is_scattered",
    "mask_from_indices",
    "mask_rows",
    "materialize",
    "put_kept",
    "row_indices",
    "scatter_rows",
    "word_starts",
]
