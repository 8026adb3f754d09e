"""Validation loss: parameters replicated, batches sharded over the workers, padding has weight 0."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

import models


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token over `tokens` tokens, and how far workers that differ are from one another."""

    loss: float
    tokens: int
    disagreement: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_token(self) -> float:
        """For the byte tokenizer these are bits per byte."""
        return self.loss / math.log(2)


def place(batch: dict[str, np.ndarray], mesh: Mesh, axis_name: str | tuple[str, ...]) -> dict[str, jax.Array]:
    """This process's rows as its part of a global batch, the rows of which are spread over the workers."""
    sharding = NamedSharding(mesh, PartitionSpec(axis_name))
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}


@functools.lru_cache(maxsize=16)
def _sums(config: models.Config) -> Callable[[Any, Any], Any]:
    return jax.jit(models.loss_sums_fn(config))


def evaluate(
    config: models.Config,
    params: Any,
    batches: Iterable[dict[str, np.ndarray]],
    mesh: Mesh,
    axis_name: str | tuple[str, ...],
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Loss over all batches, each token counted once by its weight; None where `should_stop` cut it short."""
    sums = _sums(config)
    parts = []
    for batch in batches:
        if should_stop():
            return None
        parts.append(sums(params, place(batch, mesh, axis_name)))
        # One program at a time: several in flight compete for the cores of virtual devices and for memory.
        jax.block_until_ready(parts[-1])
    loss, weight = (math.fsum(float(part[i]) for part in parts) for i in (0, 1))
    return Evaluation(loss / weight if weight else math.nan, round(weight))


def evaluate_each(
    config: models.Config,
    params: Any,
    batches: Iterable[dict[str, np.ndarray]],
    mesh: Mesh,
    worker_axis: str,
    axis_name: str,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> NDArray[np.float64] | None:
    """Loss of every worker's own parameters, (W, *shape) over `worker_axis`, on all batches: (W,). None where
    `should_stop` cut it short.

    Every process passes whole batches; the rows of one are spread over the devices of an island. Communicates a few
    numbers.
    """
    sums, whole = _sums_of_each(config, mesh, worker_axis, axis_name), NamedSharding(mesh, PartitionSpec())
    total = np.zeros((2, mesh.shape[worker_axis]))
    for batch in batches:
        if should_stop():
            return None
        # Whole on every device, so that any process can give all of it.
        placed = {name: _whole(rows, whole) for name, rows in batch.items()}
        total += np.asarray(sums(params, placed), np.float64)
    return total[0] / total[1]


def _whole(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


@functools.lru_cache(maxsize=16)
def _sums_of_each(
    config: models.Config, mesh: Mesh, worker_axis: str, axis_name: str
) -> Callable[[Any, Any], jax.Array]:
    sums = models.loss_sums_fn(config)

    def of_mine(params, batch):
        mine = jnp.stack(sums(jax.tree.map(lambda x: x[0], params), batch))
        return lax.all_gather(lax.psum(mine, axis_name), worker_axis, axis=1)

    def each(params, batch):
        specs = (PartitionSpec(worker_axis), PartitionSpec(axis_name))
        return jax.shard_map(of_mine, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(
            params, batch
        )

    return jax.jit(each)
