"""Where the arrays of a round lie, so that a user never writes a PartitionSpec."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from gasloc_jax._worker_round import RoundState


def batch_spec(axis_name: str, inner_axes: tuple[str, ...]) -> PartitionSpec:
    """(W, H_max, batch, ...): over the workers, and the batch axis over the devices of an island."""
    return PartitionSpec(axis_name, None, inner_axes) if inner_axes else PartitionSpec(axis_name)


def state_specs(state: RoundState, axis_name: str, inner_axes: tuple[str, ...], fragments: int) -> RoundState:
    """A prefix of the state's tree: all over the workers, fields that a type names `per_worker` over islands too."""
    over, devices = PartitionSpec(axis_name), [inner_axes] if inner_axes else []
    specs: dict[str, Any] = {name: over for name in RoundState._fields}
    specs["inner"] = _optimizer_specs(state.inner, over, PartitionSpec(axis_name, *devices))
    # With fragments the axis F stands before that of the island's devices.
    lead = (None,) if fragments > 1 else ()
    specs["outer"] = _optimizer_specs(state.outer, over, PartitionSpec(axis_name, *lead, *devices))
    return RoundState(**specs)


def _optimizer_specs(tree: Any, over_workers: PartitionSpec, over_devices: PartitionSpec) -> Any:
    """The attribute is looked for, not a type: scape_jax's states have it as ours do."""
    owned = lambda x: bool(getattr(type(x), "per_worker", ()))  # noqa: E731

    def specs(node):
        if not owned(node):
            return over_workers
        fields = {}
        for name, value in node._asdict().items():
            if name in type(node).per_worker:
                fields[name] = jax.tree.map(lambda _: over_devices, value)
            else:
                fields[name] = _optimizer_specs(value, over_workers, over_devices)
        return type(node)(**fields)

    return jax.tree.map(specs, tree, is_leaf=owned)
