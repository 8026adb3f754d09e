"""What a SCAPE step does before its exchange, in plain JAX. Source: arXiv 2607.01678, Algorithm 1, mt and refresh.

One buffer h holds m_{t-1} on the last mask and the residual e off it, because the two never overlap.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._rows import Rows
from pallas_kernels.bits import unpack
from pallas_kernels.compact import reference as compact
from pallas_kernels.select.reference import select_words

# A residual of gradients beyond this would overflow the norm of what is sent, and so stop every step that sends it.
LARGEST = 2.0**40


def semi_updated(
    h: jax.Array, g: jax.Array, had_m: jax.Array, b1: Any, rest: Any, finite: bool = False
) -> jax.Array:
    """mt = b1 m_{t-1} + (1-b1) g + e, where h holds m_{t-1} on `had_m` and e off it; rest is 1 - b1.

    `finite`: a gradient that is not, or is beyond LARGEST, counts as zero.
    """
    if finite:
        g = jnp.where(jnp.abs(g) < LARGEST, g, 0.0)
    return jnp.where(had_m, b1 * h, h) + rest * g


def payload(
    h: jax.Array,
    g: jax.Array,
    last: jax.Array,
    words: jax.Array,
    rest: jax.Array,
    *buffer: jax.Array,
    rows: Rows,
    size: int,
    first: int,
    dtype: jnp.dtype,
    squares: bool,
) -> tuple[jax.Array, ...]:
    """(payload, squares of each row where asked for); arguments as those of the kernel."""
    g32 = g.astype(jnp.float32)
    taken = g32 + jnp.where(unpack(last, rows.size), 0.0, h) / rest[0]
    kept = compact.compact(taken, words, rows=rows).astype(dtype)
    whole = buffer[0] if buffer else jnp.zeros((size,), dtype)
    out = kept if size == rows.kept else lax.dynamic_update_slice(whole, kept, (first,))
    if not squares:
        return (out,)
    short = rows.count * rows.block - rows.size
    grid = jnp.pad(g32, (0, short)).reshape(rows.count, rows.block)
    return out, jnp.sum(jnp.square(grid), axis=1)


def select(
    h: jax.Array,
    g: jax.Array,
    last: jax.Array,
    rates: jax.Array,
    k: jax.Array,
    first_row: jax.Array,
    *,
    rows: Rows,
    num_rows: int,
    finite: bool,
) -> jax.Array:
    """Packed mask of the largest |mt| in a window of rows; arguments as those of the kernel."""
    score = semi_updated(h, g.astype(jnp.float32), unpack(last, rows.size), rates[0], rates[1], finite)
    return select_words(score, first_row, k, rows=rows, num_rows=num_rows, given_k=True)
