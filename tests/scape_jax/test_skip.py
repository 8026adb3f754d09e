"""A gradient that is not finite, on any worker, stops the step on all: nothing changes but the count of skips."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scape_jax
from tests.helpers import assert_bit_equal, assert_close
from tests.quick_compile import quickest_compile  # noqa: F401
from tests.scape_jax.side_by_side import (
    make_batches,
    make_params,
    make_step,
    mask_in_use,
    on_host,
    one_program,
    state_of,
)

SHAPES = {"bias": (5,), "w": (3, 33)}
WORKERS = 2


def falling(count: Any) -> Any:
    return 0.02 / (1 + count)


METHODS = {
    "scape": lambda **k: scape_jax.scape(falling, 0.1, block_size=64, weight_decay=0.1, **k),
    "scape, all options": lambda **k: one_program(
        scape_jax.scape(
            falling,
            0.1,
            block_size=64,
            codec="index",
            density_warmup_steps=3,
            mask_every=2,
            staleness_power=1.0,
            payload_dtype=jnp.bfloat16,
            **k,
        )
    ),
    "scape in a chain": lambda **k: optax.chain(
        scape_jax.scape(falling, 0.1, block_size=64, weight_decay=0.1, **k)
    ),
    "adams": lambda **k: scape_jax.adams(falling, weight_decay=0.1, **k),
    "adamw": lambda **k: scape_jax.adamw(falling, weight_decay=0.1, **k),
    "topk": lambda **k: scape_jax.topk(falling, 0.1, block_size=64, weight_decay=0.1, **k),
}


def spoiled(batch: dict, worker: int, value: float, path: str, entry: tuple) -> dict:
    out = {p: x.copy() for p, x in batch.items()}
    rows = out[path].shape[0] // WORKERS
    out[path][(worker * rows, *entry)] = value
    return out


def negative_zeros(params: dict) -> dict:
    """-0.0 in some entries: adding +0.0 to it would change its bits."""
    params = on_host(params)
    params["w"][0, :3], params["bias"][0] = -0.0, -0.0
    return params


def but_stats(opt_state: Any) -> Any:
    """The state without what the last exchange told, which is of the skipped step."""
    is_stats = lambda x: isinstance(x, scape_jax.StepStats)  # noqa: E731
    return jax.tree.map(lambda x: None if is_stats(x) else x, opt_state, is_leaf=is_stats)


def unsent_entry(opt_state: Any, params: dict) -> tuple:
    """An entry of w outside the mask in use (entry 0 for methods without one)."""
    kind = scape_jax.ScaleByScapeState
    found = [
        x for x in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind)) if isinstance(x, kind)
    ]
    if not found:
        return (0, 0)
    mask = mask_in_use(found[0], params)["w"]
    free = np.argwhere(~mask)
    return tuple(free[len(free) // 2]) if len(free) else (0, 0)


@pytest.mark.parametrize("name", METHODS)
def test_skipped_steps_change_nothing(name: str) -> None:
    """Bad batches before steps 1, 2, 3 and 6, on either worker; then equal to the run that never saw them."""
    accumulate = 2 if name == "scape" else 1
    good = make_batches(WORKERS * accumulate, 6, shapes=SHAPES)
    step = make_step(METHODS[name](axis_name="data"), WORKERS, accumulate)
    bad_before = {0: (0, np.nan), 1: (1, np.inf), 2: (1, np.nan), 5: (0, -np.inf)}

    def train(with_bad: bool) -> tuple[dict, Any, int]:
        params, skipped = make_params(shapes=SHAPES), 0
        opt_state = step.init(params)
        for t, batch in enumerate(good):
            if t in bad_before:
                params = negative_zeros(params)
            if t in bad_before and with_bad:
                worker, value = bad_before[t]
                before = on_host((params, opt_state))
                path, entry = ("bias", (3,)) if t == 1 else ("w", unsent_entry(before[1], before[0]))
                params, opt_state, metrics = step(
                    params, opt_state, spoiled(batch, worker, value, path, entry)
                )
                skipped += 1
                assert_bit_equal(on_host(params), before[0])
                assert_bit_equal(but_stats(on_host(opt_state)), but_stats(before[1]))
                assert int(metrics["skipped"]) == skipped
            params, opt_state, metrics = step(params, opt_state, batch)
            assert int(metrics["skipped"]) == skipped
        return *on_host((params, opt_state)), skipped

    with_bad, without = train(True), train(False)
    assert_bit_equal(with_bad[0], without[0])
    assert_bit_equal(but_stats(with_bad[1]), but_stats(without[1]))
    assert (with_bad[2], without[2]) == (4, 0)


@pytest.mark.parametrize("name", METHODS)
def test_update_alone_adds_nothing_on_a_skip(name: str) -> None:
    """Without make_train_step: the update is such that every parameter keeps its bits, -0.0 too."""
    tx = METHODS[name]()
    params = negative_zeros(make_params(shapes=SHAPES))
    grads = [{path: x[0] for path, x in b.items()} for b in make_batches(1, 2, shapes=SHAPES)]
    update, state = jax.jit(tx.update), tx.init(params)
    for t in range(2):
        spoilt = {
            "bias": grads[t]["bias"],
            "w": np.where(grads[t]["w"] == grads[t]["w"].max(), np.nan, grads[t]["w"]),
        }
        updates, after = update(spoilt, state, params)
        assert_bit_equal(on_host(optax.apply_updates(params, updates)), params)
        assert_bit_equal(but_stats(on_host(after)), but_stats(on_host(state)))
        _, state = update(grads[t], after, params)


@pytest.mark.parametrize("name", METHODS)
def test_a_loss_far_above_the_usual_one_skips_the_step(name: str) -> None:
    tx = METHODS[name](skip_spike=1.0)
    params = make_params(shapes=SHAPES)
    grads = {path: x[0] for path, x in make_batches(1, 1, shapes=SHAPES)[0].items()}
    update, state = jax.jit(lambda g, s, p, loss: tx.update(g, s, p, value=loss)), tx.init(params)
    usual = 3.0
    losses = ((3.0, True), (2.5, True), (np.nan, True), (3.9, True), (4.1, False), (9.0, False), (4.0, True))
    for loss, is_taken in losses:
        updates, after = update(grads, state, params, jnp.float32(loss))
        taken = on_host(optax.apply_updates(params, updates))
        stats = state_of(after, scape_jax.StepStats)
        if is_taken:
            usual += 0.05 * (loss - usual) if np.isfinite(loss) else 0.0
            assert np.any(taken["w"] != params["w"])
        else:
            assert_bit_equal(taken, params)
            assert_bit_equal(but_stats(on_host(after)), but_stats(on_host(state)))
        np.testing.assert_allclose(stats.usual_loss, usual, rtol=1e-6)
        params, state = taken, after
    assert int(stats.skipped) == 2


def test_a_spike_on_one_worker_is_judged_by_the_mean_on_all() -> None:
    step = make_step(scape_jax.scape(0.1, 0.1, block_size=64, axis_name="data", skip_spike=0.5), WORKERS)
    params, good = make_params(shapes=SHAPES), make_batches(WORKERS, 2, shapes=SHAPES)
    opt_state = step.init(params)
    params, opt_state, metrics = step(params, opt_state, good[0])
    before = on_host(params)
    large = {path: x.copy() for path, x in good[1].items()}
    large["w"][0] = 1e3 * before["w"]  # the loss is linear: finite, and far above
    params, opt_state, metrics = step(params, opt_state, large)
    assert int(metrics["skipped"]) == 1 and float(metrics["loss"]) > 1
    assert_bit_equal(on_host(params), before)


def test_no_spike_is_looked_for_by_default() -> None:
    assert state_of(scape_jax.scape(1e-3).init(make_params()), scape_jax.StepStats).usual_loss is None


@pytest.mark.parametrize("name", METHODS)
def test_without_skipping_a_nan_goes_through(name: str) -> None:
    """skip_nonfinite=False does what every other optimizer does: it neither skips nor holds anything back."""
    tx = METHODS[name](skip_nonfinite=False)
    params = make_params(shapes=SHAPES)
    grads = [{path: x[0] for path, x in batch.items()} for batch in make_batches(1, 2, shapes=SHAPES)]
    update, state = jax.jit(tx.update), tx.init(params)
    _, state = update(grads[0], state, params)
    updates, state = update(
        {"bias": grads[1]["bias"], "w": np.full((3, 33), np.nan, np.float32)}, state, params
    )
    # Top-k takes no NaN from its own sum; it stays in the residual.
    kept = {"topk": 0, "adams": 99, "adamw": 99}.get(name)
    if name == "topk":
        assert np.isnan(state_of(state, scape_jax.TopKState).residual["w"]).all()
    if kept is None:
        kept = mask_in_use(state_of(state, scape_jax.ScaleByScapeState), params)["w"].sum()
        assert np.isnan(state_of(state, scape_jax.ScaleByScapeState).h["w"]).all()
    assert np.isnan(updates["w"]).sum() == kept
    stats = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, scape_jax.StepStats))
    assert [int(x.skipped) for x in stats if isinstance(x, scape_jax.StepStats)] == [0]


def test_large_finite_gradients_are_no_reason_to_skip() -> None:
    """1e17 squared, summed, is still finite in float32: such a gradient is clipped."""
    tx = scape_jax.scape(falling, 0.1, block_size=64, clip_norm=1.0)
    params = make_params(shapes=SHAPES)
    grads = {path: np.full(shape, 1e17, np.float32) for path, shape in SHAPES.items()}
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert int(state_of(state, scape_jax.ScaleByScapeState).stats.skipped) == 0
    assert_close(updates["bias"], np.full(5, -0.02, np.float32), terms=4)
