"""Exact top-k of each row by magnitude, as a bit mask."""

from pallas_kernels.select.reference import select

__all__ = ["select"]
