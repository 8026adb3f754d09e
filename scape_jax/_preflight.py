"""What is checked before the first step is compiled: equal parameters on all workers, and equal updates for them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.digest import digest
from scape_jax import _exchange as ex
from scape_jax._layout import path_name
from scape_jax._worker_types import axes_of, own_on_workers, varying_axes


def check_equal_on_workers(params: Any, mesh: Mesh, axis_name: ex.AxisName = "data") -> None:
    """All workers must hold the same parameters, bit for bit. Communicates 4 bytes per leaf and worker.

    Raises:
      ValueError: names the first leaf that differs and the workers that differ from worker 0.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(params)

    def digests_of(leaves):
        digests = jnp.stack([digest(x) for x in leaves])
        return ex.all_gather(digests, axis_name, ex.axis_size(axis_name))

    fn = jax.shard_map(
        digests_of, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    digests = np.asarray(jax.jit(fn)([jnp.asarray(x) for _, x in flat])) if flat else np.zeros((1, 0))
    differs = digests != digests[:1]
    if differs.any():
        leaf = int(np.argmax(differs.any(axis=0)))
        workers = np.nonzero(differs[:, leaf])[0].tolist()
        raise ValueError(
            f"all workers must start from the same parameters, but {path_name(flat[leaf][0])!r} of worker(s) {workers} "
            "differs from worker 0's. Initialise from one seed, or broadcast worker 0's parameters."
        )


# States of optax wrappers that look at the gradients before the exchange, and what comes of it.
_LOCAL_WRAPPERS: dict[type, str] = {
    optax.MultiStepsState: (
        "optax.MultiSteps, whose running sum is another on each worker. Use make_train_step(accumulate=...)."
    ),
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite, which looks at each worker's own gradient: where workers disagree they wait for each "
        "other forever. Leave it out: non-finite steps are skipped on all workers (skip_nonfinite=True)."
    ),
}


def check_exchange(
    update: Callable[..., Any], params: Any, state: Any, specs: Any, mesh: Mesh, axis_name: ex.AxisName
) -> None:
    """Local gradients must come out of `update` as one update for all workers, and one state where specs say so.

    Nothing is run or compiled. shard_map's check_vma follows which values differ between workers; where a
    transformation cannot be traced under it, only the presence of an all-reduce over the axis is checked.

    Args:
      update: the optimizer's update.
      params, state: ShapeDtypeStructs, the global ones.
      specs: the state's PartitionSpecs.
      mesh, axis_name: the workers.

    Raises:
      ValueError: names the update or the state field that would differ between workers.
    """
    axes = set(axes_of(axis_name))
    if all(mesh.shape[a] == 1 for a in axes):
        return
    for wrapper, trouble in _LOCAL_WRAPPERS.items():
        if _holds(state, wrapper):
            raise ValueError(f"tx must do the same on all workers, got {trouble}")
    differing: dict[str, list[str]] = {"updates": [], "state": []}

    def probe(params: Any, state: Any) -> jax.Array:
        grads = jax.tree.map(lambda p: own_on_workers(p, axis_name), params)
        updates, new_state = update(grads, state, params)
        differing["updates"] = [name for name, x in _named(updates) if varying_axes(x) & axes]
        named_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        differing["state"] = [
            name
            for (name, x), spec in zip(_named(new_state), named_specs, strict=True)
            if varying_axes(x) & axes and spec == PartitionSpec()
        ]
        return jnp.zeros(())

    def mapped(fn: Callable, out_specs: Any, check_vma: bool) -> Callable:
        in_specs = (PartitionSpec(), specs)
        return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)

    try:
        jax.eval_shape(mapped(probe, PartitionSpec(), True), params, state)
    except Exception:
        # A transformation that is right can still be badly typed; without types, look for the collective alone.
        plain = mapped(lambda p, s: update(p, s, p), (PartitionSpec(), specs), False)
        if not _reduces_over(jax.make_jaxpr(plain)(params, state).jaxpr, axes):
            differing["updates"] = [name for name, _ in _named(params)]
    if differing["updates"]:
        raise ValueError(
            f"tx must give all workers of axis {axis_name!r} the same update, but that of {differing['updates'][0]!r} "
            f"would be each worker's own. Build the optimizer with axis_name={axis_name!r}, as the step is; in front "
            "of a transformation that has no axis_name chain scape_jax.all_reduce_gradients."
        )
    if differing["state"]:
        raise ValueError(
            f"the optimizer state must be equal on all workers of axis {axis_name!r}, but {differing['state'][0]!r} "
            "would be each worker's own. Chain what keeps a memory of gradients behind the exchange, not before it."
        )


def _holds(state: Any, kind: type) -> bool:
    is_kind = lambda x: isinstance(x, kind)  # noqa: E731
    return any(is_kind(x) for x in jax.tree.leaves(state, is_leaf=is_kind))


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(path_name(path), x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _reduces_over(jaxpr: Any, axes: set[str]) -> bool:
    """Whether an all-reduce over one of the axes appears anywhere in a jaxpr."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("psum") and axes & set(eqn.params.get("axes", ())):
            return True
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(sub, "jaxpr", sub)
                if hasattr(inner, "eqns") and _reduces_over(inner, axes):
                    return True
    return False
