"""What a SCAPE step does before its exchange: the payload of the kept entries, and the mask of the next step.

Source: arXiv 2607.01678, Algorithm 1. h holds m_{t-1} on the last step's mask and the residual e off it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch, _triton
from pallas_kernels._rows import BLOCK, MAX_KERNEL_SIZE, Rows, check_entries, check_words, no_kernel
from pallas_kernels.moment_pass import pallas, reference
from pallas_kernels.moment_pass.reference import semi_updated

__all__ = ["moment_pass", "select_moment", "semi_updated"]

GRADIENT_DTYPES = ("float32", "bfloat16")


def _no_kernel(rows: Rows, g: jax.Array) -> str | None:
    return no_kernel(rows, g.dtype, allowed=GRADIENT_DTYPES)


def _checked(h: jax.Array, g: jax.Array, last: jax.Array, rows: Rows) -> tuple[jax.Array, ...]:
    check_entries("h", h, rows, ("float32",))
    check_entries("g", g, rows)
    check_words(last, rows)
    return h.reshape(-1), g.reshape(-1), last


def moment_pass(
    h: jax.Array,
    g: jax.Array,
    last: jax.Array,
    words: jax.Array,
    k: int,
    *,
    b1: jax.Array | float,
    k_last: int | None = None,
    block: int = BLOCK,
    squares: bool = True,
    dtype: Any = jnp.float32,
    into: jax.Array | int | None = None,
    first: int = 0,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    r"""What a worker sends of one leaf: g + e / (1-b1) on the mask, in index order; row r's begin at r * k.

    With m_{t-1}, equal on all workers, this is (mt - b1 m_{t-1}) / (1-b1); its mean over workers is the gradient from
    which m_t and v_t are rebuilt. h is left as it is: only after the exchange it is known whether the step is taken.
    Read per entry: 4 bytes of g (2 in bfloat16), and of h the kept entries that hold a residual.

    Args:
      h: float32 of any shape, N entries in R rows of `block` consecutive ones; the last row may be short.
      g: float32 or bfloat16, N entries.
      last: uint32 (ceil(N / 32),), packed mask of the last step: where h holds m. Pad bits are ignored.
      words: uint32 (ceil(N / 32),), packed mask of this step.
      k: entries kept in each row. Of more set bits the first k count, fewer are filled up with zeros.
      b1: decay of the first moment, a number or float32 ().
      k_last: entries kept in the last row, min(k, its length) by default.
      block: B, a power of two.
      squares: sum g^2 of each row too, which tells whether an entry is not finite. Without it only the kept entries of
        g are read.
      dtype: of the payload, float32 or bfloat16.
      into: dtype (M,), a buffer for many leaves; the payload is written into it, in place where it can be. Or M: a new
        buffer, which holds anything elsewhere.
      first: place in `into` of the payload's first entry.
      implementation: None, "xla", "pallas" or "triton", see `pallas_kernels`.
      interpret: run the named kernel on any device, slowly; for tests.

    Returns:
      `into` with the payload, or without it dtype ((R - 1) * k + k_last,); float32 (R,) sums of squares, or None.

    Raises:
      ValueError: `block` is not allowed (names the allowed ones), or shapes, dtypes or numbers do not fit.
      NotImplementedError: the named implementation is not for this call or this device.

    Example:
      >>> h, g = jnp.array([1.0, 2.0, 4.0]), jnp.ones(3)
      >>> last, words = jnp.array([0b001], jnp.uint32), jnp.array([0b101], jnp.uint32)
      >>> moment_pass(h, g, last, words, 2, b1=0.5)[0].tolist()
      [1.0, 9.0]

    References:
      SCAPE, arXiv 2607.01678, Algorithm 1.
    """
    h, g, last, words = (jnp.asarray(x) for x in (h, g, last, words))
    rows = Rows(h.size, block, k, k_last)
    arrays = (*_checked(h, g, last, rows), words, jnp.asarray(1 - b1, jnp.float32).reshape(1))
    check_words(words, rows)
    buffer = rows.kept if into is None else into
    size, fits = buffer, True
    if not isinstance(buffer, int):
        arrays, size = (*arrays, buffer), buffer.size
        fits = buffer.ndim == 1 and buffer.dtype == dtype
    if not fits or not 0 <= first <= size - rows.kept or size > MAX_KERNEL_SIZE * 2 - 1:
        raise ValueError(
            f"into must be {jnp.dtype(dtype)} of at least first + {rows.kept} entries and fewer than 2^31, got {into} and "
            f"first = {first}."
        )
    options: dict[str, Any] = {
        "rows": rows,
        "size": size,
        "first": first,
        "dtype": jnp.dtype(dtype),
        "squares": squares,
    }
    out = _dispatch.run(
        "moment_pass",
        *arrays,
        reference=functools.partial(reference.payload, **options),
        kernels={
            "pallas": functools.partial(pallas.payload, **options),
            "triton": functools.partial(_triton.twin("moment_pass", "payload"), **options),
        },
        implementation=implementation,
        unsupported=_no_kernel(rows, g) or (None if rows.kept else "no entries are kept"),
        interpret=interpret,
    )
    return out[0], out[1] if squares else None


def select_moment(
    h: jax.Array,
    g: jax.Array,
    last: jax.Array,
    k: jax.Array,
    *,
    b1: jax.Array | float,
    first_row: jax.Array | int,
    num_rows: int,
    block: int = BLOCK,
    finite: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The mask of the next step in a window of rows: the k largest |mt| of each, mt = b1 m_{t-1} + (1-b1) g + e.

    Ties go to the lower index, NaN is never taken; exactly k are, where a row has as many that are numbers.
    Read once: h and g of the window. Nothing is communicated; the window is what this worker owns.

    Args:
      h, g, last, b1, block, implementation, interpret: as for `moment_pass`.
      k: int32 (num_rows,), entries kept in each row of the window, 0 <= k <= block.
      first_row: int32 () >= 0, may be traced: where the window starts. Rows behind the last one are empty.
      num_rows: rows of the window.
      finite: a gradient that is not, or is beyond 2^40, counts as zero.

    Returns:
      uint32 (num_rows * B / 32,).

    Raises:
      As `moment_pass`.

    Example:
      >>> h, g = jnp.array([1.0, 2.0, 4.0]), jnp.ones(3)
      >>> last, k = jnp.array([0b001], jnp.uint32), jnp.array([2], jnp.int32)
      >>> select_moment(h, g, last, k, b1=0.5, first_row=0, num_rows=1, block=32).tolist()
      [6]

    References:
      SCAPE, arXiv 2607.01678, Algorithm 1, refresh.
    """
    h, g, last, k = (jnp.asarray(x) for x in (h, g, last, k))
    rows = Rows(h.size, block)
    arrays = _checked(h, g, last, rows)
    if k.shape != (num_rows,):
        raise ValueError(
            f"k must be int32 ({num_rows},), one for each row of the window, got {k.dtype} {k.shape}."
        )
    rates = jnp.stack([jnp.asarray(b1, jnp.float32), jnp.asarray(1 - b1, jnp.float32)])
    options: dict[str, Any] = {"rows": rows, "num_rows": num_rows, "finite": finite}
    return _dispatch.run(
        "select_moment",
        *arrays,
        rates,
        k.astype(jnp.int32),
        jnp.asarray(first_row, jnp.int32),
        reference=functools.partial(reference.select, **options),
        kernels={
            "pallas": functools.partial(pallas.select, **options),
            "triton": functools.partial(_triton.twin("moment_pass", "select"), **options),
        },
        implementation=implementation,
        unsupported=_no_kernel(rows, g) or (None if num_rows else "there are no rows"),
        interpret=interpret,
    )
