"""What a SCAPE step does after its exchange, in plain JAX. Source: arXiv 2607.01678, Algorithm 1, from ghat on."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._rows import Rows
from pallas_kernels.apply_pass.rule import Coefficients, adams
from pallas_kernels.bits import pack, unpack
from pallas_kernels.compact import reference as compact
from pallas_kernels.moment_pass.reference import semi_updated

MAX_AGE = 255
NUM_SCALARS = 12


class Scalars(NamedTuple):
    """The numbers of one step, equal for all entries: numbers or float32 ().

    Attributes:
      ok: 1 or 0; at 0 everything stays as it is.
      scale: what the summed payload is multiplied by, 1 / W.
      clip: the clip factor.
      eta: learning rate.
      decay: eta * lam where parameters are written, lam where an update is.
      rule: the coefficients of AdamS.
    """

    ok: Any
    scale: Any
    clip: Any
    eta: Any
    decay: Any
    rule: Coefficients


@dataclasses.dataclass(frozen=True)
class Settings:
    """What of a step is static.

    Attributes:
      bias_correction: see `adams`.
      clip_all: the clip factor acts on what enters m and v, or only on what enters v (the paper's listing).
      finite: a gradient that is not, or is beyond 2^40, counts as zero where it is not kept.
      update: write -eta (u + lam theta), zero where the step is skipped, instead of the parameters.
    """

    bias_correction: str = "both"
    clip_all: bool = True
    finite: bool = False
    update: bool = False


def new_entries(
    theta: Any,
    h: jax.Array,
    g: jax.Array,
    had_m: jax.Array,
    kept: jax.Array,
    total: jax.Array,
    tau_power: jax.Array | None,
    s: Scalars,
    settings: Settings,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """(parameters or update in `dtype`, h) of entries after the step; also the body of the kernel.

    Args:
      theta: parameters, in `dtype` where they are written; None, with an update only, for zeros.
      h: float32, m_{t-1} where `had_m`, the residual elsewhere.
      g: float32, this worker's gradient.
      had_m: bool, the last mask.
      kept: bool, this mask.
      total: float32, sum over workers of the payload, where kept.
      tau_power: float32, what is divided out of the gradient in v, or None.
      s: the numbers of the step; `ok` is a bool.
      settings: what is static.
      dtype: of what is returned first.
    """
    x = None if theta is None else theta.astype(jnp.float32)
    ghat = total * s.scale
    clipped = s.clip * ghat
    in_v = clipped if tau_power is None else clipped / tau_power
    m_prev = jnp.where(had_m, h, 0.0)
    m, u = adams(clipped if settings.clip_all else ghat, m_prev, in_v, s.rule, settings.bias_correction)
    new_h = jnp.where(kept, m, semi_updated(h, g, had_m, s.rule.b1, s.rule.rest1, settings.finite))
    new_h = jnp.where(s.ok, new_h, h)
    if settings.update:
        change = jnp.where(kept, u, 0.0)
        change = change if x is None else s.decay * x + change
        # -0.0 is the one number that leaves every parameter bit-equal when added.
        return jnp.where(s.ok, -s.eta * change, -0.0).astype(dtype), new_h
    decayed = x - s.decay * x
    new = jnp.where(kept, decayed + -s.eta * u, decayed).astype(dtype)
    return jnp.where(s.ok, new, theta), new_h


def older(age: jax.Array, kept: jax.Array, ok: jax.Array) -> jax.Array:
    """Steps since an entry was sent, int32, after this step."""
    return jnp.where(ok, jnp.where(kept, 0, jnp.minimum(age + 1, MAX_AGE)), age)


def scalars_of(packed: Iterable[jax.Array]) -> Scalars:
    """From float32 (12,), as `pack_scalars` makes it."""
    ok, scale, clip, eta, decay, *rule = packed
    return Scalars(ok > 0, scale, clip, eta, decay, Coefficients(*rule))


def pack_scalars(s: Scalars) -> jax.Array:
    """float32 (12,)."""
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in (*s[:-1], *s.rule)])


def update(
    packed: jax.Array,
    theta: jax.Array,
    h: jax.Array,
    g: jax.Array,
    last: jax.Array,
    words: jax.Array,
    total: jax.Array,
    *aging: jax.Array,
    rows: Rows,
    first: int,
    settings: Settings,
    dtype: jnp.dtype,
    after: int,
) -> tuple[jax.Array, ...]:
    """(parameters or update, h, mask[, age]); arguments as those of the kernel."""
    s = scalars_of(packed)
    aging = aging[: len(aging) - after]
    mask = unpack(words, rows.size)
    kept = compact.scatter(jnp.zeros((rows.size,), bool), jnp.ones((rows.kept,), bool), words, rows=rows)
    there = total[first : first + rows.kept].astype(jnp.float32)
    spread = compact.scatter(jnp.zeros((rows.size,), jnp.float32), there, words, rows=rows)
    had_m = unpack(last, rows.size)
    age, tau_power = (aging[0].astype(jnp.int32), aging[1][aging[0]]) if aging else (None, None)
    x = theta if theta.size or not settings.update else None
    out, new_h = new_entries(x, h, g.astype(jnp.float32), had_m, kept, spread, tau_power, s, settings, dtype)
    new_last = pack(jnp.where(s.ok, mask, had_m))
    new_age = [] if age is None else [older(age, kept, s.ok).astype(jnp.uint8)]
    return out, new_h, new_last, *new_age
