"""Validation loss: parameters replicated, batches sharded over the workers, padding has weight 0."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token over `tokens` tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_token(self) -> float:
        """For the byte tokenizer these are bits per byte."""
        return self.loss / math.log(2)


def place(batch: dict[str, np.ndarray], mesh: Mesh, axis_name: str) -> dict[str, jax.Array]:
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
    axis_name: str,
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
