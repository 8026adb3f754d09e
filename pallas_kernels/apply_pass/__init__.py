"""What a SCAPE step does after its exchange: h, the parameters, the mask and the ages of one leaf, each in one pass.

Source: arXiv 2607.01678, Algorithm 1, from ghat on. h holds m_{t-1} on the last step's mask and the residual e off it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _dispatch, _triton
from pallas_kernels._rows import BLOCK, Rows, check_entries, check_words, no_kernel
from pallas_kernels.apply_pass import pallas, reference
from pallas_kernels.apply_pass.reference import MAX_AGE, Scalars
from pallas_kernels.apply_pass.rule import BIAS_CORRECTIONS, Coefficients, adams, coefficients

__all__ = [
    "BIAS_CORRECTIONS",
    "MAX_AGE",
    "Applied",
    "Coefficients",
    "Scalars",
    "adams",
    "apply_pass",
    "coefficients",
]

DTYPES = ("float32", "bfloat16")


class Applied(NamedTuple):
    """One leaf after a step: parameters (or their update), h, the packed mask, ages or None."""

    out: jax.Array
    h: jax.Array
    last: jax.Array
    age: jax.Array | None


def apply_pass(
    theta: jax.Array | None,
    h: jax.Array,
    g: jax.Array,
    last: jax.Array,
    words: jax.Array,
    total: jax.Array,
    k: int,
    scalars: Scalars,
    *,
    k_last: int | None = None,
    block: int = BLOCK,
    first: int = 0,
    age: jax.Array | None = None,
    staleness_power: float = 0.0,
    bias_correction: str = "both",
    clip_all: bool = True,
    finite: bool = False,
    update_dtype: Any = None,
    after: tuple[jax.Array, ...] = (),
    implementation: str | None = None,
    interpret: bool = False,
) -> Applied:
    r"""The second half of a SCAPE step of one leaf, from the sum over workers of what `moment_pass` made.

    .. math::
      \hat g = \mathrm{clip} \cdot \mathrm{scale} \cdot \mathrm{total}, \quad
      h \leftarrow m_t = b_1 m_{t-1} + (1-b_1) \hat g, \quad
      \theta \leftarrow \theta - \eta (u_t + \lambda \theta)

    on the mask; off it :math:`h \leftarrow b_1 m_{t-1} + (1-b_1) g + e`, and of :math:`\theta` only the decay.
    Moved per entry: 20 bytes in float32 (g, h and theta read, h and theta written), 3 bits of masks, and the kept
    entries of `total`. The kernel writes in place where theta, h, last and age are donated or not used afterwards.

    Args:
      theta: parameters, float32 or bfloat16 of any shape, N entries in R rows of `block`; None for an update without decay.
      h: float32, N entries.
      g: float32 or bfloat16, N entries, this worker's gradient.
      last: uint32 (ceil(N / 32),), packed mask of the last step: where h holds m. Pad bits are ignored.
      words: uint32 (ceil(N / 32),), packed mask of this step.
      total: float32 or bfloat16 (M,), sums over workers; this leaf's `kept` ones start at `first`.
      k: entries kept in each row.
      scalars: the numbers of the step, see `Scalars`.
      k_last: entries kept in the last row, min(k, its length) by default.
      block: B, a power of two.
      first: see `total`.
      age: uint8, N entries, steps since each was sent; None: not followed.
      staleness_power: p of ghat / tau^p in v, tau = age + 1; needs `age`.
      bias_correction: "both", "none" or "momentum", see `adams`.
      clip_all: False clips only what enters v, as the paper's listing does.
      finite: an entry of g that is not, or is beyond 2^40, counts as zero where it is not kept.
      update_dtype: write -eta (u + lam theta) in this dtype instead of the parameters; -0.0 where the step is skipped.
      after: arrays to be computed before: those that still read what is overwritten here.
      implementation: None, "xla", "pallas" or "triton", see `pallas_kernels`.
      interpret: run the named kernel on any device, slowly; for tests.

    Returns:
      `Applied`; out of theta's (or g's) shape, h and age of their own, last the mask of this step. With scalars.ok 0
      all are as they were, bit for bit.

    Raises:
      ValueError: `block` is not allowed (names the allowed ones), or shapes, dtypes or arguments do not fit.
      NotImplementedError: the named implementation is not for this call or this device.

    Example:
      >>> theta, h, g = jnp.ones(3), jnp.array([1.0, 2.0, 4.0]), jnp.ones(3)
      >>> last, words = jnp.array([0b001], jnp.uint32), jnp.array([0b101], jnp.uint32)
      >>> rule = coefficients(jnp.float32(1), b1=0.5, b2=0.5, eps=0.0)
      >>> scalars = Scalars(ok=1, scale=1, clip=1, eta=0.5, decay=0, rule=rule)
      >>> out = apply_pass(theta, h, g, last, words, jnp.array([1.0, 9.0]), 2, scalars)
      >>> out.h.tolist(), [round(x, 4) for x in out.out.tolist()], out.last.tolist()
      ([1.0, 2.5, 4.5], [0.2929, 1.0, 0.5], [5])

    References:
      SCAPE, arXiv 2607.01678, Algorithm 1. AdamS, arXiv 2505.16363.
    """
    h, g, last, words, total = (jnp.asarray(x) for x in (h, g, last, words, total))
    rows = Rows(h.size, block, k, k_last)
    check_entries("h", h, rows, ("float32",))
    check_entries("g", g, rows)
    for mask in (last, words):
        check_words(mask, rows)
    if bias_correction not in BIAS_CORRECTIONS:
        raise ValueError(f"bias_correction must be one of {BIAS_CORRECTIONS}, got {bias_correction!r}.")
    if total.ndim != 1 or not 0 <= first <= total.size - rows.kept:
        raise ValueError(
            f"total must have at least first + {rows.kept} entries, got {total.shape} and first = {first}."
        )
    if theta is None and update_dtype is None:
        raise ValueError("without theta there is only an update: give update_dtype.")
    if age is None and staleness_power:
        raise ValueError(f"staleness_power = {staleness_power} needs the ages.")
    shape = jnp.shape(g if theta is None else theta)
    theta = jnp.zeros((0,), jnp.float32) if theta is None else jnp.asarray(theta)
    if theta.size:
        check_entries("theta", theta, rows)
    arrays = [reference.pack_scalars(scalars), *(x.reshape(-1) for x in (theta, h, g)), last, words, total]
    if age is not None:
        check_entries("age", age, rows, ("uint8",))
        tau = np.arange(1, MAX_AGE + 2, dtype=np.float32)
        arrays += [age.reshape(-1), jnp.asarray(tau**staleness_power, jnp.float32)]
    settings = reference.Settings(bias_correction, clip_all, finite, update_dtype is not None)
    dtype = jnp.dtype(theta.dtype if update_dtype is None else update_dtype)
    options: dict[str, Any] = {
        "rows": rows,
        "first": first,
        "settings": settings,
        "dtype": dtype,
        "after": len(after),
    }
    out, new_h, new_last, *new_age = _dispatch.run(
        "apply_pass",
        *arrays,
        *after,
        reference=functools.partial(reference.update, **options),
        kernels={
            "pallas": functools.partial(pallas.update, **options),
            "triton": functools.partial(_triton.twin("apply_pass", "update"), **options),
        },
        implementation=implementation,
        unsupported=no_kernel(rows, theta.dtype, g.dtype, total.dtype, dtype, allowed=DTYPES)
        or (None if rows.kept else "no entries are kept"),
        interpret=interpret,
    )
    return Applied(
        out.reshape(shape),
        new_h.reshape(h.shape),
        new_last,
        None if age is None else new_age[0].reshape(age.shape),
    )
