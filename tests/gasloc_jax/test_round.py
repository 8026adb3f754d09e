"""Rounds as a user drives them: one trace, state, metrics, numbers of steps, halves, non-finite workers; 4 workers."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import gasloc_jax as gj
from tests.gasloc_jax.side_by_side import (
    gradient_of,
    loss_fn,
    make_batches,
    make_mesh,
    make_params,
    make_round,
    on_host,
)
from tests.helpers import assert_bit_equal, assert_close
from tests.quick_compile import quickest_compile  # noqa: F401

WORKERS, MOST = 4, 3


def placed(round: gj.Round, seed: int) -> Any:
    return round.place(make_batches(WORKERS, MOST, seed=seed))


class Run(NamedTuple):
    round: gj.Round
    state: gj.RoundState  # after the last round, on the devices
    metrics: list[dict[str, Any]]  # on the host
    traces: list[int]  # how often the local step was traced, after each round
    donated: gj.RoundState


@functools.cache
def long_run() -> Run:
    """50 rounds: other graphs, other numbers of steps, parameters one of which is weakly typed."""
    count = []

    def counted(params, batch):
        count.append(1)
        return loss_fn(params, batch)

    step = gj.make_local_step(counted, optax.adamw(0.02))
    outer = gj.gasloc(axis_name="worker", payload_dtype=jnp.int8, payload_block_size=16)
    round = gj.make_round(step, outer, make_mesh(WORKERS))
    state = donated = round.init({**make_params(), "scale": jnp.asarray(1.0)})
    metrics, traces = [], []
    for t in range(50):
        state, m = round(state, placed(round, t), [1 + (t + n) % MOST for n in range(WORKERS)])
        metrics.append(on_host(m))
        traces.append(len(count))
    return Run(round, state, metrics, traces, donated)


# Programs and state -------------------------------------------------------------------------------------------


def test_one_compile_for_fifty_rounds():
    """Case 2. A weak type, a moved state, a number of steps or a graph known to Python would trace again."""
    r = long_run()
    assert r.traces == [r.traces[0]] * 50
    assert {name: program._cache_size() for name, program in r.round._programs.items()} == {"round": 1}
    graphs = {r.round.worker.outer.pool(WORKERS).index(t) for t in range(50)}
    assert graphs == {0, 1, 2}, "the graph did not change, so this tested nothing"


def test_state_is_donated_and_keeps_types_and_places():
    r = long_run()
    assert all(x.is_deleted() for x in jax.tree.leaves(r.donated) if x.size > WORKERS)
    fresh = r.round.init({**make_params(), "scale": jnp.asarray(1.0)})
    abstract = r.round.abstract_state(make_params())
    for path, x in jax.tree_util.tree_flatten_with_path(r.state)[0]:
        assert not jax.typeof(x).weak_type and x.shape[0] == WORKERS, jax.tree_util.keystr(path)
        assert [s.data.shape for s in x.addressable_shards] == [(1, *x.shape[1:])] * WORKERS
    for a, b, c in zip(*map(jax.tree.leaves, (r.state, fresh, abstract)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) == (c.shape, c.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert a.sharding.is_equivalent_to(c.sharding, a.ndim)
    assert jax.tree.structure(r.state) == jax.tree.structure(fresh) == jax.tree.structure(abstract)


def test_nothing_moves_between_host_and_devices_once_steady():
    r = long_run()
    state = jax.tree.map(jnp.copy, r.state)
    steps = [2] * WORKERS
    state, _ = r.round(state, placed(r.round, 0), steps)
    batches = [placed(r.round, t) for t in range(2)]
    with jax.transfer_guard("disallow"):
        for batch in batches:
            state, _ = r.round(state, batch, steps)


def test_resume_goes_on_with_the_same_bits():
    """A state that went through host memory, in another Round: graph, residual and counts are all in it."""
    r = long_run()
    host = on_host(r.state)
    step = gj.make_local_step(loss_fn, optax.adamw(0.02))
    outer = gj.gasloc(axis_name="worker", payload_dtype=jnp.int8, payload_block_size=16)
    other = gj.make_round(step, outer, make_mesh(WORKERS))
    shardings = jax.tree.map(lambda x: x.sharding, other.abstract_state(make_params()))
    restored = jax.device_put(host, shardings)
    going_on = jax.tree.map(jnp.copy, r.state)
    for t in range(50, 53):
        going_on, _ = r.round(going_on, placed(r.round, t), 2)
        restored, _ = other(restored, placed(other, t), 2)
    assert_bit_equal(on_host(restored), on_host(going_on))


def test_counts():
    r = long_run()
    assert np.asarray(r.state.round).tolist() == [50] * WORKERS
    assert np.asarray(r.state.outer.round).tolist() == [50] * WORKERS
    taken = np.sum([m["local_steps"] for m in r.metrics], axis=0)
    assert np.asarray(r.state.steps).tolist() == taken.tolist()
    # The inner optimizer's own count, of which its schedules are functions.
    assert np.asarray(optax.tree.get(r.state.inner, "count")).tolist() == taken.tolist()
    assert r.metrics[0]["local_steps"].tolist() == [1, 2, 3, 1]


@functools.cache
def plain() -> tuple[gj.Round, Any]:
    """A round with SGD inside, and its first state on the host."""
    round = make_round(gj.gasloc(axis_name="worker"), WORKERS, optax.sgd(0.1, momentum=0.5))
    return round, on_host(round.init(make_params()))


def fresh() -> tuple[gj.Round, gj.RoundState]:
    round, _ = plain()
    return round, round.init(make_params())


def test_halves_equal_the_round():
    """Local part and exchange as two programs, which a driver times apart: the same numbers."""
    round, state = fresh()
    _, other = fresh()
    for t in range(3):
        batches = placed(round, t)
        state, metrics = round(state, batches, [3, 1, 2, 3])
        other, local_metrics = round.local(other, batches, [3, 1, 2, 3])
        assert other.anchor is not None
        other = round.exchange(other)
        assert_close(on_host(local_metrics), on_host(metrics))
    assert_close(on_host(other), on_host(state))


# Metrics and figures ------------------------------------------------------------------------------------------


def test_loss_is_the_mean_over_a_worker_s_own_steps():
    round, state = fresh()
    batches = make_batches(WORKERS, MOST, seed=0)
    _, metrics = round(state, batches, [3, 1, 2, 3])
    params = [make_params() for _ in range(WORKERS)]
    for n, steps in enumerate([3, 1, 2, 3]):
        losses, trace = [], None
        for i in range(steps):
            losses.append(float(loss_fn(params[n], {k: x[n, i] for k, x in batches.items()})))
            g = gradient_of(batches)(params[n], n, i)
            trace = g if trace is None else {k: g[k] + 0.5 * trace[k] for k in g}
            params[n] = {k: params[n][k] - 0.1 * trace[k] for k in g}
        np.testing.assert_allclose(metrics["loss"][n], np.mean(losses), rtol=1e-5)
    assert metrics["wire_bytes"] == 4 * sum(x.size for x in make_params().values())


def test_a_step_s_own_metrics_are_averaged():
    def step(params, state, batch):
        return params, state + 1, {"loss": jnp.sum(batch), "position": state.astype(jnp.float32)}

    round = gj.make_round(
        gj.LocalStep(lambda params: jnp.zeros((), jnp.int32), step),
        gj.gasloc(axis_name="worker"),
        make_mesh(2),
    )
    batches = np.arange(8, dtype=np.float32).reshape(2, 4)
    _, metrics = round(round.init({"w": jnp.ones(2)}), batches, [4, 2])
    assert np.asarray(metrics["loss"]).tolist() == [1.5, 4.5]
    assert np.asarray(metrics["position"]).tolist() == [1.5, 0.5]


def test_mean_worker_and_distance():
    r = long_run()
    params = on_host(r.state.params)
    mean = {k: x.mean(0) for k, x in params.items()}
    assert_close(on_host(r.round.mean_params(r.state)), mean)
    for n in (0, WORKERS - 1):
        assert_bit_equal(on_host(r.round.worker_params(r.state, n)), {k: x[n] for k, x in params.items()})
    squares = [sum(np.sum((x[n] - mean[k]) ** 2) for k, x in params.items()) for n in range(WORKERS)]
    distance = float(r.round.consensus_distance(r.state))
    np.testing.assert_allclose(distance, np.sqrt(np.mean(squares)), rtol=1e-5)
    assert distance > 1e-3
    with pytest.raises(ValueError, match=r"worker must be in 0\.\.3, got 4"):
        r.round.worker_params(r.state, 4)


# Users' trees -------------------------------------------------------------------------------------------------


def test_nnx_state_none_and_empty_leaves():
    params = nnx.State({"w": nnx.Param(jnp.ones((2, 3))), "none": None, "empty": nnx.Param(jnp.ones((0, 3)))})
    loss = lambda params, batch: jnp.sum(params["w"][...] * batch)  # noqa: E731
    step = gj.make_local_step(loss, optax.adamw(0.1))
    outer = gj.gasloc(axis_name="worker", payload_dtype=jnp.int8, payload_block_size=4)
    round = gj.make_round(step, outer, make_mesh(2))
    state, _ = round(round.init(params), np.ones((2, 2), np.float32), 2)
    mean = round.mean_params(state)
    assert isinstance(mean, nnx.State) and mean["empty"][...].shape == (0, 3)
    assert (np.asarray(mean["w"][...]) < 1).all()


def test_bfloat16_parameters():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), make_params())
    round = make_round(gj.gasloc(axis_name="worker"), 2, optax.adamw(0.02))
    state = round.init(params)
    for t in range(2):
        state, _ = round(state, make_batches(2, 2, seed=t), 2)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(state.params))


def test_wrapped_by_optax():
    """inject_hyperparams, chain, masked: the round finds the exchange inside and sees the rate change."""

    def one(outer):
        round = make_round(outer, 2, optax.sgd(0.1))
        state = round.init(make_params())
        for t in range(2):
            state, _ = round(state, make_batches(2, 2, seed=t), 2)
        return on_host(state.params), state

    plain_params, _ = one(gj.diloco(0.5, axis_name="worker"))
    injected = optax.inject_hyperparams(gj.diloco, static_args=gj.STATIC_ARGS)
    params, state = one(injected(0.5, axis_name="worker"))
    assert_close(params, plain_params)
    assert np.asarray(state.outer.hyperparams["learning_rate"]).tolist() == [0.5, 0.5]
    params, _ = one(optax.chain(optax.identity(), gj.diloco(0.5, axis_name="worker")))
    assert_close(params, plain_params)
    mask = {"embedding": True, "layers/bias": True, "layers/kernel": True, "scale": False}
    params, _ = one(optax.masked(gj.diloco(0.5, axis_name="worker"), mask))
    assert_close(params["embedding"], plain_params["embedding"])
    assert params["scale"][0] != params["scale"][1], "a masked leaf is never exchanged"


def test_batches_may_lie_on_the_devices_already():
    round, state = fresh()
    batches = make_batches(WORKERS, MOST)
    sharding = round.batch_sharding
    assert sharding == NamedSharding(round.mesh, PartitionSpec("worker"))
    on_devices = jax.tree.map(lambda x: jax.device_put(x, sharding), batches)
    a, _ = round(state, on_devices, 2)
    b, _ = round(round.init(make_params()), batches, np.array([2] * WORKERS))
    assert_bit_equal(on_host(a), on_host(b))
