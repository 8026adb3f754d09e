"""AdamS: Adam whose second moment is rebuilt from the first one.

Source: arXiv 2505.16363; SCAPE (arXiv 2607.01678), Algorithm 1, the lines of v and u.

m_t = b1 m_{t-1} + (1 - b1) g_t
v_t = b2 m_{t-1}^2 + (1 - b2) g_t^2
u_t = m_t / (sqrt(v_t) + eps)
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pallas_kernels.apply_pass import BIAS_CORRECTIONS, adams, coefficients
from scape_jax._checks import check_hyperparameters, check_one_of

BiasCorrection = Literal["both", "none", "momentum"]


class ScaleByAdamSState(NamedTuple):
    """State of `scale_by_adams`.

    Attributes:
      count: int32 (), steps taken.
      m: like the parameters, float32, first moment.
    """

    count: jax.Array  # type: ignore[assignment]  # a tuple's method of that name is not needed
    m: optax.Updates


def adams_rule(
    g: jax.Array,
    m_prev: jax.Array,
    step: jax.Array,
    *,
    b1: Any,
    b2: Any,
    eps: Any,
    bias_correction: str,
    g_in_v: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One AdamS step on entries: (m_t, u_t) from the gradient and m_{t-1}, all float32 of one shape.

    Args:
      g: the gradient that enters m.
      m_prev: m_{t-1}.
      step: float32 (), t, from 1.
      b1, b2, eps: constants.
      bias_correction: "none" (the formula above), "both" (m_t by 1 - b1^t and v_t by 1 - b2^t) or "momentum"
        (m_{t-1} and m_t, both by 1 - b1^t).
      g_in_v: the gradient that enters v where it differs from `g`.
    """
    c = coefficients(step, b1=b1, b2=b2, eps=eps)
    return adams(g, m_prev, g if g_in_v is None else g_in_v, c, bias_correction)


def scale_by_adams(
    b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8, bias_correction: BiasCorrection = "both"
) -> optax.GradientTransformationExtraArgs:
    r"""The bare AdamS rule; no communication, no learning rate.

    .. math::
      m_t = b_1 m_{t-1} + (1-b_1) g_t, \quad v_t = b_2 m_{t-1}^2 + (1-b_2) g_t^2, \quad u_t = m_t/(\sqrt{v_t}+\epsilon)

    Args:
      b1: decay of the first moment, in [0, 1).
      b2: weight of the old moment in the rebuilt second one, in [0, 1).
      eps: added to the denominator.
      bias_correction: see `adams_rule`; default "both".

    Returns:
      An optax transformation with 4 bytes of state per parameter.

    Raises:
      ValueError: a constant is outside its range.

    Example:
      >>> import jax.numpy as jnp, scape_jax
      >>> tx = scape_jax.scale_by_adams()
      >>> state = tx.init({"w": jnp.zeros(2)})
      >>> updates, state = tx.update({"w": jnp.ones(2)}, state)
      >>> [round(float(u), 4) for u in updates["w"]]
      [1.0, 1.0]

    References:
      AdamS, arXiv 2505.16363.
    """
    check_hyperparameters(b1, b2, eps)
    check_one_of("bias_correction", bias_correction, BIAS_CORRECTIONS)

    def init(params):
        zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
        return ScaleByAdamSState(jnp.zeros((), jnp.int32), zeros)

    def update(updates, state, params=None, **extra_args):
        del extra_args
        leaves, treedef = jax.tree.flatten(updates)
        step = (state.count + 1).astype(jnp.float32)
        out = [
            adams_rule(g.astype(jnp.float32), m, step, b1=b1, b2=b2, eps=eps, bias_correction=bias_correction)
            for g, m in zip(leaves, treedef.flatten_up_to(state.m), strict=True)
        ]
        dtypes = output_dtypes(leaves, treedef, params)
        new_updates = treedef.unflatten([u.astype(t) for (_, u), t in zip(out, dtypes, strict=True)])
        new_m = treedef.unflatten([m for m, _ in out])
        return new_updates, ScaleByAdamSState(optax.safe_increment(state.count), new_m)

    return optax.GradientTransformationExtraArgs(init, update)


def output_dtypes(leaves: list[jax.Array], treedef: Any, params: Any) -> list[Any]:
    """Updates have the parameters' dtypes where these are given, else the gradients'."""
    like = leaves if params is None else treedef.flatten_up_to(params)
    return [jnp.result_type(x) for x in like]
