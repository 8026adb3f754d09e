"""JAX on 1, 2 and 8 devices equals the NumPy float64 reference over 20 steps: parameters, masks, buffers.

The reference shares no code with it: separate m and e, boolean masks, the paper's payload mt^n and its mean.
"""

import contextlib
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scape_jax
from scape_jax import reference
from tests.helpers import TOLERANCES, assert_close
from tests.quick_compile import compiled_quickly
from tests.scape_jax.side_by_side import (
    BLOCK,
    SHAPES,
    WHOLE_ROWS,
    assert_near_ties,
    make_batches,
    make_params,
    make_step,
    mask_in_use,
    next_mask,
    one_program,
    run,
    state_of,
    worker_gradients,
)

STEPS = 20


def schedule(count: Any) -> Any:
    return 0.01 / (1 + 0.1 * count)


def pair(num_workers: int, **options: Any) -> tuple[dict, reference.Settings]:
    """The same options for both sides; what they spell differently, or only JAX has, is sorted out here."""
    options = {"density": 0.1, "learning_rate": schedule, "block_size": BLOCK, "clip_norm": None} | options
    names = {f.name for f in dataclasses.fields(reference.Settings)}
    ours = {k: v for k, v in options.items() if k in names}
    if "payload_dtype" in options:
        options["payload_dtype"] = jnp.dtype(options["payload_dtype"])
    return options | {"axis_name": "data"}, reference.Settings(num_workers=num_workers, **ours)


def compare_scape(
    num_workers: int,
    *,
    accumulate: int = 1,
    shapes: dict = SHAPES,
    kind: str = "params",
    form: str = "apply",
    density: float = 0.1,
    **options: Any,
) -> tuple[reference.Scape, list[dict], int]:
    """20 steps on both sides; returns the reference, the metrics, and how many entries of masks ties swapped.

    The forms: "apply" writes kept entries into the parameters, "update" is what a chain of optax does,
    "programs" is "apply" with make_train_step's change to a program without a choice of density.
    """
    keywords, settings = pair(num_workers, density=density, **options)
    tx = scape_jax.scape(**keywords)
    tx = {"apply": one_program, "update": optax.chain, "programs": lambda tx: tx}[form](tx)
    step = make_step(tx, num_workers, accumulate)
    params = make_params(shapes=shapes)
    batches = make_batches(num_workers * accumulate, STEPS, shapes=shapes)
    records = run(step, params, batches)
    states = [state_of(state, scape_jax.ScaleByScapeState) for _, state, _ in records]
    used = [mask_in_use(state, params) for state in states]
    layout = {"density": density, "selection": settings.selection, "dense": settings.dense}
    used.append(next_mask(states[-1], params, num_workers, **layout))

    ref = reference.Scape(params, settings)
    swapped = 0
    for t, batch in enumerate(batches):
        for path in params:
            np.testing.assert_array_equal(ref.mask[path], used[t][path], err_msg=f"{path}, step {t + 1}")
        ref.step(worker_gradients(batch, num_workers))
        chosen = ref.mask
        for path in params:
            scores = [score[path] for score in ref.scores]
            if kind == "bf16_payload":
                # Rounded moments choose other entries; how many, the caller judges.
                swapped += int(np.sum(used[t + 1][path] & ~chosen[path]))
            elif not np.array_equal(used[t + 1][path], chosen[path]):
                swapped += assert_near_ties(used[t + 1][path], chosen[path], scores, settings)
        ref.mask = used[t + 1]
        assert_close(records[t][0], ref.params, kind, dtype=jnp.float32)
        compare_buffers(states[t], ref, used[t], kind)
        metrics = {"grad_norm": ref.grad_norm, "clip_factor": ref.clip_factor}
        for name, value in metrics.items():
            assert_close(records[t][2][name], np.float64(value), kind, dtype=jnp.float32)
    assert [int(state.count) for state in states] == list(range(1, STEPS + 1))
    return ref, [metrics for _, _, metrics in records], swapped


def compare_buffers(state: Any, ref: reference.Scape, used: dict, kind: str) -> None:
    """h holds m on the mask and the worker's residual off it; age counts the steps that an entry waited."""
    for path, mask in used.items():
        for n, e in enumerate(ref.e):
            want = np.where(mask, ref.m[path], e[path])
            assert_close(state.h[path][n], want, kind, dtype=jnp.float32)
        if state.age is not None and state.age[path] is not None:
            np.testing.assert_array_equal(state.age[path], ref.waited[path])


SCAPE_CASES = {
    "W8 block bitmap": dict(num_workers=8, codec="bitmap", weight_decay=0.1, form="update"),
    "W8 block index": dict(num_workers=8, codec="index", bias_correction="none", clip_norm=1.0, accumulate=2),
    "W2 block index": dict(num_workers=2, codec="index", staleness_power=1.0),
    "W8 leaf bitmap": dict(num_workers=8, selection="leaf", codec="bitmap", bias_correction="momentum"),
    "W2 leaf index": dict(
        num_workers=2, selection="leaf", codec="index", clip_norm=1.0, clip_order="paper", form="update"
    ),
    "W1 block": dict(
        num_workers=1, codec="index", staleness_power=1.0, weight_decay=0.01, form="update", accumulate=3
    ),
    "W1 leaf": dict(num_workers=1, selection="leaf", codec="bitmap", clip_norm=1.0),
    "warm-up, bitmap": dict(num_workers=2, codec="bitmap", density_warmup_steps=11, form="update"),
    "all at once": dict(
        num_workers=8,
        selection="leaf",
        codec="index",
        density_warmup_steps=10,
        mask_every=3,
        staleness_power=1.0,
        clip_norm=1.0,
        weight_decay=0.1,
        bias_correction="momentum",
    ),
    "mask_every 3": dict(
        num_workers=2, mask_every=3, codec="bitmap", weight_decay=0.1, density=0.2, form="programs"
    ),
    "staleness 0.5, paper's clipping": dict(
        num_workers=2, staleness_power=0.5, clip_norm=0.5, clip_order="paper"
    ),
    "whole rows, density .02": dict(num_workers=8, shapes=WHOLE_ROWS, codec="auto", density=0.02),
    "dense by name": dict(num_workers=2, dense=lambda path: path.startswith("embedding"), codec="bitmap"),
}


# Compiled as users do, with each number of workers, codec, selection and form among them; the others, which differ in
# an option, compile quickly.
FULLY_OPTIMIZED = ("W8 block bitmap", "W2 leaf index", "W1 leaf", "all at once", "mask_every 3")


@pytest.mark.parametrize("name", SCAPE_CASES)
def test_scape_equals_reference(name: str) -> None:
    case = SCAPE_CASES[name]
    with contextlib.nullcontext() if name in FULLY_OPTIMIZED else compiled_quickly():
        ref, metrics, swapped = compare_scape(**case)
    assert swapped <= 2, f"{swapped} entries of 20 masks tie: the comparison of masks says little"
    factors = [float(m["clip_factor"]) for m in metrics]
    active = case.get("clip_norm") is not None
    assert all(f < 0.9 for f in factors) if active else all(f == 1.0 for f in factors)
    if "staleness_power" in case:
        assert max(w.max() for w in ref.waited.values()) > 5
    assert not all(ref.dense.values())


def test_the_count_of_waiting_steps_saturates() -> None:
    """It is one byte: an entry passed over 300 times is treated like one passed over 255 times, not 44."""
    keywords, settings = pair(1, staleness_power=1.0)
    params = {"w": np.ones((1, 64), np.float32)}
    lively = np.zeros((1, 1, 64), np.float32)
    lively[..., :6] = 1.0  # exactly the six entries that a row of 64 keeps
    sudden = lively.copy()
    sudden[..., 40] = 100.0
    batches = [{"w": lively}] * 300 + [{"w": sudden}] * 2
    records = run(make_step(one_program(scape_jax.scape(**keywords)), 1), params, batches)
    ref = reference.Scape(params, settings)
    for batch in batches:
        ref.step(worker_gradients(batch, 1))
    ages = [state_of(state, scape_jax.ScaleByScapeState).age["w"] for _, state, _ in records]
    assert ages[299].max() == ages[300].max() == 255
    assert ages[301][0, 40] == 0
    moved = records[301][0]["w"][0, 40] - records[300][0]["w"][0, 40]
    assert_close(records[301][0], ref.params, dtype=jnp.float32, terms=300)
    assert abs(moved) > 10 * schedule(301)  # because tau = 256 divides what enters v


def test_scape_with_bfloat16_payload_is_near_the_reference() -> None:
    ref, _, swapped = compare_scape(8, payload_dtype="bfloat16", kind="bf16_payload", codec="bitmap")
    kept = sum(int(mask.sum()) for path, mask in ref.mask.items() if not ref.dense[path])
    assert swapped <= 0.05 * STEPS * kept


def compare_baseline(
    make: Any, ref: reference.Dense, num_workers: int, accumulate: int, kind: str, options: dict
):
    """20 steps of a baseline on both sides; returns JAX's records."""
    batches = make_batches(num_workers * accumulate, STEPS)
    records = run(make_step(make(**options), num_workers, accumulate), make_params(), batches)
    for (params, _, metrics), batch in zip(records, batches, strict=True):
        ref.step(worker_gradients(batch, num_workers))
        assert_close(params, ref.params, kind, dtype=jnp.float32)
        assert_close(metrics["grad_norm"], np.float64(ref.grad_norm), kind, dtype=jnp.float32)
        assert_close(metrics["clip_factor"], np.float64(ref.clip_factor), kind, dtype=jnp.float32)
    return records


DENSE_CASES = {
    "adams both": dict(rule="adams", num_workers=8, bias_correction="both", weight_decay=0.1),
    "adams none, clipped": dict(rule="adams", num_workers=2, bias_correction="none", clip_norm=1.0),
    "adams momentum": dict(rule="adams", num_workers=1, bias_correction="momentum"),
    "adams bf16": dict(rule="adams", num_workers=8, payload_dtype="bfloat16", kind="bf16_payload"),
    "adams accumulation": dict(rule="adams", num_workers=2, accumulate=4, clip_norm=1.0),
    "adamw": dict(rule="adamw", num_workers=8, weight_decay=0.1, clip_norm=1.0),
}


@pytest.mark.parametrize("case", DENSE_CASES.values(), ids=DENSE_CASES.keys())
def test_dense_methods_equal_reference(case: dict) -> None:
    case = dict(case)
    rule, num_workers = case.pop("rule"), case.pop("num_workers")
    kind, accumulate = case.pop("kind", "params"), case.pop("accumulate", 1)
    options, settings = pair(num_workers, **case)
    del options["density"], options["block_size"]
    make = {"adams": scape_jax.adams, "adamw": scape_jax.adamw}[rule]
    compare_baseline(
        make, reference.Dense(make_params(), settings, rule), num_workers, accumulate, kind, options
    )


@pytest.mark.parametrize(
    ("rule", "num_workers", "options"),
    [
        ("adamw", 8, dict(clip_norm=1.0, weight_decay=0.1)),
        ("adams", 2, dict(bias_correction="none")),
    ],
)
def test_topk_equals_reference(rule: str, num_workers: int, options: dict) -> None:
    keywords, settings = pair(num_workers, **options)
    ref = reference.TopK(make_params(), settings, rule)
    keywords["optimizer"] = rule
    records = compare_baseline(scape_jax.topk, ref, num_workers, 1, "params", keywords)
    residual = state_of(records[-1][1], scape_jax.TopKState).residual
    for path, is_whole in ref.dense.items():
        if not is_whole:
            want = np.stack([r[path] for r in ref.residual])
            assert_close(residual[path], want, "params", dtype=jnp.float32)
            assert (residual[path] == 0).sum() == num_workers * reference.keep_of(want[0].size, 0.1)


def test_near_ties_are_told_from_wrong_choices() -> None:
    """The tool that forgives a swap must not forgive a wrong entry, nor a row with another count."""
    settings = reference.Settings(num_workers=1, block_size=4, density=0.5)
    scores = [np.array([1.0, 2.0, 2.0 + 1e-7, 3.0])]
    want = reference.largest(scores[0], 2)
    assert want.tolist() == [False, False, True, True]
    assert assert_near_ties(np.array([False, True, False, True]), want, scores, settings) == 1
    with pytest.raises(AssertionError, match="no tie"):
        assert_near_ties(np.array([True, False, False, True]), want, scores, settings)
    with pytest.raises(AssertionError, match="kept for"):
        assert_near_ties(np.array([False, False, False, True]), want, scores, settings)
    assert TOLERANCES["params"].rtol <= 1e-5
