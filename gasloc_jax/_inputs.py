"""What a user hands to a round: checked before anything is compiled, and placed on the devices of its worker."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gasloc_jax._checks import check_whole_number, path_name


def make_mesh(num_workers: int, island_size: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of W workers, each an island of that many devices: axes "worker", and "data" where islands have several.

    Args:
      num_workers: W.
      island_size: devices of one worker.
      devices: neighbours in the list share an island. None: all of jax.devices(). They must be exactly used up.

    Raises:
      ValueError: workers times island size are not the devices.

    Example:
      >>> import jax, gasloc_jax
      >>> gasloc_jax.make_mesh(1, devices=jax.devices()[:1]).axis_names
      ('worker',)
    """
    check_whole_number("num_workers", num_workers, 1, "One worker trains alone.")
    check_whole_number("island_size", island_size, 1, "1 is a worker of one device.")
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) % island_size:
        raise ValueError(
            f"island_size must divide the {len(devices)} devices, got {island_size}. Use a divisor of {len(devices)}."
        )
    if num_workers * island_size != len(devices):
        raise ValueError(
            f"num_workers * island_size must be the number of devices, {len(devices)}, got {num_workers} * "
            f"{island_size}. Change one of them, or pass devices=."
        )
    shape, names = ((num_workers,), ("worker",))
    if island_size > 1:
        shape, names = (num_workers, island_size), ("worker", "data")
    return Mesh(np.array(devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def place(x: Any, sharding: NamedSharding) -> jax.Array:
    """A host array that every process has whole, as a global array."""
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def replicated(params: Any, mesh: Mesh) -> Any:
    """Global arrays that are on every device what its own process gave, strongly typed."""
    whole = NamedSharding(mesh, PartitionSpec())

    def put(x):
        if isinstance(x, jax.Array) and x.sharding == whole and not x.weak_type:
            return x
        return place(np.asarray(x, jnp.result_type(x)), whole)

    return jax.tree.map(put, params)


def check_batches(batches: Any, num_workers: int, island_size: int) -> int:
    """Steps that the batches hold.

    Raises:
      ValueError: leaves that are not (W, H_max, batch, ...), or do not agree, or do not divide over an island.
    """
    lengths: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(batches)[0]:
        name, shape = path_name(path), jnp.shape(leaf)
        if len(shape) < (3 if island_size > 1 else 2) or shape[0] != num_workers:
            raise ValueError(
                f"batches must be arrays (workers, steps, batch, ...) with {num_workers} workers, got shape {shape} in "
                f"{name!r}. Stack the batches of each worker."
            )
        if island_size > 1 and shape[2] % island_size:
            raise ValueError(
                f"a batch must be divisible by the devices of an island, {island_size}, got {shape[2]} rows in {name!r}. "
                f"Use a multiple of {island_size}."
            )
        lengths[name] = shape[1]
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"all leaves of batches must hold equally many steps, got {lengths}. Cut or pad them."
        )
    return next(iter(lengths.values()))


def steps_of_workers(
    local_steps: Any, *, num_workers: int, held: int, delay: int, wanted: int | None
) -> tuple[int, ...]:
    """H_i of each worker.

    Raises:
      ValueError: not W of them, fewer than 1, more than the batches hold, not above the delay, or not what is wanted.
    """
    given = [local_steps] * num_workers if np.ndim(local_steps) == 0 else list(local_steps)
    if len(given) != num_workers:
        raise ValueError(
            f"local_steps must be one number or a list with one for each of the {num_workers} workers, got {len(given)} "
            "numbers. Give each worker its own."
        )
    for steps in given:
        check_whole_number("local_steps", steps, 1, "Every worker takes at least one step a round.")
        if steps > held:
            raise ValueError(
                f"local_steps must be at most the {held} steps that batches hold, got {steps}. Give more batches."
            )
        if steps <= delay:
            raise ValueError(
                f"local_steps must be above the delay of {delay} steps, got {steps}. Use a smaller delay."
            )
        if wanted is not None and steps != wanted:
            raise ValueError(
                f"local_steps must be {wanted} for this outer optimizer, got {steps}. For more use local_dadam."
            )
    return tuple(int(steps) for steps in given)
