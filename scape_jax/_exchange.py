"""The two collectives that everything here uses, their options, and what travels with every exchange.

A worker axis of size 1, or no axis, skips the collective and nothing else.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from pallas_kernels import gloo
from scape_jax._worker_types import equal_on_workers

AxisName = str | tuple[str, ...] | None


class StepStats(NamedTuple):
    """What the last exchange told about the step. Equal on all workers.

    Attributes:
      loss: float32 (), mean over workers of the `value` that update() was given, else 0.
      grad_norm: float32 (), global norm of the averaged gradient before clipping.
      clip_factor: float32 (), what the gradient was multiplied by.
      skipped: int32 (), steps skipped so far because a gradient was not finite, or by skip_spike.
      usual_loss: float32 (), with skip_spike: running mean of the losses of the steps taken, 0 before the first; else None.
    """

    loss: jax.Array
    grad_norm: jax.Array
    clip_factor: jax.Array
    skipped: jax.Array
    usual_loss: jax.Array | None = None


USUAL_WEIGHT = 0.05  # of the newest loss in the usual one, which so follows some 20 steps


def init_stats(skip_spike: Any = None) -> StepStats:
    zero = jnp.zeros((), jnp.float32)
    usual_loss = None if skip_spike is None else zero
    return StepStats(zero, zero, jnp.ones((), jnp.float32), jnp.zeros((), jnp.int32), usual_loss)


def axis_size(axis_name: AxisName) -> int:
    """Workers on the axis; 1 without an axis.

    Raises:
      ValueError: the axis is not bound here.
    """
    if axis_name is None:
        return 1
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis_name must name an axis of the surrounding shard_map, got {axis_name!r}, which is not bound here. "
            "Use scape_jax.make_train_step (its init() makes the state), call init and update inside shard_map, "
            "or pass axis_name=None for one worker."
        ) from error


def worker_index(axis_name: AxisName, num_workers: int) -> jax.Array:
    return lax.axis_index(axis_name) if num_workers > 1 else jnp.zeros((), jnp.int32)


def check_local(updates: Any, axis_name: AxisName, num_workers: int) -> None:
    """Gradients must still be each worker's own: shard_map's check_vma sums those of replicated parameters by itself.

    Raises:
      ValueError: the gradients were already summed over the axis.
    """
    if num_workers == 1:
        return
    axes = {axis_name} if isinstance(axis_name, str) else set(axis_name or ())
    if not axes <= jax.typeof(lax.axis_index(axis_name)).manual_axis_type.varying:
        return  # check_vma=False: the types say nothing, and gradients are local.
    for leaf in jax.tree.leaves(updates):
        if not axes & jax.typeof(leaf).manual_axis_type.varying:
            raise ValueError(
                f"gradients must be each worker's own, got gradients already summed over {axis_name!r} (shard_map with "
                "check_vma=True does that for replicated parameters). Take them with respect to "
                f"jax.lax.pcast(params, {axis_name!r}, to='varying'), or use check_vma=False."
            )


def any_nonfinite(leaves: list[jax.Array]) -> jax.Array:
    """float32 (): 1 if an entry of any leaf is NaN or infinite, or the squares' sum overflows, else 0.

    One read of each leaf: a sum of squares is the fastest reduction that NaN and infinity cannot pass unseen.
    """
    total = sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves), jnp.zeros((), jnp.float32))
    return flag_of_squares(total)


def flag_of_squares(total: jax.Array) -> jax.Array:
    """float32 (): 1 if a sum of squares is not finite, else 0."""
    return jnp.where(jnp.isfinite(total), 0.0, 1.0).astype(jnp.float32)


def control_numbers(
    grads: list[jax.Array], nonfinite: jax.Array | None, loss: jax.Array | None, skip_nonfinite: bool
) -> tuple[jax.Array, jax.Array]:
    """(non-finite flag, loss) of this worker, float32 (): what update() was given, else its own check, and 0."""
    zero = jnp.zeros((), jnp.float32)
    if nonfinite is None:
        nonfinite = any_nonfinite(grads) if skip_nonfinite else zero
    return nonfinite, zero if loss is None else loss


def all_reduce_mean(
    payload: list[jax.Array],
    nonfinite: jax.Array,
    loss: jax.Array,
    axis_name: AxisName,
    num_workers: int,
    dtype: Any,
    bundle: bool = False,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """ONE psum: the mean over workers of each payload array (float32), how many workers were non-finite, mean loss.

    The arrays travel in `dtype`; the two control numbers in float32 with them. `bundle` packs everything of one dtype
    into one vector, so that no backend sends more than one message; without it the arrays are handed over as they are,
    which spares a copy of all parameters in a dense step and leaves the combining to XLA.
    """
    sent = [p.astype(dtype) for p in payload]
    control = jnp.stack([nonfinite, loss.astype(jnp.float32)])
    if num_workers > 1 and bundle:
        with_control = jnp.dtype(dtype) == jnp.float32
        flat = [x.reshape(-1) for x in (*sent, *([control] if with_control else []))]
        total, alone = all_sum(
            (jnp.concatenate(flat), None if with_control else control), axis_name, num_workers
        )
        ends = np.cumsum([x.size for x in flat])
        sent = [total[end - x.size : end].reshape(x.shape) for x, end in zip(sent, ends, strict=False)]
        control = total[-2:] if with_control else alone
    else:
        sent, control = all_sum((sent, control), axis_name, num_workers)
    scale = 1.0 / num_workers
    means = [x.astype(jnp.float32) * scale if num_workers > 1 else x.astype(jnp.float32) for x in sent]
    return means, control[0], control[1] * scale


def all_sum(tree: Any, axis_name: AxisName, num_workers: int) -> Any:
    """The sum over workers of every array of the tree."""
    if num_workers == 1:
        return jax.tree.map(lambda x: equal_on_workers(x, axis_name), tree)
    whole = functools.partial(lax.psum, axis_name=axis_name)
    if all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves(tree)):
        return whole(tree)
    in_parts = functools.partial(_sum_in_parts, axis_name=axis_name, num_workers=num_workers)
    return lax.platform_dependent(tree, cpu=in_parts, default=whole)


def _sum_in_parts(tree: Any, *, axis_name: AxisName, num_workers: int) -> Any:
    """`psum` whose bfloat16 arrays travel as that: XLA on CPU widens an all-reduce of them to float32.

    Each worker adds up one part of all in float32 and rounds it once. The bytes are those of a ring all-reduce.
    """
    leaves, treedef = jax.tree.flatten(tree)
    narrow = [i for i, x in enumerate(leaves) if x.dtype == jnp.bfloat16]
    flat = jnp.concatenate([leaves[i].reshape(-1) for i in narrow])
    parts = jnp.pad(flat, (0, -flat.size % num_workers)).reshape(num_workers, -1)
    # As whole numbers, which no backend widens.
    parts = lax.bitcast_convert_type(parts, jnp.uint16)
    typed = jax.typeof(lax.axis_index(axis_name)).manual_axis_type.varying
    if num_workers % 2 or typed or not isinstance(axis_name, str):
        parts = lax.all_to_all(parts, axis_name, 0, 0)
    else:
        parts = gloo.all_to_all(parts, axis_name, num_workers)
    # Added in a fixed order, which a reduction leaves to the program around it.
    wide = lax.bitcast_convert_type(parts, jnp.bfloat16).astype(jnp.float32)
    part = functools.reduce(jnp.add, list(wide))
    bits = lax.bitcast_convert_type(part.astype(jnp.bfloat16), jnp.uint16)
    total = lax.bitcast_convert_type(all_gather(bits, axis_name, num_workers), jnp.bfloat16).reshape(-1)
    sums = lax.psum([x for i, x in enumerate(leaves) if i not in narrow], axis_name)
    start = 0
    for i in narrow:
        x = leaves[i]
        sums.insert(i, total[start : start + x.size].reshape(x.shape))
        start += x.size
    return treedef.unflatten(sums)


def all_gather(x: jax.Array, axis_name: AxisName, num_workers: int) -> jax.Array:
    """(n,) on each worker -> (W, n), equal on all."""
    if num_workers == 1:
        return equal_on_workers(x, axis_name)[None]
    return lax.all_gather(x, axis_name, tiled=False, to="invarying")


def clip_factor(grad_norm: jax.Array, clip_norm: Any) -> jax.Array:
    """min(1, clip_norm / norm); 1 for a zero gradient."""
    if clip_norm is None:
        return jnp.ones((), jnp.float32)
    return jnp.where(grad_norm > clip_norm, clip_norm / jnp.where(grad_norm > 0, grad_norm, 1.0), 1.0).astype(
        jnp.float32
    )


def global_norm(leaves: list[jax.Array]) -> jax.Array:
    # Flat, so that the order of the sum, and the last bit of the clip factor, is the same for any shape.
    return jnp.sqrt(sum((jnp.sum(jnp.square(x.reshape(-1))) for x in leaves), jnp.zeros((), jnp.float32)))


def judge(
    means: list[jax.Array],
    bad: jax.Array,
    loss: jax.Array,
    old: StepStats,
    clip_norm: Any,
    skip_nonfinite: bool,
    skip_spike: Any = None,
) -> tuple[StepStats, jax.Array]:
    """What the averaged gradient and the mean loss decide on every worker alike: the clip factor, and whether the step is
    taken.
    """
    norm = global_norm(means)
    ok = (bad == 0) & jnp.isfinite(norm) if skip_nonfinite else jnp.ones((), bool)
    usual = old.usual_loss
    if usual is not None:
        ok = ok & ((usual == 0) | ~(loss > usual + skip_spike))
        followed = jnp.where(usual == 0, loss, usual + USUAL_WEIGHT * (loss - usual))
        usual = jnp.where(ok & jnp.isfinite(loss), followed, usual)
    skipped = old.skipped + (~ok).astype(jnp.int32)
    return StepStats(loss, norm, clip_factor(norm, clip_norm), skipped, usual), ok


def _communicates(state: Any) -> bool:
    return isinstance(getattr(state, "stats", None), StepStats)


def communicating_states(opt_state: Any) -> list[Any]:
    """The states inside an optax state that belong to transformations which exchange gradients."""
    return [x for x in jax.tree.leaves(opt_state, is_leaf=_communicates) if _communicates(x)]


def hold_on_skip(tx: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Makes a whole chain stand still when the exchange inside it skipped: schedules, moments and weight decay too.

    The update is then -0.0, the one number that leaves every parameter bit-equal when added.
    """

    def update(updates, state, params=None, **extra_args):
        new_updates, new_state = tx.update(updates, state, params, **extra_args)
        ok = step_was_taken(state, new_state)
        new_updates = jax.tree.map(lambda u: jnp.where(ok, u, jnp.full_like(u, -0.0)), new_updates)
        return new_updates, keep_if(ok, new_state, state)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def step_was_taken(old_state: Any, new_state: Any) -> jax.Array:
    """bool (): no exchange in this optax state skipped the step."""
    pairs = zip(communicating_states(old_state), communicating_states(new_state), strict=True)
    return jnp.all(jnp.stack([new.stats.skipped == old.stats.skipped for old, new in pairs]))


def keep_if(ok: jax.Array, new_state: Any, old_state: Any) -> Any:
    """`new_state` where ok, else `old_state`; states that exchange gradients have done so by themselves."""
    return jax.tree.map(
        lambda new, old: new if _communicates(new) else jnp.where(ok, new, old),
        new_state,
        old_state,
        is_leaf=_communicates,
    )
