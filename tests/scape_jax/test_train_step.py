"""The training step as a user drives it: programs traced, state moved, metrics, telemetry, bytes; 4 workers.

One run of 10 steps through a density warm-up is shared by most tests (`warm_run`): compiling is what costs here.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import scape_jax
from tests.helpers import assert_bit_equal, assert_close, make_mesh
from tests.quick_compile import quickest_compile  # noqa: F401
from tests.scape_jax.contract_table import SCAPE, avals, make_params

WORKERS, STEPS, WARMUP = 4, 10, 2
FINAL = WARMUP + 1  # finished steps after which the step no longer asks for the density


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Squared distance to targets that depend on entry and batch row, so that workers' masks differ."""
    rows = batch["x"][:, None]
    flat = [x.reshape(1, -1) for x in jax.tree.leaves(params)]
    return sum(jnp.mean((x - jnp.sin(rows * jnp.arange(1.0, x.size + 1)[None, :])) ** 2) for x in flat)


def batch_of(step: int, rows: int = 8, mesh: Mesh | None = None) -> dict[str, jax.Array]:
    """A batch already on its workers, as a prefetching loader leaves it."""
    x = np.random.default_rng(step).uniform(0.5, 2.0, rows).astype(np.float32)
    sharding = NamedSharding(
        mesh or make_mesh(WORKERS), PartitionSpec((mesh or make_mesh(WORKERS)).axis_names)
    )
    return {"x": jax.device_put(x, sharding)}


def on_host(tree: Any) -> Any:
    """A copy that donation cannot invalidate."""
    return jax.tree.map(lambda x: np.array(x), tree)


class Run(NamedTuple):
    step: scape_jax.TrainStep
    params: list[Any]  # after each step, on the host
    metrics: list[dict[str, float]]
    traced_at: list[int]  # number of the step in which the loss was traced
    initial_state: Any  # on the host
    last: tuple[Any, Any]  # (params, state) on the devices
    donated: tuple[Any, Any]  # what step 1 was given


@functools.cache
def warm_run() -> Run:
    traced_at, now = [], [0]

    def traced_loss(params, batch):
        traced_at.append(now[0])
        return loss_fn(params, batch)

    tx = SCAPE(density_warmup_steps=WARMUP, axis_name="data", weight_decay=0.01)
    step = scape_jax.make_train_step(traced_loss, tx, make_mesh(WORKERS), telemetry=True)
    # A parameter from a Python number is weakly typed: it must not cost a second trace.
    params = step.place({**make_params(), "temp": jnp.asarray(1.0)})
    state = step.init(params)
    initial, donated = on_host(state), (params, state)
    all_params, metrics = [], []
    for t in range(1, STEPS + 1):
        now[0] = t
        params, state, m = step(params, state, batch_of(t))
        all_params.append(on_host(params))
        metrics.append({k: float(v) for k, v in m.items()})
    return Run(step, all_params, metrics, traced_at, initial, (params, state), donated)


# Programs ----------------------------------------------------------------------------------------------------


def test_one_trace_for_warm_up_and_one_for_good():
    """Case 2. A weak type, a moved state or a level chosen by Python at each step would show as more traces."""
    assert warm_run().traced_at == [1, FINAL + 1]


def test_density_falls_in_levels_to_its_final_value():
    densities = [m["density"] for m in warm_run().metrics]
    # Kept of 282 entries: 16 in each full row (3 of the kernel, 1 of odd), 1 in the short row, the 25 dense ones.
    final = (4 * 16 + 1 + 25) / 282
    assert densities[0] == pytest.approx(1.0)
    assert all(a >= b for a, b in itertools.pairwise(densities))
    assert densities[WARMUP - 1] > 1.1 * final
    assert densities[WARMUP:] == pytest.approx([final] * (STEPS - WARMUP))


def test_steady_program_is_the_one_without_a_choice():
    """The program of the warm-up and that after it take the same step: the level is a promise, not another rule."""
    r = warm_run()
    level = r.step._level(r.last[1])
    assert level == r.step.tx.final_level == 2
    copy = functools.partial(jax.tree.map, jnp.copy)
    results = [r.step._programs[k](copy(r.last[0]), copy(r.last[1]), batch_of(99)) for k in (None, level)]
    assert_close(results[0][0], results[1][0], "f32", terms=4)
    assert_bit_equal(results[0][1].mask, results[1][1].mask)


def test_restart_with_a_fresh_state_goes_through_the_warm_up_again():
    """The same step object, no new trace, and the same first steps bit for bit: also interleaved with the old run."""
    r = warm_run()
    num_traces = len(r.traced_at)
    old_params, old_state = jax.tree.map(jnp.copy, r.last)
    params = {**make_params(), "temp": jnp.asarray(1.0)}
    state = r.step.init(params)
    assert_bit_equal(state, r.initial_state)
    for t in range(1, FINAL + 3):
        params, state, metrics = r.step(params, state, batch_of(t))
        assert_bit_equal(params, r.params[t - 1])
        assert float(metrics["density"]) == r.metrics[t - 1]["density"]
        old_params, old_state, metrics = r.step(old_params, old_state, batch_of(t))
        assert float(metrics["density"]) == r.metrics[-1]["density"]
    assert len(r.traced_at) == num_traces


def test_nothing_moves_between_host_and_devices_once_steady():
    r = warm_run()
    params, state = jax.tree.map(jnp.copy, r.last)
    params, state, _ = r.step(params, state, batch_of(1))
    batches, host_batch = [batch_of(t) for t in range(3)], on_host(batch_of(3))
    with jax.transfer_guard("disallow"):
        for batch in batches:
            params, state, _ = r.step(params, state, batch)
        # That the guard is on: a batch from the host is refused.
        with pytest.raises(Exception, match=r"[Dd]isallowed host-to-device transfer"):
            r.step(params, state, host_batch)


# State -------------------------------------------------------------------------------------------------------


def test_params_and_state_are_donated():
    params, state = warm_run().donated
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)) if x.size > 1)


def test_types_and_sharding_of_the_state_stay():
    r = warm_run()
    params, state = r.last
    fresh = r.step.init(make_params())
    assert avals(state) == avals(fresh)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
        assert a.sharding == b.sharding
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(params))


def test_each_device_holds_its_own_workers_buffers_only():
    state = warm_run().last[1]
    for x in jax.tree.leaves((state.h, state.next_mask)):
        assert x.sharding.spec == PartitionSpec("data")
        assert [s.data.shape for s in x.addressable_shards] == [(1, *x.shape[1:])] * WORKERS
    for x in jax.tree.leaves((state.mask, state.count, state.stats)):
        assert x.sharding.is_fully_replicated
    # Residuals are each worker's own: else this whole file would test one worker four times.
    h = np.asarray(state.h["layer"]["kernel"])
    assert len({h[n].tobytes() for n in range(WORKERS)}) == WORKERS


# Metrics -----------------------------------------------------------------------------------------------------


def test_metrics_of_the_first_step_by_hand():
    """Mean loss over all rows, and the norm of the mean gradient before the clip."""
    r, batch = warm_run(), on_host(batch_of(1))
    params = {**make_params(), "temp": jnp.asarray(1.0)}
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    m = r.metrics[0]
    norm = float(optax.tree.norm(grads))
    assert m["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert m["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert m["clip_factor"] == pytest.approx(min(1.0, 1.0 / norm), rel=1e-5)
    assert m["skipped"] == 0
    assert r.metrics[-1]["loss"] < m["loss"]


def bits(words: np.ndarray, size: int) -> np.ndarray:
    return np.unpackbits(words.reshape(-1).view(np.uint8), bitorder="little")[:size].astype(bool)


def numpy_telemetry(state: Any) -> dict[str, float]:
    """The figures of `scape_jax.telemetry` from the state's arrays."""
    state = on_host(state)
    sent = total = overlap = selected = 0
    kept_sq, residual_sq = 0.0, np.zeros(WORKERS)
    for h, mask, own in (
        (state.h["layer"]["bias"], None, None),
        (state.h["layer"]["kernel"], state.mask["layer"]["kernel"], state.next_mask["layer"]["kernel"]),
        (state.h["odd"], state.mask["odd"], state.next_mask["odd"]),
        (state.h["temp"], None, None),
    ):
        h = h.reshape(WORKERS, -1).astype(np.float64)
        size = h.shape[1]
        kept = np.ones(size, bool) if mask is None else bits(mask, size)
        total, sent = total + size, sent + kept.sum()
        kept_sq += np.sum(h[0, kept] ** 2)
        residual_sq += np.sum(np.where(kept[None], 0, h) ** 2, axis=1)
        if own is not None:
            following = bits(own, size)
            selected, overlap = selected + following.sum(), overlap + (following & kept).sum()
    return {
        "density": sent / total,
        "mask_overlap": overlap / selected,
        "residual_norm": np.sqrt(residual_sq.mean()),
        "kept_norm": np.sqrt(kept_sq),
    }


def test_telemetry_equals_a_direct_computation():
    r = warm_run()
    wanted = numpy_telemetry(r.last[1])
    assert 0 < wanted["mask_overlap"] < 1 and wanted["residual_norm"] > 0
    got = {k: float(v) for k, v in r.step.telemetry(r.last[1]).items()}
    assert got == pytest.approx(wanted, rel=1e-6)
    # The same figures in the step's own metrics, which are those of its new state.
    assert {k: r.metrics[-1][k] for k in wanted} == pytest.approx(wanted, rel=1e-6)


def test_telemetry_of_a_dense_method_is_empty():
    step = scape_jax.make_train_step(loss_fn, scape_jax.adams(0.1, axis_name="data"), make_mesh(WORKERS))
    assert step.telemetry(step.init(make_params())) == {}


# Bytes -------------------------------------------------------------------------------------------------------


def test_wire_bytes_of_a_user_chain_are_counted():
    """Behind optax.chain the closed form is out of reach, so the update's jaxpr is counted: equal totals."""
    plain = SCAPE(axis_name="data")
    steps = [
        scape_jax.make_train_step(loss_fn, tx, make_mesh(WORKERS))
        for tx in (plain, optax.chain(plain), optax.chain(optax.identity(), plain, optax.scale(1.0)))
    ]
    for step in steps:
        step.init(make_params())
    closed, *counted = [step.wire_bytes() for step in steps]
    for c in counted:
        assert (c.all_reduce_operand, c.all_gather_operand) == (
            closed.all_reduce_operand,
            closed.all_gather_operand,
        )
        assert c.total_bytes == closed.total_bytes
        assert c.dense_total_bytes == closed.dense_total_bytes
        assert c.ratio == closed.ratio


# Other ways to write the same run ----------------------------------------------------------------------------


def two_steps(tx: Any, params: Any, mesh: Mesh, axis_name: Any = "data", loss: Any = loss_fn) -> Any:
    step = scape_jax.make_train_step(loss, tx, mesh, axis_name=axis_name)
    state = step.init(params)
    for t in (1, 2):
        params, state, _ = step(params, state, batch_of(t, mesh=mesh))
    return params


@functools.cache
def plain_two_steps() -> Any:
    return on_host(two_steps(SCAPE(axis_name="data"), make_params(), make_mesh(WORKERS)))


def test_chained_scape_takes_the_same_steps():
    """optax.chain hides the form that writes into the parameters, so the dense update is used: the same numbers."""
    got = two_steps(optax.chain(SCAPE(axis_name="data")), make_params(), make_mesh(WORKERS))
    assert_close(got, plain_two_steps())


def test_nnx_state_instead_of_a_dict():
    state = nnx.State(jax.tree.map(nnx.Param, make_params()))
    got = two_steps(SCAPE(axis_name="data"), state, make_mesh(WORKERS))
    assert isinstance(got, nnx.State)
    assert_bit_equal(nnx.to_pure_dict(got), plain_two_steps())


def test_workers_on_two_mesh_axes():
    """Owners are counted along both axes in one order by the selection and by the gather."""
    devices = np.array(jax.devices()[:WORKERS]).reshape(2, 2)
    mesh = Mesh(devices, ("host", "chip"), axis_types=(AxisType.Auto,) * 2)
    axes = ("host", "chip")
    got = two_steps(SCAPE(axis_name=axes), make_params(), mesh, axes)
    assert_close(got, plain_two_steps())


@pytest.mark.parametrize(("workers", "accumulate"), [(1, 1), (1, 2), (4, 1), (4, 2)])
def test_schedule_counts_steps_whatever_the_workers(workers, accumulate):
    """Case 13. Under a constant gradient of norm below the clip, u_1 = 1 and the parameter falls by the rate itself."""
    schedule = optax.linear_schedule(0.0, 1.0, 4)
    tx = scape_jax.adams(schedule, b1=0.0, b2=0.0, eps=0.0, axis_name="data")
    step = scape_jax.make_train_step(
        lambda params, batch: jnp.mean(batch["x"]) * params["w"][0],
        tx,
        make_mesh(workers),
        accumulate=accumulate,
    )
    params = {"w": jnp.zeros(1)}
    state = step.init(params)
    seen = []
    for _ in range(6):
        params, state, _ = step(params, state, {"x": np.full(8, 0.5, np.float32)})
        seen.append(float(params["w"][0]))
    assert seen == pytest.approx(-np.cumsum([0, 0.25, 0.5, 0.75, 1, 1]), rel=1e-6)
