"""What one worker does in a step: gradients of its own part of the batch, then the optimizer, which exchanges them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from scape_jax import _exchange as ex
from scape_jax._layout import path_name
from scape_jax._telemetry import telemetry


def check_batch(batch: Any, num_workers: int, accumulate: int) -> None:
    """Raises ValueError where the leading axes do not divide over workers and micro-batches, or differ."""
    parts = num_workers * accumulate
    rows: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        name, size = path_name(path), jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0
        if size == 0 or size % parts:
            raise ValueError(
                f"the batch must be divisible by workers * accumulate = {num_workers} * {accumulate} = {parts}, got "
                f"{size} rows in {name!r}. Use a multiple of {parts}."
            )
        rows[name] = size
    if len(set(rows.values())) > 1:
        raise ValueError(f"all leaves of a batch must have equally many rows, got {rows}. Cut or pad them.")


def loss_and_grads(
    loss_fn: Callable[[Any, Any], jax.Array], params: Any, batch: Any, accumulate: int
) -> tuple[jax.Array, Any]:
    """Mean loss and mean gradient over the micro-batches; clipping comes later, once, on the average.

    Args:
      loss_fn: (params, batch) -> scalar, the mean over the batch it is given.
      params: a tree of arrays.
      batch: a tree of arrays whose leading axis `accumulate` divides.
      accumulate: micro-batches, one after the other; the memory of one is needed. Nothing is communicated.

    Returns:
      (loss, gradients), float32 where there is more than one micro-batch.

    Example:
      >>> import jax.numpy as jnp, scape_jax
      >>> loss_fn = lambda params, batch: jnp.mean(params * batch)
      >>> loss, grad = scape_jax.loss_and_grads(loss_fn, jnp.float32(2.0), jnp.arange(4.0), 2)
      >>> float(loss), float(grad)
      (3.0, 1.5)
    """
    value_and_grad = jax.value_and_grad(loss_fn)
    if accumulate == 1:
        return value_and_grad(params, batch)
    micro = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)

    def add(total, part):
        loss, grads = value_and_grad(params, part)
        total_loss, total_grads = total
        add32 = lambda a, b: a + b.astype(jnp.float32)  # noqa: E731
        return (total_loss + loss.astype(jnp.float32), jax.tree.map(add32, total_grads, grads)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    (loss, grads), _ = lax.scan(add, (jnp.zeros((), jnp.float32), zeros), micro)
    return loss / accumulate, jax.tree.map(lambda g: g / accumulate, grads)


def worker_step(
    loss_fn: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    batch: Any,
    *,
    accumulate: int,
    level: int | None,
    telemetry_over: ex.AxisName | None,
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """(params, opt_state, metrics) after one step; `params` replicated, `batch` this worker's part.

    `level` None: the program chooses the density by the step count. `telemetry_over`: the workers' axes, where the
    metrics shall hold the figures of `telemetry` too.
    """
    loss, grads = loss_and_grads(loss_fn, params, batch, accumulate)
    extra: dict[str, Any] = {} if level is None else {"level": level}
    extra |= {"value": loss}
    if getattr(tx, "apply", None) is not None:
        new_params, new_state = tx.apply(grads, opt_state, params, **extra)
    else:
        # Of the raw gradients: what stands before the exchange in a chain may hide that they are not finite.
        extra |= {"nonfinite": ex.any_nonfinite(jax.tree.leaves(grads))}
        update = optax.with_extra_args_support(tx).update
        updates, new_state = update(grads, opt_state, params, **extra)
        ok = ex.step_was_taken(opt_state, new_state)
        new_params = jax.tree.map(
            lambda n, o: jnp.where(ok, n, o), optax.apply_updates(params, updates), params
        )
        new_state = ex.keep_if(ok, new_state, opt_state)
    stats = ex.communicating_states(new_state)[0].stats._asdict()
    metrics = {name: value for name, value in stats.items() if value is not None}
    if telemetry_over is not None:
        metrics |= telemetry(new_state, telemetry_over)
    return new_params, new_state, metrics
