"""Learning rates as functions of the inner step: warm-up, then a cosine, a constant, or stable and decay.

A schedule sees the optimizer's own count: it moves once per optimizer step, whatever the number of workers
and of micro-batches, and stands still while a step is skipped. Count c is the (c+1)-th update: the first
update of a warm-up of T steps uses peak/T, the last update of the run uses exactly the end value.
Sources: cosine arXiv 1608.03983, WSD arXiv 2404.06395.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

if TYPE_CHECKING:
    from training.config import ScheduleConfig

Schedule = Callable[[Any], Any]


def warmup_steps(config: ScheduleConfig, steps: int) -> int:
    """Steps of linear warm-up in a run of `steps` steps."""
    return round(config.warmup_fraction * steps)


def decay_steps(config: ScheduleConfig, steps: int) -> int:
    """Steps of the final decay of WSD."""
    return max(1, round(config.decay_fraction * steps))


def make_schedule(config: ScheduleConfig, steps: int) -> Schedule:
    """Returns count -> learning rate (float32) for a run of `steps` optimizer steps."""
    peak, end = config.learning_rate, config.end_learning_rate
    warmup = warmup_steps(config, steps)

    def after_warmup(update):
        """Learning rate of the update-th update (1-based), warm-up left out."""
        if config.name == "constant":
            return jnp.full_like(update, peak)
        if config.name == "cosine":
            progress = (update - warmup) / max(1, steps - warmup)
            return end + (peak - end) * 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0, 1)))
        decay = min(decay_steps(config, steps), max(1, steps - warmup))
        progress = jnp.clip((update - (steps - decay)) / decay, 0, 1)
        return peak + (end - peak) * progress

    def schedule(count):
        update = jnp.asarray(count, jnp.float32) + 1
        rate = after_warmup(update)
        if warmup:
            rate = jnp.where(update < warmup, peak * update / warmup, rate)
        return rate.astype(jnp.float32)

    return schedule
