"""All forms and baselines against the NumPy float64 simulation: 10 rounds, unequal numbers of local steps."""

import contextlib

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gasloc_jax as gj
from gasloc_jax import reference as ref
from tests.gasloc_jax.side_by_side import (
    gradient_of,
    make_batches,
    make_params,
    make_round,
    on_host,
    stacked,
    start_workers,
)
from tests.helpers import assert_close
from tests.quick_compile import compiled_quickly

ROUNDS, MOST = 10, 4
RATE = 0.02


def rule(kind: str, num_workers: int) -> ref.Optax:
    makers = {
        "nesterov": lambda: ref.Sgd(0.7, 0.9, nesterov=True),
        "sgd": lambda: ref.Sgd(0.5),
        "copy": lambda: ref.Sgd(1.0),
        # A large eps: Adam turns rounding errors of a vanishing gradient into whole steps.
        "adam": lambda: ref.Adam(0.05, eps=1e-3),
    }
    return ref.Optax(makers[kind], num_workers)


# name -> (W, local steps, outer of JAX, outer of the reference)
FORMS = {
    "gasloc pairs": (4, [4, 3, 1, 2], lambda: gj.gasloc(axis_name="worker"), lambda: rule("nesterov", 4)),
    "gasloc pairs odd": (
        3,
        [2, 4, 1],
        lambda: gj.gasloc(topology=gj.random_pairs(seed=5), axis_name="worker"),
        lambda: rule("nesterov", 3),
    ),
    "gasloc random ring": (
        5,
        2,
        lambda: gj.gasloc(optax.sgd(0.5), gj.random_ring(seed=2), "worker"),
        lambda: rule("sgd", 5),
    ),
    "gasloc ring adam": (
        4,
        2,
        lambda: gj.gasloc(optax.adam(0.05, eps=1e-3), gj.ring(), "worker"),
        lambda: rule("adam", 4),
    ),
    "gasloc exponential": (
        6,
        3,
        lambda: gj.gasloc(topology=gj.exponential(), axis_name="worker"),
        lambda: rule("nesterov", 6),
    ),
    "mixed": (
        4,
        [4, 3, 1, 2],
        lambda: gj.nesterov_gossip(axis_name="worker"),
        lambda: ref.NesterovGossip(0.7, 0.9, "mixed"),
    ),
    "local": (
        4,
        [4, 3, 1, 2],
        lambda: gj.nesterov_gossip(0.6, 0.5, "local", gj.random_ring(), "worker"),
        lambda: ref.NesterovGossip(0.6, 0.5, "local"),
    ),
    "mixed complete": (
        2,
        3,
        lambda: gj.nesterov_gossip(topology=gj.complete(), axis_name="worker"),
        lambda: ref.NesterovGossip(0.7, 0.9, "mixed"),
    ),
    "local complete": (
        2,
        3,
        lambda: gj.nesterov_gossip(momentum="local", topology=gj.complete(), axis_name="worker"),
        lambda: ref.NesterovGossip(0.7, 0.9, "local"),
    ),
    "diloco": (3, [4, 1, 2], lambda: gj.diloco(axis_name="worker"), lambda: rule("nesterov", 3)),
    "local_sgd": (4, 4, lambda: gj.local_sgd("worker"), lambda: rule("copy", 4)),
    "dadam": (4, 1, lambda: gj.dadam(axis_name="worker"), lambda: rule("copy", 4)),
    "local_dadam": (4, 4, lambda: gj.local_dadam(gj.ring(), "worker"), lambda: rule("copy", 4)),
    "noloco": (4, [4, 3, 1, 2], lambda: gj.noloco(axis_name="worker"), lambda: ref.NoLoCo(0.7, 0.5, 0.7)),
    "one worker": (1, 3, lambda: gj.gasloc(axis_name="worker"), lambda: rule("nesterov", 1)),
}


@pytest.mark.parametrize(
    ("make_outer", "make_reference"),
    [
        (lambda rate, topology: gj.nesterov_gossip(rate, 0.5, "mixed", topology, "worker"),
         lambda: ref.NesterovGossip(0.0, 0.5, "mixed")),
        (lambda rate, topology: gj.nesterov_gossip(rate, 0.5, "local", topology, "worker"),
         lambda: ref.NesterovGossip(0.0, 0.5, "local")),
        (lambda rate, topology: gj.noloco(rate, 0.5, lambda t: 0.9 - 0.1 * t, topology, "worker"),
         lambda: ref.NoLoCo(0.0, 0.5, 0.0)),
    ],
    ids=["mixed", "local", "noloco"],
)  # fmt: skip
@pytest.mark.parametrize("topology", [gj.random_pairs(), gj.complete()], ids=["pairs", "complete"])
@compiled_quickly()
def test_rates_that_change(make_outer, make_reference, topology):
    """A schedule is called with the rounds done: 0 in the first."""
    outer = make_outer(lambda t: 0.8 / (1.0 + t), topology)
    round, expected = make_round(outer, 3, optax.sgd(0.05)), make_reference()
    workers = start_workers(3, lambda: ref.Sgd(0.05), [expected])
    state, pool = round.init(make_params()), outer.pool(3)
    for t in range(4):
        expected.learning_rate = expected.beta = 0.8 / (1 + t)
        expected.k = 0.9 - 0.1 * t
        batches = make_batches(3, 2, seed=t)
        state, _ = round(state, batches, 2)
        workers.round(gradient_of(batches), pool.matrix(t), [2] * 3)
        assert_close(on_host(state.params), stacked(workers.params), "params", terms=t + 1, dtype=jnp.float32)


# Compiled as users do, each rule of the outer step once; the others, which differ in graph or workers, compile quickly.
FULLY_OPTIMIZED = ("gasloc pairs", "gasloc ring adam", "mixed", "local", "diloco", "noloco")


@pytest.mark.parametrize("name", FORMS)
def test_ten_rounds(name):
    """Parameters of every worker, their mean and their distance from it. Inner AdamW with decay and a schedule."""
    with contextlib.nullcontext() if name in FULLY_OPTIMIZED else compiled_quickly():
        compare_ten_rounds(name)


def compare_ten_rounds(name):
    num_workers, steps, make_outer, make_reference = FORMS[name]
    outer = make_outer()
    inner = optax.adamw(optax.linear_schedule(RATE, 0.0, 50), b2=0.95, weight_decay=0.1)
    round = make_round(outer, num_workers, inner)
    workers = start_workers(
        num_workers,
        lambda: ref.Adam(lambda t: RATE * (1 - min(t, 50) / 50), b2=0.95, weight_decay=0.1),
        [make_reference()],
    )
    pool = outer.pool(num_workers)
    state = round.init(make_params())
    list_of_steps = [steps] * num_workers if isinstance(steps, int) else steps
    for t in range(ROUNDS):
        batches = make_batches(num_workers, MOST, seed=t)
        state, _ = round(state, batches, steps)
        workers.round(gradient_of(batches), pool.matrix(t), list_of_steps)
        assert_close(on_host(state.params), stacked(workers.params), "params", terms=t + 1, dtype=jnp.float32)
    assert_close(on_host(round.mean_params(state)), workers.mean(), "params", terms=ROUNDS, dtype=jnp.float32)
    distance = float(round.consensus_distance(state))
    np.testing.assert_allclose(distance, workers.consensus_distance(), rtol=1e-4, atol=1e-5)
    # The test would say nothing if workers that gossip had stayed equal.
    all_average = num_workers == 1 or name in ("mixed complete", "diloco", "local_sgd")
    assert (distance < 1e-5) == all_average
