"""JAX rounds and the NumPy reference on the same problem: each worker is pulled to targets of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import gasloc_jax
from gasloc_jax import reference

# Three layers stacked, a leaf whose rows do not divide by 2, a vector and a scalar.
SHAPES = {"embedding": (7, 3), "layers/bias": (3, 5), "layers/kernel": (3, 2, 5), "scale": ()}


def make_params(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {path: np.asarray(rng.standard_normal(shape), np.float32) for path, shape in SHAPES.items()}


def make_batches(num_workers: int, steps: int, rows: int = 2, seed: int = 1) -> dict[str, np.ndarray]:
    """Targets (W, H, rows, *shape): a worker's own ones, and noise in each step."""
    rng = np.random.default_rng(seed)
    own = np.random.default_rng(99)
    out = {}
    for path, shape in SHAPES.items():
        at = own.standard_normal((num_workers, 1, 1, *shape))
        out[path] = (at + 0.3 * rng.standard_normal((num_workers, steps, rows, *shape))).astype(np.float32)
    return out


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Half the squared distance to the rows' mean, of which the curvature grows from leaf to leaf."""
    parts = [
        0.5 * (k + 1) * jnp.sum((params[path] - jnp.mean(batch[path], axis=0)) ** 2)
        for k, path in enumerate(SHAPES)
    ]
    return jnp.sum(jnp.stack(parts))


def gradient_of(batches: dict[str, np.ndarray]) -> Any:
    """The gradient of `loss_fn` in float64, for the reference."""
    means = {path: x.astype(np.float64).mean(axis=2) for path, x in batches.items()}

    def gradient(params, worker, i):
        return {path: (k + 1) * (params[path] - means[path][worker, i]) for k, path in enumerate(SHAPES)}

    return gradient


def make_mesh(num_workers: int, island_size: int = 1) -> Mesh:
    return gasloc_jax.make_mesh(num_workers, island_size, jax.devices()[: num_workers * island_size])


def make_round(outer: Any, num_workers: int, tx: Any, island_size: int = 1, **options: Any) -> Any:
    step = gasloc_jax.make_local_step(loss_fn, tx)
    return gasloc_jax.make_round(step, outer, make_mesh(num_workers, island_size), **options)


def start_workers(num_workers: int, make_inner: Any, outer: list[Any], **options: Any) -> reference.Workers:
    """The reference's workers at the same start."""
    return reference.Workers(
        [make_params() for _ in range(num_workers)],
        [make_inner() for _ in range(num_workers)],
        outer,
        **options,
    )


def on_host(tree: Any) -> Any:
    """A copy that donation cannot invalidate."""
    return jax.tree.map(lambda x: np.array(x), tree)


def stacked(trees: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The reference's workers as arrays (W, *shape)."""
    return {path: np.stack([tree[path] for tree in trees]) for path in trees[0]}


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
