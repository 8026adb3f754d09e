"""What is checked before the first round is compiled: equal parameters at the start, and collectives where they belong."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from gasloc_jax._checks import path_name
from pallas_kernels.digest import digest


def check_start(params: Any, mesh: Mesh, axis_name: str) -> None:
    """All devices must hold the same finite parameters, bit for bit. Communicates 4 bytes per leaf and device.

    Args:
      params: global arrays replicated over the mesh.
      mesh, axis_name: the workers.

    Raises:
      ValueError: names the first leaf that differs and the workers that differ from worker 0, or the first leaf with a
        NaN or an infinity.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    if not flat:
        return
    axes = (axis_name, *(name for name in mesh.axis_names if name != axis_name))

    def examine(leaves):
        mine = jnp.stack([digest(x) for x in leaves])
        # One device's word on finiteness is that of all where the digests are equal.
        finite = jnp.stack([jnp.isfinite(x).all() for x in leaves])
        return lax.all_gather(mine, axes).reshape(mesh.shape[axis_name], -1, len(leaves)), finite

    spec = PartitionSpec()
    fn = jax.shard_map(examine, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    digests, finite = map(np.asarray, jax.jit(fn)([x for _, x in flat]))
    differs = (digests != digests[:1, :1]).any(axis=1)
    if differs.any():
        leaf = int(np.argmax(differs.any(axis=0)))
        workers = np.nonzero(differs[:, leaf])[0].tolist()
        raise ValueError(
            f"all workers must start from the same parameters, but {path_name(flat[leaf][0])!r} of worker(s) {workers} "
            "differs from worker 0's. Initialise from one seed, or broadcast worker 0's parameters."
        )
    if not finite.all():
        name = path_name(flat[int(np.argmin(finite))][0])
        raise ValueError(
            f"parameters must be finite at the start, got NaN or infinity in {name!r}. Check its initialisation, or the "
            "checkpoint that it is from."
        )


def check_collectives(jaxpr: Any, axis_name: str, inner_axes: tuple[str, ...], exchanges: bool) -> None:
    """Local steps must not wait for other workers, must combine over their island, and the exchange must exchange.

    Args:
      jaxpr: of a round's program, whose only loops are the local steps.
      axis_name: the workers' axis.
      inner_axes: axes of size > 1 inside a worker, if the program has local steps.
      exchanges: whether a collective over the workers is expected outside the local steps.

    Raises:
      ValueError: says which of the three does not hold.
    """
    inside: set[str] = set()
    outside: set[str] = set()
    _walk(jaxpr, inside, outside, in_loop=False)
    if axis_name in inside:
        raise ValueError(
            f"a local step must not communicate over the workers' axis {axis_name!r}: workers take different numbers of "
            "steps and would wait for each other forever. Give the inner optimizer axis_name=None, or an island's axis."
        )
    missing = [name for name in inner_axes if name not in inside]
    if missing:
        raise ValueError(
            f"a local step must combine the gradients of its island over axis {missing[0]!r}, got one without a "
            f"collective there. Use an inner optimizer that does, such as scape_jax.scape(..., axis_name={missing[0]!r}), "
            "or a mesh with that axis of size 1."
        )
    if exchanges and axis_name not in outside:
        raise ValueError(
            f"the outer optimizer must exchange over the workers' axis {axis_name!r}, got one that does not. Build it "
            f"with axis_name={axis_name!r}."
        )


def _walk(jaxpr: Any, inside: set[str], outside: set[str], in_loop: bool) -> None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name.startswith(
            ("psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter")
        ):
            axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
            (inside if in_loop else outside).update((axes,) if isinstance(axes, str) else axes)
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(sub, "jaxpr", sub)
                if hasattr(inner, "eqns"):
                    _walk(inner, inside, outside, in_loop or name in ("while", "scan"))
