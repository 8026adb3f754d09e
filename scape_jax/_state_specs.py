"""How an optimizer state lies on the mesh: which of its fields have an axis of workers."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from scape_jax import _exchange as ex


def state_specs(opt_state: Any, axis_name: ex.AxisName = "data") -> Any:
    """PartitionSpecs for an optimizer state: per-worker fields are sharded over the worker axis, the rest is replicated.

    Args:
      opt_state: an optax state (arrays or ShapeDtypeStructs), of any nesting.
      axis_name: the workers' mesh axis or axes.

    Returns:
      A tree of PartitionSpecs with the structure of `opt_state`.
    """
    per_worker = lambda x: bool(getattr(type(x), "per_worker", ()))  # noqa: E731

    def specs(node):
        if not per_worker(node):
            return PartitionSpec()
        fields = {}
        for name, value in node._asdict().items():
            spec = PartitionSpec(axis_name) if name in type(node).per_worker else PartitionSpec()
            fields[name] = jax.tree.map(lambda _, spec=spec: spec, value)
        return type(node)(**fields)

    return jax.tree.map(specs, opt_state, is_leaf=per_worker)
