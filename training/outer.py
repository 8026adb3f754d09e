"""From settings to a round of gasloc_jax: the outer optimizer, the inner step that a worker repeats, and both joined."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import gasloc_jax
import models
import scape_jax
from training.config import Config
from training.mesh import AXIS_NAME, WORKER_AXIS


def make_outer(config: Config) -> gasloc_jax.OuterOptimizer:
    """The outer optimizer that `config.outer` describes, with its exchange over the workers' axis."""
    o = config.outer
    exchange: dict[str, Any] = dict(
        payload_dtype=jnp.dtype(o.payload_dtype),
        # Each device of an island sends its own part; one alone sends all.
        island_axis=AXIS_NAME if config.mesh.data > 1 else None,
    )
    topology = make_topology(config)
    if o.name == "diloco":
        return gasloc_jax.diloco(o.learning_rate, _momentum(config), WORKER_AXIS, **exchange)
    if o.name == "local_sgd":
        return gasloc_jax.local_sgd(WORKER_AXIS, **exchange)
    if o.name == "dadam":
        return gasloc_jax.dadam(topology, WORKER_AXIS, **exchange)
    if o.name == "local_dadam":
        return gasloc_jax.local_dadam(topology, WORKER_AXIS, **exchange)
    if o.name == "noloco":
        return gasloc_jax.noloco(
            o.learning_rate, _momentum(config), topology=topology, axis_name=WORKER_AXIS, **exchange
        )
    chain = optax.sgd(o.learning_rate, momentum=_momentum(config), nesterov=True)
    return gasloc_jax.gasloc(chain, topology, WORKER_AXIS, **exchange)


def make_topology(config: Config) -> gasloc_jax.Topology:
    """Who meets in a round; random graphs are seeded by run.seed."""
    name = config.outer.topology or "random_pairs"
    if name in ("random_pairs", "random_ring"):
        return getattr(gasloc_jax, name)(seed=config.run.seed)
    return getattr(gasloc_jax, name)()


def make_round(config: Config, tx: optax.GradientTransformation, mesh: Mesh) -> gasloc_jax.Round:
    """Rounds of the model in `config` under the inner optimizer `tx`, which exchanges over AXIS_NAME."""
    o = config.outer
    return gasloc_jax.make_round(
        local_step(models.loss_fn(config.model.build()), tx, config.data.accumulate),
        make_outer(config),
        mesh,
        WORKER_AXIS,
        fragments=o.fragments,
        delay=o.delay,
        drift_weight=o.drift_weight,
        reference_steps=o.steps_per_round,
    )


def local_step(loss_fn: Any, tx: optax.GradientTransformation, accumulate: int) -> gasloc_jax.LocalStep:
    """`gasloc_jax.make_local_step` with micro-batches and the inner optimizer's own figures."""

    def in_parts(loss_fn):
        return functools.partial(scape_jax.loss_and_grads, loss_fn, accumulate=accumulate)

    whole = gasloc_jax.make_local_step(loss_fn, tx, value_and_grad=in_parts)

    def step(params, state, batch):
        params, state, measured = whole.step(params, state, batch)
        stats = optax.tree.get(state, "stats")
        return params, state, {**measured, "grad_norm": stats.grad_norm, "clip_factor": stats.clip_factor}

    return gasloc_jax.LocalStep(whole.init, step)


def _momentum(config: Config) -> float:
    given = config.outer.momentum
    return given if given is not None else 0.5 if config.outer.name == "noloco" else 0.9
