"""The inner step that a worker repeats between two exchanges, for any optax transformation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax


class LocalStep(NamedTuple):
    """One inner step and how its state begins.

    Attributes:
      init: params -> inner state.
      step: (params, inner state, batch) -> (params, inner state, metrics), metrics a dict of scalars.
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any, dict[str, jax.Array]]]


def make_local_step(loss_fn: Callable[[Any, Any], jax.Array], tx: optax.GradientTransformation) -> LocalStep:
    """The inner step of any optax transformation.

    Communicates what `tx` does: nothing, or over the devices of an island.

    Args:
      loss_fn: (params, batch) -> scalar loss, the mean over the batch it is given.
      tx: the inner optimizer; on an island of several devices one that averages gradients over them itself, such as
        scape_jax.scape(..., axis_name="data").

    Returns:
      A LocalStep with the metric "loss".

    Example:
      >>> import jax.numpy as jnp, optax, gasloc_jax
      >>> step = gasloc_jax.make_local_step(lambda params, x: jnp.mean(params["w"] * x), optax.adamw(1e-3))
      >>> params = {"w": jnp.ones(3)}
      >>> params, state, metrics = step.step(params, step.init(params), jnp.ones(3))
    """
    update = optax.with_extra_args_support(tx).update
    # scape_jax's optimizers can write into the parameters, which spares an update of their size.
    apply = getattr(tx, "apply", None)

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        if apply is not None:
            params, state = apply(grads, state, params, value=loss)
        else:
            updates, state = update(grads, state, params, value=loss)
            params = optax.apply_updates(params, updates)
        return params, state, {"loss": loss}

    return LocalStep(tx.init, step)
