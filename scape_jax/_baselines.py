"""What SCAPE is measured against, in the same interface: dense AdamW and AdamS, and top-k of the raw gradient.

Each averages gradients over the workers itself, clips once, and skips a step on all workers when a gradient is not
finite, so that a comparison changes one thing at a time.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from pallas_kernels.bits import pack
from pallas_kernels.compact import row_indices
from pallas_kernels.select import select
from scape_jax import _exchange as ex
from scape_jax._adams import BiasCorrection, output_dtypes, scale_by_adams
from scape_jax._chain import make_optimizer
from scape_jax._checks import (
    check_clip_norm,
    check_density,
    check_hyperparameters,
    check_one_of,
    check_payload_dtype,
    check_skip_spike,
    check_whole_number,
)
from scape_jax._layout import check_real, keep_of, leaf_layouts, path_name
from scape_jax._wire import wire_bytes


class AllReduceState(NamedTuple):
    """State of `all_reduce_gradients`: what the last exchange told."""

    stats: ex.StepStats


class TopKState(NamedTuple):
    """State of `topk_gradients`.

    Attributes:
      residual: like the parameters with a leading worker axis, float32 (W, *shape): gradient not yet sent;
        None for a dense leaf.
      stats: what the last exchange told.
    """

    residual: Any
    stats: ex.StepStats


TopKState.per_worker = ("residual",)  # type: ignore[attr-defined]


def _clipped(means, bad, loss, stats, clip_norm, skip_nonfinite, skip_spike):
    """(clipped gradients, zero on a skip; stats; ok): the same end for every dense result."""
    stats, ok = ex.judge(means, bad, loss, stats, clip_norm, skip_nonfinite, skip_spike)
    return [jnp.where(ok, stats.clip_factor * g, 0.0) for g in means], stats, ok


def all_reduce_gradients(
    axis_name: ex.AxisName = None,
    clip_norm: float | None = 1.0,
    payload_dtype: Any = jnp.float32,
    skip_nonfinite: bool = True,
    skip_spike: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Averages the workers' gradients with one dense all-reduce and clips the average by its global norm.

    Communicated per worker and step: 2 (W-1)/W times all gradients in `payload_dtype`, plus 8 bytes.

    Args:
      axis_name: mesh axis (or axes) of the workers; None: one worker.
      clip_norm: global norm to clip to; None: no clipping.
      payload_dtype: float32 or bfloat16.
      skip_nonfinite: hand on zeros, on all workers, when any gradient is not finite.
      skip_spike: the same when the mean loss is so many nats above its recent mean, see `scape`.

    Raises:
      ValueError: a setting is outside its range, or the axis is not bound.
    """
    check_clip_norm(clip_norm)
    check_skip_spike(skip_spike)
    check_payload_dtype(payload_dtype)

    def init(params):
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
            check_real(path_name(path), leaf)
        return AllReduceState(ex.init_stats(skip_spike))

    def update(updates, state, params=None, *, value=None, nonfinite=None, **extra_args):
        del extra_args
        num_workers = ex.axis_size(axis_name)
        ex.check_local(updates, axis_name, num_workers)
        leaves, treedef = jax.tree.flatten(updates)
        grads = [g.astype(jnp.float32) for g in leaves]
        nonfinite, value = ex.control_numbers(grads, nonfinite, value, skip_nonfinite)
        means, bad, loss = ex.all_reduce_mean(grads, nonfinite, value, axis_name, num_workers, payload_dtype)
        means, stats, _ = _clipped(means, bad, loss, state.stats, clip_norm, skip_nonfinite, skip_spike)
        dtypes = output_dtypes(leaves, treedef, params)
        return treedef.unflatten([g.astype(t) for g, t in zip(means, dtypes, strict=True)]), AllReduceState(
            stats
        )

    return optax.GradientTransformationExtraArgs(init, update)


def topk_gradients(
    density: float | None = None,
    axis_name: ex.AxisName = None,
    clip_norm: float | None = 1.0,
    skip_nonfinite: bool = True,
    block_size: int | None = None,
    skip_spike: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Averages the workers' top-k gradients: each sends its largest entries of gradient plus residual, per leaf.

    The masks differ between workers, so values travel with their positions in an all-gather, and the union grows with W
    (fill-in). Communicated per worker and step: (W-1) * 8 * d * P bytes, plus the dense leaves as in SCAPE.

    Args:
      density: fraction kept of each leaf, in (0, 1]. None: 0.1.
      axis_name: mesh axis (or axes) of the workers; None: one worker.
      clip_norm: global norm to clip the average to; None: no clipping.
      skip_nonfinite: as in `all_reduce_gradients`.
      block_size: leaves smaller than this are dense. None: 4096.
      skip_spike: as in `all_reduce_gradients`.

    Raises:
      ValueError: a setting is outside its range, or the axis is not bound.
    """
    density = 0.1 if density is None else density
    block_size = 4096 if block_size is None else block_size
    check_density(density)
    check_whole_number("block_size", block_size, 1, "Typical: 4096.")
    check_clip_norm(clip_norm)
    check_skip_spike(skip_spike)
    layout_arguments: dict[str, Any] = {
        "density": density,
        "block_size": block_size,
        "selection": "block",
        "dense": None,
    }

    def init(params):
        layouts, treedef = leaf_layouts(params, num_workers=1, **layout_arguments)
        residual = [jnp.zeros((1, *lay.shape), jnp.float32) if lay.sparse else None for lay in layouts]
        return TopKState(treedef.unflatten(residual), ex.init_stats(skip_spike))

    def update(updates, state, params=None, *, value=None, nonfinite=None, **extra_args):
        del extra_args
        num_workers = ex.axis_size(axis_name)
        ex.check_local(updates, axis_name, num_workers)
        layouts, treedef = leaf_layouts(updates, num_workers=1, **layout_arguments)
        leaves = jax.tree.leaves(updates)
        grads = [g.astype(jnp.float32).reshape(-1) for g in leaves]
        nonfinite, value = ex.control_numbers(grads, nonfinite, value, skip_nonfinite)
        residual = treedef.flatten_up_to(state.residual)

        total, at, sent = [], [], []
        for lay, g, e in zip(layouts, grads, residual, strict=True):
            if not lay.sparse:
                continue
            acc = g + e.reshape(-1)
            keep = keep_of(lay.size, density)
            at.append(row_indices(pack(select(acc[None], keep)), keep)[0])
            total.append(acc)
            sent.append(acc[at[-1]])
        dense = [g for g, lay in zip(grads, layouts, strict=True) if not lay.sparse]
        dense, bad, loss = ex.all_reduce_mean(dense, nonfinite, value, axis_name, num_workers, jnp.float32)
        averaged = _gather_sum(total, at, sent, axis_name, num_workers)
        dense, averaged = iter(dense), iter(averaged)
        means = [next(averaged) / num_workers if lay.sparse else next(dense) for lay in layouts]
        means, stats, ok = _clipped(means, bad, loss, state.stats, clip_norm, skip_nonfinite, skip_spike)

        total, at = iter(total), iter(at)
        new_residual = [
            jnp.where(ok, next(total).at[next(at)].set(0.0), e.reshape(-1)).reshape(e.shape)
            if lay.sparse
            else None
            for lay, e in zip(layouts, residual, strict=True)
        ]
        dtypes = output_dtypes(leaves, treedef, params)
        out = [g.reshape(lay.shape).astype(t) for g, lay, t in zip(means, layouts, dtypes, strict=True)]
        return treedef.unflatten(out), TopKState(treedef.unflatten(new_residual), stats)

    return optax.GradientTransformationExtraArgs(init, update)


def _gather_sum(total, at, sent, axis_name, num_workers):
    """Sum over workers of the sent entries of each leaf, dense; values and positions in ONE all-gather of uint32."""
    if not total:
        return []
    words = jnp.concatenate([lax.bitcast_convert_type(x, jnp.uint32) for x in [*sent, *at]])
    words = ex.all_gather(words, axis_name, num_workers)
    half = words.shape[1] // 2
    out, start = [], 0
    for acc, i in zip(total, at, strict=True):
        part = slice(start, start + i.size)
        values = lax.bitcast_convert_type(words[:, :half][:, part], jnp.float32).reshape(-1)
        places = lax.bitcast_convert_type(words[:, half:][:, part], jnp.int32).reshape(-1)
        out.append(jnp.zeros(acc.shape, acc.dtype).at[places].add(values, mode="promise_in_bounds"))
        start += i.size
    return out


def adams(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    clip_norm: float | None = 1.0,
    bias_correction: BiasCorrection = "both",
    axis_name: ex.AxisName = None,
    payload_dtype: Any = None,
    skip_nonfinite: bool = True,
    skip_spike: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamS on the gradient averaged by one dense all-reduce. State: 4 bytes per parameter.

    The arguments mean what they do in `scape`. Communicated per worker and step: 2 (W-1)/W times all gradients in
    `payload_dtype` (None: float32), plus 8 bytes.

    Raises:
      ValueError: a setting is outside its range.

    Example:
      >>> import jax.numpy as jnp, scape_jax
      >>> tx = scape_jax.adams(1e-3, weight_decay=0.1)
      >>> state = tx.init({"w": jnp.ones((2, 2))})

    References:
      AdamS, arXiv 2505.16363.
    """
    exchange = all_reduce_gradients(
        axis_name, clip_norm, payload_dtype or jnp.float32, skip_nonfinite, skip_spike
    )
    rule = optax.chain(exchange, scale_by_adams(b1, b2, eps, bias_correction))
    wire = functools.partial(wire_bytes, method="all_reduce", payload_dtype=payload_dtype)
    return make_optimizer(rule, learning_rate, weight_decay, weight_decay_mask, wire=wire)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    clip_norm: float | None = 1.0,
    axis_name: ex.AxisName = None,
    payload_dtype: Any = None,
    skip_nonfinite: bool = True,
    skip_spike: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """optax's AdamW on the gradient averaged by one dense all-reduce: what one would run without SCAPE.

    The arguments mean what they do in `scape`; bytes as in `adams`. State: 8 bytes per parameter.

    Raises:
      ValueError: a setting is outside its range.

    Example:
      >>> import jax.numpy as jnp, scape_jax
      >>> tx = scape_jax.adamw(1e-3, weight_decay=0.1)
      >>> state = tx.init({"w": jnp.ones((2, 2))})
    """
    check_hyperparameters(b1, b2, eps)
    exchange = all_reduce_gradients(
        axis_name, clip_norm, payload_dtype or jnp.float32, skip_nonfinite, skip_spike
    )
    rule = optax.chain(exchange, optax.scale_by_adam(b1, b2, eps))
    wire = functools.partial(wire_bytes, method="all_reduce", payload_dtype=payload_dtype)
    return make_optimizer(rule, learning_rate, weight_decay, weight_decay_mask, wire=wire)


def topk(
    learning_rate: optax.ScalarOrSchedule,
    density: float | None = None,
    *,
    optimizer: Literal["adamw", "adams"] = "adamw",
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    clip_norm: float | None = 1.0,
    bias_correction: BiasCorrection = "both",
    axis_name: ex.AxisName = None,
    block_size: int | None = None,
    skip_nonfinite: bool = True,
    skip_spike: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Per-leaf top-k of the raw gradient with error feedback, under AdamW or AdamS: what SCAPE is measured against.

    See `topk_gradients` for what is communicated. State: 4 bytes per parameter and worker beside the optimizer's.

    Raises:
      ValueError: a setting is outside its range.

    Example:
      >>> import jax.numpy as jnp, scape_jax
      >>> tx = scape_jax.topk(1e-3, density=0.1, optimizer="adams")
      >>> state = tx.init({"w": jnp.ones((64, 128))})
    """
    check_one_of("optimizer", optimizer, ("adamw", "adams"))
    check_hyperparameters(b1, b2, eps)
    exchange = topk_gradients(density, axis_name, clip_norm, skip_nonfinite, block_size, skip_spike)
    if optimizer == "adamw":
        inner = optax.scale_by_adam(b1, b2, eps)
    else:
        inner = scale_by_adams(b1, b2, eps, bias_correction)
    wire = functools.partial(wire_bytes, method="topk", density=density, block_size=block_size)
    return make_optimizer(
        optax.chain(exchange, inner), learning_rate, weight_decay, weight_decay_mask, wire=wire
    )
