"""The four operations between a packed mask, the list of its entries, and their columns, on the rows of a flat leaf."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._rows import BLOCK, Rows, check_words, no_kernel
from pallas_kernels.compact import pallas, reference

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint32", "uint8")


def _no_kernel(rows: Rows, *dtypes: jnp.dtype, allowed: tuple[str, ...] = DTYPES) -> str | None:
    return no_kernel(rows, *dtypes, allowed=allowed) or (None if rows.kept else "no entries are kept")


def compact_rows(
    x: jax.Array,
    words: jax.Array,
    k: int,
    *,
    k_last: int | None = None,
    block: int = BLOCK,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The entries of x that a packed mask keeps, in index order; row r's begin at r * k.

    Args:
      x: any shape, N entries in R rows of `block` consecutive ones; the last row may be short.
      words: uint32 (ceil(N / 32),), the packed mask; pad bits are ignored.
      k: entries kept in each row. Of more set bits the first k count, fewer are filled up with zeros.
      k_last: entries kept in the last row, min(k, its length) by default.
      block: B, a power of two.
      implementation: None, "xla" or "pallas", see `pallas_kernels`.
      interpret: run the kernel on any device, slowly; for tests.

    Returns:
      x.dtype ((R - 1) * k + k_last,): (R, k) without the places that the last row does not use.

    Raises:
      ValueError: `block` is not allowed (names the allowed ones), or shapes or numbers do not fit.
      NotImplementedError: the named implementation is not for this call or this device.

    Example:
      >>> compact_rows(jnp.array([5.0, 6.0, 7.0]), jnp.array([0b101], jnp.uint32), 2).tolist()
      [5.0, 7.0]
    """
    x, words = jnp.asarray(x), jnp.asarray(words)
    rows = Rows(x.size, block, k, k_last)
    check_words(words, rows)
    return _dispatch.run(
        "compact_rows",
        x.reshape(-1),
        words,
        reference=functools.partial(reference.compact, rows=rows),
        kernels={"pallas": functools.partial(pallas.compact, rows=rows)},
        implementation=implementation,
        unsupported=_no_kernel(rows, x.dtype),
        interpret=interpret,
    )


def scatter_rows(
    buffer: jax.Array,
    values: jax.Array,
    words: jax.Array,
    k: int,
    *,
    k_last: int | None = None,
    block: int = BLOCK,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Inverse of `compact_rows`: `buffer` with the entries that the mask keeps replaced by `values`.

    The kernel writes in place where the buffer is donated or not used afterwards, and touches kept entries only.

    Args:
      buffer: any shape, N entries.
      values: buffer.dtype ((R - 1) * k + k_last,), as `compact_rows` gives them.
      words, k, k_last, block, implementation, interpret: as for `compact_rows`.

    Returns:
      Like `buffer`. Of more than k set bits in a row the first k are replaced.

    Raises:
      As `compact_rows`.

    Example:
      >>> scatter_rows(jnp.zeros(3), jnp.array([5.0, 7.0]), jnp.array([0b101], jnp.uint32), 2).tolist()
      [5.0, 0.0, 7.0]
    """
    buffer, values, words = jnp.asarray(buffer), jnp.asarray(values), jnp.asarray(words)
    rows = Rows(buffer.size, block, k, k_last)
    check_words(words, rows)
    if values.shape != (rows.kept,) or values.dtype != buffer.dtype:
        raise ValueError(
            f"values must be {buffer.dtype} ({rows.kept},), one for each kept entry, got {values.dtype} {values.shape}."
        )
    out = _dispatch.run(
        "scatter_rows",
        buffer.reshape(-1),
        values,
        words,
        reference=functools.partial(reference.scatter, rows=rows),
        kernels={"pallas": functools.partial(pallas.scatter, rows=rows)},
        implementation=implementation,
        unsupported=_no_kernel(rows, buffer.dtype),
        interpret=interpret,
    )
    return out.reshape(buffer.shape)


def index_rows(
    words: jax.Array,
    size: int,
    k: int,
    *,
    block: int = BLOCK,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The columns of the first k set bits of each row in 16 bits, ascending.

    Args:
      words: uint32 (ceil(size / 32),), the packed mask; pad bits are ignored.
      size: entries of the mask, in R rows of `block`.
      k, block, implementation, interpret: as for `compact_rows`.

    Returns:
      uint16 (R, k); 65535, which is no column, where a row has fewer set bits.

    Raises:
      As `compact_rows`.

    Example:
      >>> index_rows(jnp.array([0b101], jnp.uint32), 3, 3).tolist()
      [[0, 2, 65535]]
    """
    words = jnp.asarray(words)
    rows = Rows(size, block, k, k)
    check_words(words, rows)
    out = _dispatch.run(
        "index_rows",
        words,
        reference=functools.partial(reference.indices, rows=rows),
        kernels={"pallas": functools.partial(pallas.indices, rows=rows)},
        implementation=implementation,
        unsupported=_no_kernel(rows),
        interpret=interpret,
    )
    return out.reshape(rows.count, k)


def mask_rows(
    columns: jax.Array,
    size: int,
    *,
    block: int = BLOCK,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Inverse of `index_rows`: the packed mask with the given columns of each row set.

    Args:
      columns: uint16 or int32 (R, k), in each row ascending and distinct; those not below the row's length are none.
      size: entries of the mask, in R rows of `block`.
      block, implementation, interpret: as for `compact_rows`.

    Returns:
      uint32 (ceil(size / 32),), pad bits zero.

    Raises:
      As `compact_rows`.

    Example:
      >>> mask_rows(jnp.array([[0, 2, 65535]], jnp.uint16), 3).tolist()
      [5]
    """
    columns = jnp.asarray(columns)
    rows = Rows(size, block)
    if columns.ndim != 2 or columns.shape[0] != rows.count or not jnp.issubdtype(columns.dtype, jnp.integer):
        raise ValueError(
            f"columns must be integers ({rows.count}, k), one list for each row of {size} entries, "
            f"got {columns.dtype} {columns.shape}."
        )
    rows = Rows(size, block, columns.shape[1], columns.shape[1])
    return _dispatch.run(
        "mask_rows",
        columns.reshape(-1),
        reference=functools.partial(reference.mask, rows=rows),
        kernels={"pallas": functools.partial(pallas.mask, rows=rows)},
        implementation=implementation,
        unsupported=_no_kernel(rows, columns.dtype, allowed=("uint16", "int32")),
        interpret=interpret,
    )
