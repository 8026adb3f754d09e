"""From settings to an optimizer of scape_jax: SCAPE, the dense optimizers and top-k of the raw gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import scape_jax
from training.config import Config, OptimizerConfig
from training.schedules import Schedule


def density_warmup_steps(config: Config) -> int:
    """Steps in which the density falls from 1 to its value."""
    return round(config.optimizer.density_warmup_fraction * config.run.steps)


def make_optimizer(
    config: Config, schedule: Schedule, axis_name: str
) -> optax.GradientTransformationExtraArgs:
    """The optimizer that `config.optimizer` describes, with its exchange over `axis_name`."""
    o = config.optimizer
    common: dict[str, Any] = dict(
        b1=o.b1,
        b2=o.b2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        weight_decay_mask=decay_mask(o),
        clip_norm=o.clip_norm or None,
        axis_name=axis_name,
        skip_nonfinite=o.skip_nonfinite,
        skip_spike=o.skip_spike or None,
    )
    payload_dtype = jnp.dtype(o.payload_dtype)
    if o.name == "adamw":
        return scape_jax.adamw(schedule, payload_dtype=payload_dtype, **common)
    if o.name == "adams":
        return scape_jax.adams(
            schedule, payload_dtype=payload_dtype, bias_correction=o.bias_correction, **common
        )
    if o.name == "topk_adamw" or o.name == "topk_adams":
        return scape_jax.topk(
            schedule,
            o.density,
            optimizer="adamw" if o.name == "topk_adamw" else "adams",
            bias_correction=o.bias_correction,
            block_size=o.block_size,
            **common,
        )
    return scape_jax.scape(
        schedule,
        o.density,
        **common,
        clip_order=o.clip_order,
        bias_correction=o.bias_correction,
        selection=o.selection,
        block_size=o.block_size,
        codec=o.codec,
        payload_dtype=payload_dtype,
        dense=path_predicate(o.dense),
        density_warmup_steps=density_warmup_steps(config),
        mask_every=o.mask_every,
        staleness_power=o.staleness_power,
        finite_check=o.finite_check,
        implementation=None if o.implementation == "auto" else o.implementation,
    )


def path_predicate(words: tuple[str, ...]) -> Callable[[str], bool]:
    """True for a path that contains one of the words."""
    return lambda path: any(word in path.lower() for word in words)


def decay_mask(config: OptimizerConfig) -> Callable[[Any], Any]:
    """params -> tree of bools: which leaves decay."""
    excluded = path_predicate(config.no_decay)
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: not excluded(jax.tree_util.keystr(path, simple=True, separator="/")), params
    )
