"""Exact top-k of each row by magnitude, as a bit mask.

`select` is plain JAX and returns booleans; `select_rows` returns the packed mask, by a kernel on a GPU.
"""

import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch, _triton
from pallas_kernels._rows import BLOCK, Rows, no_kernel
from pallas_kernels.select import pallas
from pallas_kernels.select.reference import select, select_words

__all__ = ["select", "select_rows"]

DTYPES = ("float32", "bfloat16", "float16")


def select_rows(
    x: jax.Array,
    k: jax.Array | int,
    *,
    k_last: int | None = None,
    block: int = BLOCK,
    first_row: jax.Array | int | None = None,
    num_rows: int | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Packed mask of the k largest |x| of each row of `block` consecutive entries, x read once.

    Ties go to the lower index, +0 and -0 tie, NaN is never taken. A row without k numbers gets all that it has.

    Args:
      x: float32, bfloat16 or float16 of any shape, N entries in R rows; the last row may be short.
      k: entries kept in each row, 0 <= k <= block: an int, or int32 () or (rows of the result,), which may be traced.
      k_last: entries kept in the last row where k is an int; min(k, its length) by default.
      block: B, a power of two.
      first_row: int32 () >= 0, may be traced: where a window of rows starts. Rows behind the last one are empty.
      num_rows: rows of that window; both or neither.
      implementation: None, "xla", "pallas" or "triton", see `pallas_kernels`.
      interpret: run the named kernel on CPU, slowly; for tests.

    Returns:
      uint32 (ceil(N / 32),), or (num_rows * B / 32,) for a window.

    Raises:
      ValueError: `block` is not allowed (names the allowed ones), or arguments contradict each other.
      TypeError: x is not a floating-point array, or k no integer.
      NotImplementedError: the named implementation is not for this call or this device.

    Example:
      >>> [int(w) for w in select_rows(jnp.array([0.0, -3.0, 1.0, 3.0]), 2)]
      [10]
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be a floating-point array, got {x.dtype}.")
    if (first_row is None) != (num_rows is None):
        raise ValueError(f"first_row and num_rows go together, got {first_row} and {num_rows}.")
    if not jnp.issubdtype(jnp.result_type(k), jnp.integer):
        raise TypeError(f"k must be an integer or integers, got {jnp.result_type(k)}.")
    window = [] if first_row is None else [jnp.asarray(first_row, jnp.int32)]
    given_k = not isinstance(k, numbers.Integral)
    if given_k:
        if k_last is not None:
            raise ValueError("k_last goes with an int k. Give one k for each row of the result.")
        rows = Rows(x.size, block, block)
        each = rows.count if num_rows is None else num_rows
        window.append(jnp.broadcast_to(jnp.asarray(k, jnp.int32), (each,)))
    else:
        rows = Rows(x.size, block, int(k), k_last)
    options: dict[str, Any] = {"rows": rows, "num_rows": num_rows, "given_k": given_k}
    unsupported = no_kernel(rows, x.dtype, allowed=DTYPES)
    if num_rows == 0:
        unsupported = "there are no rows"
    return _dispatch.run(
        "select_rows",
        x.reshape(-1),
        *window,
        reference=functools.partial(select_words, **options),
        kernels={
            "pallas": functools.partial(pallas.select, **options),
            "triton": functools.partial(_triton.twin("select", "select"), **options),
        },
        implementation=implementation,
        unsupported=unsupported,
        interpret=interpret,
    )
