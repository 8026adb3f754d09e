"""From a bit mask with a fixed number of set bits per row to the list of its entries."""

from pallas_kernels.compact.reference import cumsum_rows, mask_from_indices, row_indices

__all__ = ["cumsum_rows", "mask_from_indices", "row_indices"]
