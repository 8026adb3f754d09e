"""What a round computes, by hand: signs, scales, schedules, one worker, weights, and a worker that is not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gasloc_jax as gj
from tests.gasloc_jax.side_by_side import loss_fn, make_batches, make_mesh, make_params, make_round, on_host
from tests.helpers import assert_close
from tests.quick_compile import quickest_compile  # noqa: F401

WORKERS, MOST = 4, 3

# Case 11, 12, 13 ----------------------------------------------------------------------------------------------


def one_number(num_workers: int, outer: Any, rounds: int = 1) -> list[np.ndarray]:
    """One parameter 1.0, of which worker n makes 0.4 (n even) or 0.8 by one step; its value after each round."""
    at = lambda n: 0.4 if n % 2 == 0 else 0.8  # noqa: E731
    step = gj.LocalStep(
        lambda params: (), lambda params, state, batch: ({"w": params["w"] + batch}, state, {})
    )
    round = gj.make_round(step, outer, make_mesh(num_workers))
    state, out = round.init({"w": jnp.array([1.0])}), []
    drift = np.array([at(n) - 1.0 for n in range(num_workers)], np.float32).reshape(num_workers, 1, 1)
    for _ in range(rounds):
        state, _ = round(state, drift, 1)
        out.append(np.asarray(state.params["w"])[:, 0])
    return out


@pytest.mark.parametrize("topology", [gj.random_pairs(), gj.random_ring(), gj.complete(), gj.ring()], ids=str)
def test_sign_and_scale_of_the_pseudo_gradient(topology):
    """Case 12: outer SGD with lr 1 ends where the worker is, lr 0.5 half-way, two workers in the middle."""
    outer = lambda rate: gj.gasloc(optax.sgd(rate), topology, "worker")  # noqa: E731
    assert one_number(1, outer(1.0))[0] == pytest.approx([0.4])
    assert one_number(1, outer(0.5))[0] == pytest.approx([0.7])
    assert one_number(2, outer(1.0))[0] == pytest.approx([0.6, 0.6])


def test_nesterov_over_two_rounds_is_optax_s_own():
    """Case 12. Pseudo-gradients of 0.6: what optax does with them, number for number."""
    tx, w = optax.sgd(0.7, momentum=0.9, nesterov=True), jnp.array([1.0])
    opt_state, wanted = tx.init(w), []
    for _ in range(2):
        updates, opt_state = tx.update(jnp.array([0.6]), opt_state, w)
        w = optax.apply_updates(w, updates)
        wanted.append(float(w[0]))
    assert [float(x[0]) for x in one_number(1, gj.gasloc(axis_name="worker"), 2)] == pytest.approx(
        wanted, rel=1e-6
    )


def test_one_worker_trains_like_the_inner_optimizer_alone():
    """Case 11: outer SGD(1) on one worker is plain training, and the program has no collective."""
    outer = gj.gasloc(optax.sgd(1.0), axis_name="worker", payload_dtype=jnp.int8)
    round, tx = make_round(outer, 1, optax.adamw(0.02)), optax.adamw(0.02)
    state, params = round.init(make_params()), jax.tree.map(jnp.asarray, make_params())
    inner = tx.init(params)
    batches = make_batches(1, 4)
    state, metrics = round(state, batches, 4)
    for i in range(4):
        grads = jax.grad(loss_fn)(params, {k: x[0, i] for k, x in batches.items()})
        updates, inner = tx.update(grads, inner, params)
        params = optax.apply_updates(params, updates)
    assert_close(jax.tree.map(lambda x: x[0], on_host(state.params)), on_host(params), "f32", terms=4)
    assert metrics["wire_bytes"] == 0
    text = str(jax.make_jaxpr(round._programs["round"])(state, batches, np.array([4], np.int32)))
    assert not any(name in text for name in ("psum", "ppermute", "all_gather", "all_to_all"))


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("steps", [1, 5])
def test_schedules_count_inner_steps_and_outer_rounds(num_workers, steps):
    """Case 13: the inner rate is that of the inner step for every W and H; the outer one that of the round."""
    seen_by = optax.scale_by_schedule(lambda count: -(1.0 + count))
    outer = gj.gasloc(optax.sgd(lambda count: jnp.where(count == 0, 1.0, 0.5)), gj.complete(), "worker")
    step = gj.make_local_step(lambda params, batch: params["w"][0] * batch, seen_by)
    round = gj.make_round(step, outer, make_mesh(num_workers))
    state = round.init({"w": jnp.zeros(1)})
    ones, w, taken = np.ones((num_workers, steps), np.float32), 0.0, 0
    for t in range(3):
        state, _ = round(state, ones, steps)
        drift = -sum(1.0 + taken + i for i in range(steps))
        w, taken = w + drift * (1.0 if t == 0 else 0.5), taken + steps
        assert np.asarray(state.params["w"])[:, 0] == pytest.approx([w] * num_workers)


@pytest.mark.parametrize(
    "outer",
    [
        lambda rate: gj.gasloc(optax.sgd(rate)),
        lambda rate: gj.nesterov_gossip(rate, 0.0),
        lambda rate: gj.noloco(rate, 0.0),
    ],
    ids=["gasloc", "nesterov_gossip", "noloco"],
)
def test_schedules_count_exchanges_of_a_fragment(outer):
    """Case 13: a fragment that meets in rounds 1, 3, .. has the rates of counts 0, 1, .., in all forms alike."""
    tx, w = outer(lambda count: jnp.where(count == 0, 1.0, 0.5)), jnp.array([1.0])
    state = tx.init(w)
    for t, rate in enumerate((1.0, 0.5, 0.5)):
        updates, state = tx.update(jnp.array([0.25]), state, w, round=jnp.int32(2 * t + 1))
        assert updates.tolist() == [-0.25 * rate]


def test_identity_settings_average_parameters_in_every_step():
    """H = 1, lr 1, no momentum, complete graph: parameter averaging."""
    assert one_number(4, gj.local_sgd("worker"), 2)[1] == pytest.approx([0.2] * 4, abs=1e-6)


# Weights and non-finite workers -------------------------------------------------------------------------------


def test_drift_weighted_by_steps():
    """Worker n drifts by H_n; uniform it proposes that, by steps H_n * H_n / 2."""
    step = gj.LocalStep(
        lambda params: (), lambda params, state, batch: ({"w": params["w"] + batch}, state, {})
    )
    for weight, wanted in (("uniform", (1 + 3) / 2), ("steps", (1 * 0.5 + 3 * 1.5) / 2)):
        round = gj.make_round(
            step, gj.local_sgd("worker"), make_mesh(2), drift_weight=weight, reference_steps=2
        )
        state, _ = round(round.init({"w": jnp.zeros(())}), np.ones((2, 3), np.float32), [1, 3])
        assert np.asarray(state.params["w"]) == pytest.approx([wanted] * 2)


@pytest.mark.parametrize(
    ("outer", "bad"),
    [
        (gj.gasloc(axis_name="worker"), np.nan),
        (gj.gasloc(axis_name="worker", payload_dtype=jnp.int8), np.inf),
        (gj.diloco(axis_name="worker"), np.inf),
        (gj.diloco(axis_name="worker", payload_dtype=jnp.bfloat16), np.nan),
        (gj.nesterov_gossip(momentum="local", axis_name="worker"), np.nan),
        (gj.noloco(axis_name="worker"), np.inf),
    ],
    ids=["pairs", "pairs int8", "diloco", "diloco bf16", "local", "noloco"],
)
def test_a_non_finite_worker_is_replaced_by_its_anchor(outer, bad):
    """It is counted, its peers and its own momenta stay finite, and from the next round on it takes part again."""
    round = make_round(outer, WORKERS, optax.adamw(0.02))
    state = round.init(make_params())
    state, _ = round(state, make_batches(WORKERS, MOST, seed=0), 2)
    before = on_host(state)
    batches = make_batches(WORKERS, MOST, seed=1)
    batches["embedding"][1, 1, 0, 2, 1] = bad  # one entry of one worker's second step
    state, metrics = round(state, batches, 2)
    assert np.asarray(metrics["skipped"]).tolist() == [0, 1, 0, 0]
    assert np.asarray(state.skipped).tolist() == [0, 1, 0, 0]
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        assert np.isfinite(np.asarray(x)).all(), jax.tree_util.keystr(path)
    # What the others see of it is its anchor: the same as a round in which it did not move at all.
    batches["embedding"][1, 1, 0, 2, 1] = 0.0
    half, _ = round.local(jax.device_put(before, jax.tree.map(lambda x: x.sharding, state)), batches, 2)
    held = jax.tree.map(lambda p, a: p.at[1].set(a[1]), half.params, half.anchor)
    wanted = round.exchange(half._replace(params=held))
    assert_close(on_host(state.params), on_host(wanted.params), "f32", terms=4)
    state, metrics = round(state, make_batches(WORKERS, MOST, seed=2), 2)
    assert not np.asarray(metrics["skipped"]).any()
    moved = on_host(state.params["embedding"]) - on_host(wanted.params["embedding"])
    assert np.abs(moved[1]).max() > 1e-3
