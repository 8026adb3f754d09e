"""The optimizers under the contract suite, a row an optimizer in one setting, and the problem they share.

Blocks are 64 entries here, so that a few hundred parameters hold full rows, a short last row, an odd leaf, a
bias and a scalar. Every row is a function of the worker axis, so that one table serves one worker and many.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import scape_jax

SCAPE = functools.partial(scape_jax.scape, 0.05, 0.25, block_size=64)

# name -> (axis_name -> transformation); the second table holds rules that never communicate.
COMMUNICATING = {
    "adams": lambda axis: scape_jax.adams(0.05, axis_name=axis),
    "adams bf16 decay": lambda axis: scape_jax.adams(
        0.05, weight_decay=0.1, payload_dtype=jnp.bfloat16, bias_correction="momentum", axis_name=axis
    ),
    "adamw": lambda axis: scape_jax.adamw(0.05, axis_name=axis),
    "topk adamw": lambda axis: scape_jax.topk(0.05, 0.25, block_size=64, axis_name=axis),
    "topk adams": lambda axis: scape_jax.topk(0.05, 0.25, optimizer="adams", block_size=64, axis_name=axis),
    "scale_by_scape": lambda axis: scape_jax.scale_by_scape(0.25, block_size=64, axis_name=axis),
    "scape": lambda axis: SCAPE(axis_name=axis),
    "scape dense": lambda axis: scape_jax.scape(0.05, 1.0, block_size=64, axis_name=axis),
    "scape leaf index stale": lambda axis: SCAPE(
        selection="leaf", codec="index", staleness_power=1.0, payload_dtype=jnp.bfloat16, axis_name=axis
    ),
    "scape warm-up decay": lambda axis: SCAPE(
        density_warmup_steps=3, mask_every=2, weight_decay=0.1, clip_order="paper", axis_name=axis
    ),
}
TABLE = {**COMMUNICATING, "scale_by_adams": lambda axis: scape_jax.scale_by_adams()}
NEEDS_PARAMS = ("adams bf16 decay", "scape warm-up decay")


def make_params(dtype: Any = jnp.float32) -> dict[str, Any]:
    """A full leaf (3 rows), an odd one (65 entries: a row of 64 and a row of 1), a bias and a scalar."""
    rng = np.random.default_rng(0)
    shapes = {"layer": {"kernel": (8, 24), "bias": (24,)}, "odd": (5, 13), "temp": ()}
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s), dtype), shapes, is_leaf=is_shape)


def make_grads(params: Any, seed: int = 1) -> Any:
    """Random gradients like the parameters."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), params)


def avals(tree: Any) -> list[tuple]:
    """(path, shape, dtype, weak_type) of every leaf: what must not change between two updates."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(p), x.shape, x.dtype, jax.typeof(x).weak_type) for p, x in flat]


class Run(NamedTuple):
    """Three jitted steps with donation, and what was seen on the way."""

    states: list[Any]
    updates: list[Any]
    params: list[Any]
    num_traces: int
    old_state_deleted: bool


def three_steps(tx: optax.GradientTransformation) -> Run:
    """Three steps on random gradients, one worker."""
    traces = []

    # A buffer that update() hands back twice, or keeps alive, makes XLA complain, and warnings are errors.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        traces.append(1)
        updates, state = tx.update(grads, state, params, unexpected_extra_argument=1)
        return optax.apply_updates(params, updates), state, updates

    params = make_params()
    state = jax.jit(tx.init)(params)
    copy = functools.partial(jax.tree.map, jnp.copy)
    states, all_updates, all_params = [copy(state)], [], [copy(params)]
    old = state
    for seed in range(3):
        params, state, updates = step(params, state, make_grads(make_params(), seed))
        states.append(copy(state))
        all_updates.append(updates)
        all_params.append(copy(params))
    deleted = all(x.is_deleted() for x in jax.tree.leaves(old) if x.size > 1)
    return Run(states, all_updates, all_params, len(traces), deleted)
