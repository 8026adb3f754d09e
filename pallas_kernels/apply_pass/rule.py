"""AdamS on single entries, in the form that plain JAX and kernels share. Source: arXiv 2505.16363; SCAPE, Algorithm 1.

m_t = b1 m_{t-1} + (1 - b1) g_t
v_t = b2 m_{t-1}^2 + (1 - b2) g_t^2
u_t = m_t / (sqrt(v_t) + eps)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BIAS_CORRECTIONS = ("both", "none", "momentum")


class Coefficients(NamedTuple):
    """What the rule of one step is made of, each a number or float32 (); powers are taken once, not for each entry."""

    b1: Any
    rest1: Any  # 1 - b1
    b2: Any
    rest2: Any  # 1 - b2
    eps: Any
    m_part: Any  # 1 - b1^t
    v_scale: Any  # 1 / (1 - b2^t)


def coefficients(step: Any, *, b1: Any, b2: Any, eps: Any) -> Coefficients:
    """Those of step t, from 1; float32 ()."""
    return Coefficients(b1, 1 - b1, b2, 1 - b2, eps, 1 - b1**step, 1 / (1 - b2**step))


def adams(
    g: jax.Array, m_prev: jax.Array, g_in_v: jax.Array, c: Coefficients, bias_correction: str
) -> tuple[jax.Array, jax.Array]:
    """(m_t, u_t) from the gradient that enters m, m_{t-1} and the gradient that enters v; float32, of one shape.

    bias_correction: "none" (the formula above), "both" (m_t by 1 - b1^t and v_t by 1 - b2^t) or "momentum"
    (m_{t-1} and m_t, both by 1 - b1^t).
    """
    m = c.b1 * m_prev + c.rest1 * g
    m_hat, m_prev_hat = m, m_prev
    if bias_correction != "none":
        m_hat = m / c.m_part
    if bias_correction == "momentum":
        m_prev_hat = m_prev / c.m_part
    v = c.b2 * jnp.square(m_prev_hat) + c.rest2 * jnp.square(g_in_v)
    if bias_correction == "both":
        v = v * c.v_scale
    return m, m_hat / (jnp.sqrt(v) + c.eps)
