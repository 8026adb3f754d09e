"""What must hold exactly: hand-checked AdamS values, the facts of SCAPE, and W workers against one."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import scape_jax
from scape_jax import reference
from tests.helpers import assert_bit_equal, assert_close, make_mesh
from tests.quick_compile import compiled_quickly
from tests.scape_jax.side_by_side import (
    BLOCK,
    SHAPES,
    bits,
    linear_loss,
    make_batches,
    make_params,
    make_step,
    mask_in_use,
    one_program,
    run,
    state_of,
    worker_gradients,
)

ETA, LAM = 0.01, 0.1


@pytest.fixture(autouse=True)
def _all_but_the_shared_run_compile_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is compared with `eight` to the bit is compiled as it is: as users do, with every optimization."""
    with contextlib.nullcontext() if "eight" in request.fixturenames else compiled_quickly():
        yield


def scape(density: float = 0.1, **options: Any) -> optax.GradientTransformationExtraArgs:
    return scape_jax.scape(
        ETA, density, **{"axis_name": "data", "block_size": BLOCK, "clip_norm": None} | options
    )


def scape_states(records: list) -> list[scape_jax.ScaleByScapeState]:
    return [state_of(state, scape_jax.ScaleByScapeState) for _, state, _ in records]


# ---- AdamS by hand

HAND_CHECKED = [
    ("none", 0.95, {1: ".447", 2: ".779", 5: "1.016"}),
    ("both", 0.95, {1: "1.0", 2: "1.280", 5: "1.180", 50: ".966"}),
    ("momentum", 0.95, {1: "4.47"}),
    ("none", 0.999, {1: "3.16"}),
    ("both", 0.999, {1: "1.0"}),
    ("momentum", 0.999, {1: "31.6"}),
]


@pytest.mark.parametrize(("bias_correction", "b2", "values"), HAND_CHECKED)
def test_adams_by_hand(bias_correction: str, b2: float, values: dict[int, str]) -> None:
    """u_t of a constant unit gradient, b1 = .9, eps = 0, to the digits that were worked out by hand."""
    tx = scape_jax.scale_by_adams(b1=0.9, b2=b2, eps=0.0, bias_correction=bias_correction)
    settings = reference.Settings(b2=b2, eps=0.0, bias_correction=bias_correction)
    state, update, m = tx.init(jnp.zeros(())), jax.jit(tx.update), np.zeros(())
    for t in range(1, max(values) + 1):
        u, state = update(jnp.ones(()), state)
        m_prev, m = m, 0.9 * m + 0.1
        if t in values:
            digits = len(values[t].split(".")[1])
            assert round(float(u), digits) == float(values[t])
            by_reference = reference.adams(m_prev, m, np.ones(()), t, settings)
            assert round(float(by_reference), digits) == float(values[t])


@pytest.mark.parametrize(("clip_order", "value"), [("before", 0.447), ("paper", 4.472)])
def test_clipping_after_m_makes_the_step_larger(clip_order: str, value: float) -> None:
    """Clip factor 0.1: u is .447 where the clipped gradient enters both m and v, 4.47 by the listing."""
    tx = scape_jax.scale_by_scape(0.1, bias_correction="none", clip_norm=1.0, clip_order=clip_order)
    updates, state = tx.update({"w": jnp.full((1,), 10.0)}, tx.init({"w": jnp.zeros(1)}))
    assert round(float(updates["w"][0]), 3) == value
    assert_close(state.stats.clip_factor, jnp.float32(0.1))


# ---- One run of 8 workers, of which every fact is read


@pytest.fixture(scope="module")
def eight() -> dict[str, Any]:
    params, batches = make_params(), make_batches(8, 6)
    records = run(make_step(one_program(scape(weight_decay=LAM)), 8), params, batches)
    return {"params": params, "batches": batches, "records": records, "states": scape_states(records)}


def test_conservation(eight: dict) -> None:
    """Fact 3: mean_n e_t + m_t = b1 m_{t-1} + (1-b1) mean_n g_t + mean_n e_{t-1}: no mass is lost."""
    b1 = 0.9
    m = {path: np.zeros(shape, np.float64) for path, shape in SHAPES.items()}
    e = dict(m)
    for batch, state in zip(eight["batches"], eight["states"], strict=True):
        grads = worker_gradients(batch, 8)
        mask = mask_in_use(state, eight["params"])
        for path in SHAPES:
            before = b1 * m[path] + (1 - b1) * np.mean([g[path] for g in grads], axis=0) + e[path]
            h = state.h[path].astype(np.float64)
            m[path], e[path] = np.where(mask[path], h[0], 0.0), np.where(mask[path], 0.0, h.mean(0))
            assert_close((m[path] + e[path]).astype(np.float32), before, terms=16, dtype=jnp.float32)


def test_m_and_e_never_overlap(eight: dict) -> None:
    """Fact 1: on the mask the buffer is m, the same on all workers; off it each worker's own residual."""
    for t, state in enumerate(eight["states"]):
        mask = mask_in_use(state, eight["params"])
        for path, on in mask.items():
            h = state.h[path]
            for n in range(1, 8):
                np.testing.assert_array_equal(h[n][on], h[0][on])
                assert not np.any(h[n][~on] == h[0][~on]), (
                    f"{path}, step {t + 1}: residuals of two workers are equal"
                )


def test_step_1_is_dense_and_later_ones_are_not(eight: dict) -> None:
    """Fact 4: M_0 = 1. Later only the decay acts off the mask, and every kept entry moves."""
    before = eight["params"]
    for t, (params, _, _) in enumerate(eight["records"]):
        mask = mask_in_use(eight["states"][t], eight["params"])
        kept = {path: int(on.sum()) for path, on in mask.items()}
        if t == 0:
            assert all(on.all() for on in mask.values())
        else:
            # 703 = 10 rows of 64 (6 kept in each) and one of 63 (6); 99 = 64 (6) and 35 (4).
            assert kept == {
                "embedding/table": 66,
                "layer/bias": 70,
                "layer/v": 10,
                "norm/kernel": 128,
                "small": 15,
                "temperature": 1,
            }
        for path, on in mask.items():
            decayed = before[path].astype(np.float64) * (1 - ETA * LAM)
            assert_close(params[path][~on], decayed[~on], dtype=jnp.float32)
            assert np.median(np.abs(params[path][on] - decayed[on])) > 1e-3
        before = params


def test_two_mesh_axes_of_workers_are_like_one(eight: dict) -> None:
    """Ownership follows the order of the devices, whatever the axes are called."""
    mesh = Mesh(
        np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("host", "data"), axis_types=(AxisType.Auto,) * 2
    )
    axes = ("host", "data")
    tx = one_program(scape(weight_decay=LAM, axis_name=axes))
    step = scape_jax.make_train_step(linear_loss, tx, mesh, axis_name=axes)
    for ours, theirs in zip(run(step, eight["params"], eight["batches"]), eight["records"], strict=True):
        assert_bit_equal(ours, theirs)


# ---- Rows, owners and ties


@pytest.mark.parametrize(
    ("num_workers", "selection", "codec"),
    [
        (1, "block", "index"),
        (2, "leaf", "bitmap"),
        (3, "block", "bitmap"),
        (5, "leaf", "index"),
        (8, "block", "index"),
    ],
)
def test_union_is_exact_and_ties_go_to_the_lower_index(num_workers: int, selection: str, codec: str) -> None:
    """With equal scores the masks can be written down: first the lowest k of each row, then the next k.

    In steps 1 and 2 all entries are alike; in step 3 those that waited hold .1 + .19, the rest .9 * .19 + .1.
    """
    size = 3 * 77
    params, ones = {"w": np.zeros((3, 77), np.float32)}, {"w": np.ones((num_workers, 3, 77), np.float32)}
    row = 64 if selection == "block" else {2: 128, 5: 64}[num_workers]
    tx = one_program(scape(0.1, selection=selection, codec=codec))
    records = run(make_step(tx, num_workers), params, [ones] * 4)
    masks = [mask_in_use(state, params)["w"].reshape(-1) for state in scape_states(records)]
    want = np.zeros((2, size), bool)
    for start in range(0, size, row):
        k = max(1, int(0.1 * min(row, size - start) + 0.5))
        want[0, start : start + k] = True
        want[1, start + k : start + 2 * k] = True
    assert masks[0].all()
    for mask, rows in ((masks[1], want[0]), (masks[2], want[0]), (masks[3], want[1])):
        np.testing.assert_array_equal(mask, rows)
    for state in scape_states(records):
        assert not bits(state.mask["w"], 256)[size:].any(), "pad bits must be zero"


# ---- Dense limits


def test_density_1_is_dense_adams() -> None:
    params, batches = make_params(), make_batches(8, 5)
    sparse = run(make_step(scape(1.0, weight_decay=LAM), 8), params, batches)
    dense = run(
        make_step(scape_jax.adams(ETA, weight_decay=LAM, clip_norm=None, axis_name="data"), 8),
        params,
        batches,
    )
    for (p, _, _), (q, _, _) in zip(sparse, dense, strict=True):
        assert_close(p, q)


FEW = {"bias": (3,), "w": (2, 33)}


def eager_steps(tx: Any, batches: list[dict]) -> list[dict]:
    """Parameters after each step, one operation at a time: under jit XLA contracts products with sums."""
    params = {path: jnp.asarray(p) for path, p in make_params(shapes=FEW).items()}
    state, out = tx.init(params), []
    for batch in batches:
        updates, state = tx.update({path: jnp.asarray(x[0]) for path, x in batch.items()}, state, params)
        params = optax.apply_updates(params, updates)
        out.append(params)
    return out


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_one_worker_with_density_1_is_adams_bit_for_bit(clip_norm: float | None) -> None:
    """Fact 4 and case 11, for one worker without an axis."""
    batches = make_batches(1, 4, shapes=FEW)
    ours = eager_steps(scape_jax.scape(ETA, 1.0, clip_norm=clip_norm), batches)
    theirs = eager_steps(scape_jax.adams(ETA, clip_norm=clip_norm), batches)
    for p, q in zip(ours, theirs, strict=True):
        assert_bit_equal(p, q)


def test_one_worker_with_density_1_has_no_collective() -> None:
    """Fact 4 and case 11: an axis of size 1 is named, but nothing is sent over it."""
    params, batches = make_params(), make_batches(1, 5)
    step = make_step(scape(1.0, weight_decay=LAM), 1)
    ours = run(step, params, batches)
    theirs = run(
        make_step(scape_jax.adams(ETA, weight_decay=LAM, clip_norm=None, axis_name="data"), 1),
        params,
        batches,
    )
    for (p, _, _), (q, _, _) in zip(ours, theirs, strict=True):
        assert_close(p, q)
    assert step.collective_bytes() == {
        "all_reduce": 0,
        "all_gather": 0,
        "num_all_reduce": 0,
        "num_all_gather": 0,
    }
    assert step.wire_bytes().total_bytes == 0


def test_one_worker_sends_nothing_at_any_density() -> None:
    step = make_step(scape(0.1, density_warmup_steps=5, mask_every=2, codec="index"), 1)
    step.init(make_params())
    assert step.collective_bytes()["num_all_reduce"] == step.collective_bytes()["num_all_gather"] == 0


def test_clip_orders_agree_bit_for_bit_without_clipping() -> None:
    """Fact 2; with clipping they differ, so that the equality says something."""
    batches = make_batches(1, 3, shapes=FEW)

    def steps(clip_norm, clip_order, batches):
        # A named level spares the conditional, which would be compiled as a whole.
        tx = scape_jax.scape(ETA, 0.1, block_size=BLOCK, clip_norm=clip_norm, clip_order=clip_order)
        levels = iter([0, 1, 1])
        at_level = optax.GradientTransformationExtraArgs(
            tx.init, lambda *a: tx.update(*a, level=next(levels))
        )
        return eager_steps(at_level, batches)

    for p, q in zip(steps(1e6, "before", batches), steps(1e6, "paper", batches), strict=True):
        assert_bit_equal(p, q)
    after = [steps(0.1, clip_order, batches[:1])[0]["bias"] for clip_order in ("before", "paper")]
    tight = np.abs(after[0] - after[1])
    assert np.all(tight > ETA), "with clipping the orders differ"


# ---- W workers and one


@pytest.mark.parametrize("make", [scape_jax.adams, scape_jax.adamw])
def test_workers_and_micro_batches_are_interchangeable_for_dense_methods(make: Any) -> None:
    tx = make(ETA, weight_decay=LAM, clip_norm=0.3, axis_name="data")
    params, batches = make_params(shapes=FEW), make_batches(4, 5, shapes=FEW)
    many, one, both = (run(make_step(tx, w, 4 // w), params, batches) for w in (4, 1, 2))
    for (p, _, metrics), (q, _, _), (r, _, _) in zip(many, one, both, strict=True):
        assert float(metrics["clip_factor"]) < 0.9
        assert_close(p, q, terms=20)
        assert_close(p, r, terms=20)


@pytest.mark.parametrize(("num_workers", "accumulate"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("make", [scape_jax.adams, scape_jax.scape])
def test_clipping_acts_once_on_the_average(make: Any, num_workers: int, accumulate: int) -> None:
    """Case 6: [2, 0] and [0, 2] give [.70711, .70711], not [.5, .5] (each part clipped) nor [.447, .894].

    With b1 = b2 = 0 and eps = 1 the update of AdamS is g / (|g| + 1), so the gradient can be read from it.
    """
    tx = make(1.0, b1=0.0, b2=0.0, eps=1.0, bias_correction="none", clip_norm=1.0, axis_name="data")
    params, batch = {"w": np.zeros(2, np.float32)}, {"w": np.array([[2, 0], [0, 2]], np.float32)}
    ((after, _, metrics),) = run(make_step(tx, num_workers, accumulate), params, [batch])
    used = -after["w"] / (1 + after["w"])
    assert_close(used, np.full(2, np.sqrt(0.5), np.float32), terms=4)
    assert_close(metrics["grad_norm"], np.sqrt(np.float32(2)))
    assert_close(metrics["clip_factor"], np.sqrt(np.float32(0.5)))


@pytest.mark.parametrize("clip_norm", [None, 1e-30, 1.0])
def test_zero_gradients_give_no_nan(clip_norm: float | None) -> None:
    """Case 6: 0 / 0 of the clip factor, and of the normaliser, must not arise."""
    params = {"w": np.ones((2, 64), np.float32)}
    tx = one_program(scape(clip_norm=clip_norm))
    records = run(make_step(tx, 1), params, [{"w": np.zeros((1, 2, 64), np.float32)}] * 3)
    assert_bit_equal(records[-1][0], params)
    assert float(records[-1][2]["clip_factor"]) == 1.0
    assert int(records[-1][2]["skipped"]) == 0


@pytest.mark.parametrize(("num_workers", "accumulate"), [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_schedule_counts_steps_whatever_the_workers_and_micro_batches(
    num_workers: int, accumulate: int
) -> None:
    """Case 13: with b1 = b2 = eps = 0 and a unit gradient each step moves by the learning rate."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=10, decay_steps=100, end_value=0.02)
    tx = scape_jax.scape(
        schedule, b1=0.0, b2=0.0, eps=0.0, bias_correction="none", clip_norm=None, axis_name="data"
    )
    rows = num_workers * accumulate
    records = run(
        make_step(tx, num_workers, accumulate),
        {"w": np.zeros((1,), np.float32)},
        [{"w": np.ones((rows, 1), np.float32)}] * 101,
    )
    values = np.array([0.0] + [-p["w"][0] for p, _, _ in records], np.float64)
    rates = np.diff(values)
    want = np.array([float(schedule(t)) for t in range(101)])
    np.testing.assert_allclose(rates, want, rtol=0, atol=1e-6)
    assert want[0] == 0.0 and abs(want[10] - 0.1) < 1e-7 and abs(want[100] - 0.02) < 1e-7


@pytest.mark.parametrize(("make", "programs"), [(scape_jax.scape, 2), (scape_jax.adams, 1)])
def test_no_step_recompiles(make: Any, programs: int) -> None:
    """Case 2: one trace a program: SCAPE has one that chooses the density and one for the last density."""
    traces = []

    def loss(params, batch):
        traces.append(1)
        return linear_loss(params, batch)

    tx = make(ETA, axis_name="data", **({"block_size": BLOCK} if make is scape_jax.scape else {}))
    step = scape_jax.make_train_step(loss, tx, make_mesh(2))
    params = {"w": np.ones((2, 64), np.float32)}
    opt_state = step.init(params)
    for batch in make_batches(2, 5, shapes={"w": (2, 64)}):
        params, opt_state, _ = step(params, opt_state, batch)
        assert not any(x.weak_type for x in jax.tree.leaves((params, opt_state)))
    assert len(traces) == programs
