"""What must be equal on devices is compared now and then: a bit that flipped, or a program that differs, ends the run.

An array that is not split over a mesh axis must be the same all along it: parameters, masks and counts of all workers that
exchange in every step, and within each island of a run in rounds. Four bytes a leaf and device tell. Source of the need:
runs of months on thousands of chips, where silent errors of one chip spread through every exchange.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.digest import digest
from training._leaves import by_path


class Guard:
    """Compares the arrays of trees that are all alike; compiled once.

    Args:
      mesh: of all devices that hold them.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._program: Any = None

    def difference(self, tree: Any) -> str | None:
        """Where arrays that must be equal are not, in words. Communicates 4 bytes a leaf and device."""
        leaves = by_path(tree)
        specs = {path: _spec(x) for path, x in leaves.items()}
        axes = self._mesh.axis_names
        if self._program is None:
            mapped = jax.shard_map(
                lambda leaves: lax.all_gather(jnp.stack([digest(x) for x in leaves]), axes),
                mesh=self._mesh,
                in_specs=(list(specs.values()),),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
            self._program = jax.jit(mapped)
        found = np.asarray(self._program(list(leaves.values())))
        digests = found.reshape(*self._mesh.devices.shape, len(leaves))
        for number, (path, spec) in enumerate(specs.items()):
            split = {name for part in spec for name in (part if isinstance(part, tuple) else (part,))}
            whole = tuple(i for i, name in enumerate(axes) if name not in split)
            one = digests[..., number]
            usual = _most_common(one, whole)
            others = np.argwhere(one != usual)
            if len(others):
                places = [
                    " ".join(f"{name} {i}" for name, i in zip(axes, place, strict=True))
                    for place in others.tolist()
                ]
                return f"{path} differs on {', '.join(places[:4])}" + " and others" * (len(places) > 4)
        return None


def _spec(x: jax.Array) -> PartitionSpec:
    return getattr(x.sharding, "spec", PartitionSpec())


def _most_common(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The value that most have along the axes, the first of those where they tie; of the same shape."""
    if not axes:
        return values
    moved = np.moveaxis(values, axes, range(-len(axes), 0))
    flat = moved.reshape(-1, int(np.prod([values.shape[i] for i in axes])))
    usual = np.empty_like(flat)
    for row, out in zip(flat, usual, strict=True):
        out[:] = max(row.tolist(), key=row.tolist().count)
    return np.moveaxis(usual.reshape(moved.shape), range(-len(axes), 0), axes)
