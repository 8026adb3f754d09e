"""From settings to a round of gasloc_jax: the outer optimizer, the inner step that a worker repeats, and both joined."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import gasloc_jax
import models
import scape_jax
from training._outer_section import WITHOUT_STEP
from training.config import Config, update
from training.mesh import AXIS_NAME, WORKER_AXIS

_TENTHS = tuple(m / 10 for m in range(9, -1, -1))


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


def disagreement_growth(config: Config) -> float | None:
    """By what factor the workers' squared disagreement changes in a round without drift (`gasloc_jax.Pool.growth`).

    None where they take the mix as it is, which never makes it grow.
    """
    o, workers, momentum = config.outer, config.mesh.worker, _momentum(config)
    if o.name in WITHOUT_STEP:
        return None
    outer = make_outer(config)
    if o.name == "noloco":
        return outer.growth(workers)
    # Nesterov's (theta, t), from the pseudo-gradient g = theta - mix(theta) alone: t <- g + mu t, and
    # theta <- theta - rate (g + mu t).
    carried = [[1.0, -o.learning_rate * momentum**2], [0.0, momentum]]
    return outer.pool(workers).growth(carried, [[-o.learning_rate * (1.0 + momentum), 0.0], [1.0, 0.0]])


def growth_warning(config: Config) -> str | None:
    """What to say where disagreement grows by itself.

    A warning and no error: at a factor near 1 a short run ends before it matters, and drift is not in the calculation.
    """
    growth, o, momentum = disagreement_growth(config), config.outer, _momentum(config)
    if growth is None or growth < 1.0:
        return None
    rounds = config.run.steps / (o.steps_per_round * o.fragments)  # in which a part of the model is exchanged
    lower = next((m for m in _TENTHS if m < momentum and _growth_at(config, m) < 1.0), None)
    advice = "Use a smaller outer.learning_rate" if lower is None else f"Use outer.momentum {lower}"
    return (
        f"the squared disagreement of the workers grows by a factor of {growth:.3f} a round, 10^"
        f"{rounds * math.log10(growth):.1f} over the run, even where none of them drifts. {advice}, or a denser "
        "outer.topology."
    )


def _growth_at(config: Config, momentum: float) -> float:
    return disagreement_growth(update(config, {"outer.momentum": momentum})) or 0.0


def _momentum(config: Config) -> float:
    given = config.outer.momentum
    return given if given is not None else 0.5 if config.outer.name == "noloco" else 0.9
