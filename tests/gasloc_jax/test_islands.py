"""Islands: SCAPE over `data` inside a worker, GASLoC over `worker` between them; and plain averaging inside."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import gasloc_jax as gj
import scape_jax
from tests.gasloc_jax.side_by_side import loss_fn, make_batches, make_params, make_round, mesh_of, on_host
from tests.helpers import assert_bit_equal, assert_close
from tests.quick_compile import quickest_compile  # noqa: F401

SCAPE = {"density": 0.25, "block_size": 32, "clip_norm": 1.0}


def averaging(tx: Any, axis: str = "data") -> gj.LocalStep:
    """An inner step that averages gradients over the island by itself."""

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(lax.pmean(grads, axis), state, params)
        return optax.apply_updates(params, updates), state, {"loss": loss}

    return gj.LocalStep(tx.init, step)


def run(round: gj.Round, num_workers: int, rounds: int = 4, steps: Any = 3) -> gj.RoundState:
    state = round.init(make_params())
    for t in range(rounds):
        state, _ = round(state, make_batches(num_workers, 3, rows=4, seed=t), steps)
    return state


def test_scape_inside_islands():
    """Worker axis 2, data axis 4, 5 rounds. By hand: each island is a TrainStep of its own on the same rows, and the
    exchange is done in NumPy."""
    outer = gj.gasloc(optax.sgd(1.0), axis_name="worker", island_axis="data")
    tx = scape_jax.scape(0.02, axis_name="data", **SCAPE)
    round = make_round(outer, 2, tx, island_size=4)
    state = round.init(make_params())

    islands = [mesh_of((4,), ("data",)) for _ in range(2)]
    steps = [
        scape_jax.make_train_step(loss_fn, scape_jax.scape(0.02, axis_name="data", **SCAPE), m)
        for m in islands
    ]
    params = [make_params() for _ in range(2)]
    states = [step.init(p) for step, p in zip(steps, params, strict=True)]
    # Worker 0 takes 3 steps a round and worker 1 takes 2.
    for t in range(5):
        batches = make_batches(2, 3, rows=4, seed=t)
        state, metrics = round(state, batches, [3, 2])
        losses = []
        for n, count in enumerate((3, 2)):
            mine = []
            for i in range(count):
                batch = {k: x[n, i] for k, x in batches.items()}
                params[n], states[n], m = steps[n](params[n], states[n], batch)
                mine.append(float(m["loss"]))
            losses.append(np.mean(mine))
        mean = jax.tree.map(lambda a, b: (np.asarray(a) + np.asarray(b)) / 2, *params)
        params = [mean, mean]
        assert_close(jax.tree.map(lambda x: x[1], on_host(state.params)), mean, "params", terms=t + 1)
        np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-4)
    # SCAPE's own buffers: one for each device of each island, and they differ.
    h = np.asarray(state.inner.h["embedding"])
    assert h.shape == (2, 4, 7, 3)
    kernel = state.inner.h["layers/kernel"]
    assert kernel.sharding.spec[:2] == PartitionSpec("worker", ("data",))[:2]
    assert [s.data.shape for s in kernel.addressable_shards] == [(1, 1, 3, 2, 5)] * 8


@pytest.mark.parametrize("payload_dtype", [None, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("make_outer", [gj.gasloc, gj.diloco], ids=["pairs", "diloco"])
def test_devices_share_the_sending(make_outer, payload_dtype):
    """With island_axis each device sends its part; without it every device sends all: the same parameters."""
    options = {"axis_name": "worker", "payload_dtype": payload_dtype, "payload_block_size": 8}
    results = []
    for island_axis in (None, "data"):
        outer = make_outer(island_axis=island_axis, **options)
        round = gj.make_round(averaging(optax.adamw(0.02)), outer, mesh_of((3, 2), ("worker", "data")))
        state = run(round, 3)
        results.append(on_host(state.params))
        # Both devices of an island hold the same bits.
        for x in jax.tree.leaves(state.params):
            shards = {}
            for shard in x.addressable_shards:
                shards.setdefault(shard.index[0].start, set()).add(np.asarray(shard.data).tobytes())
            assert all(len(copies) == 1 for copies in shards.values())
    if payload_dtype is None:
        assert_close(results[1], results[0], "f32", terms=12)
    for path, x in results[0].items():
        np.testing.assert_allclose(results[1][path], x, atol=0.05)


def test_an_island_of_averaging_devices_is_a_worker_of_one():
    """The mean loss and the mean gradient over an island's rows are those of one device with all rows."""
    outer = gj.gasloc(axis_name="worker")
    alone = make_round(outer, 2, optax.adamw(0.02))
    island = gj.make_round(averaging(optax.adamw(0.02)), outer, gj.make_mesh(2, 4))
    states = [run(round, 2, steps=[3, 1]) for round in (alone, island)]
    assert_close(on_host(states[1].params), on_host(states[0].params), "params", terms=4)


def test_order_of_the_mesh_axes_does_not_matter():
    outer = gj.gasloc(axis_name="worker", payload_dtype=jnp.int8, island_axis="data")
    results = []
    for shape, names in (((2, 4), ("worker", "data")), ((4, 2), ("data", "worker"))):
        round = gj.make_round(averaging(optax.adamw(0.02)), outer, mesh_of(shape, names))
        results.append(on_host(run(round, 2).params))
    assert_bit_equal(*results)


def test_fragments_with_residuals_on_islands():
    """Each device's residual has an axis for fragments before its own: a resumed state must fit the same specs."""
    outer = gj.gasloc(axis_name="worker", payload_dtype=jnp.int8, payload_block_size=8, island_axis="data")
    mesh = mesh_of((2, 2), ("worker", "data"))
    round = gj.make_round(averaging(optax.adamw(0.02)), outer, mesh, fragments=3, delay=1)
    state = run(round, 2, rounds=6)
    (residual,) = state.outer.residual
    assert residual.shape[:3] == (2, 3, 2)
    assert [s.data.shape[:3] for s in residual.addressable_shards] == [(1, 3, 1)] * 4
    abstract = round.abstract_state(make_params())
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert a.shape == b.shape and a.sharding.is_equivalent_to(b.sharding, b.ndim)


# Bad input ----------------------------------------------------------------------------------------------------


def test_an_island_whose_devices_go_apart_is_refused():
    """AdamW on each device's own rows would leave four different models on one worker, silently."""
    round = make_round(gj.gasloc(axis_name="worker"), 2, optax.adamw(0.02), island_size=2)
    with pytest.raises(ValueError, match=r"combine the gradients of its island over axis 'data'.*scape"):
        run(round, 2)


def test_a_local_step_that_waits_for_other_workers_is_refused():
    step = averaging(optax.sgd(0.1), axis="worker")
    round = gj.make_round(step, gj.gasloc(axis_name="worker"), gj.make_mesh(2, devices=jax.devices()[:2]))
    with pytest.raises(
        ValueError, match=r"must not communicate over the workers' axis 'worker'.*axis_name=None"
    ):
        run(round, 2)


def test_an_outer_optimizer_that_does_not_exchange_is_refused():
    hidden = optax.chain(gj.gasloc(axis_name=None))
    round = make_round(hidden, 2, optax.sgd(0.1))
    with pytest.raises(ValueError, match="must exchange over the workers' axis 'worker'"):
        run(round, 2)


def test_rows_must_divide_over_an_island():
    round = gj.make_round(averaging(optax.sgd(0.1)), gj.gasloc(axis_name="worker"), gj.make_mesh(2, 4))
    with pytest.raises(ValueError, match="divisible by the devices of an island, 4, got 6 rows"):
        round(round.init(make_params()), make_batches(2, 3, rows=6), 3)
