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


def make_local_step(
    loss_fn: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    *,
    value_and_grad: Callable[[Callable], Callable[[Any, Any], tuple[jax.Array, Any]]] = jax.value_and_grad,
) -> LocalStep:
    """The inner step of any optax transformation.

    Communicates what `tx` does: nothing, or over the devices of an island.

    Args:
      loss_fn: (params, batch) -> scalar loss, the mean over the batch it is given.
      tx: the inner optimizer; on an island of several devices one that averages gradients over them itself, such as
        scape_jax.scape(..., axis_name="data").
      value_and_grad: makes (params, batch) -> (loss, gradients) of `loss_fn`; called once, here. Another one than JAX's
        takes micro-batches: `tx` then sees the mean of their gradients, so that clipping and counting happen once a step.

    Returns:
      A LocalStep with the metric "loss".

    Example:
      >>> import jax.numpy as jnp, optax, gasloc_jax
      >>> step = gasloc_jax.make_local_step(lambda params, x: jnp.mean(params["w"] * x), optax.adamw(1e-3))
      >>> params = {"w": jnp.ones(3)}
      >>> params, state, metrics = step.step(params, step.init(params), jnp.ones(3))

      Four micro-batches a step, one after the other:

      >>> import functools, scape_jax
      >>> in_parts = lambda loss_fn: functools.partial(scape_jax.loss_and_grads, loss_fn, accumulate=4)
      >>> loss_fn = lambda params, x: jnp.mean(x @ params["w"])
      >>> step = gasloc_jax.make_local_step(loss_fn, optax.adamw(1e-3), value_and_grad=in_parts)
      >>> params, state, metrics = step.step(params, step.init(params), jnp.ones((8, 3)))
    """
    loss_and_grads = value_and_grad(loss_fn)
    update = optax.with_extra_args_support(tx).update
    # scape_jax's optimizers can write into the parameters, which spares an update of their size.
    apply = getattr(tx, "apply", None)

    def step(params, state, batch):
        loss, grads = loss_and_grads(params, batch)
        if apply is not None:
            params, state = apply(grads, state, params, value=loss)
        else:
            updates, state = update(grads, state, params, value=loss)
            params = optax.apply_updates(params, updates)
        return params, state, {"loss": loss}

    return LocalStep(tx.init, step)
