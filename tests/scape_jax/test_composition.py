"""SCAPE inside optax's wrappers and flax.nnx's optimizer: schedules, masks, groups, accumulation.

Each wrapper is compared with what it means for the plain optimizer; cases 1, 3, 4 and 5 of the design's list.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import scape_jax
from tests.helpers import assert_bit_equal, assert_close
from tests.quick_compile import quickest_compile  # noqa: F401
from tests.scape_jax.contract_table import SCAPE, make_grads, make_params


def take_steps(tx: Any, params: Any, num_steps: int = 2, grads: Any = None) -> tuple[Any, Any, list[Any]]:
    """(params, state, updates) of jitted steps on seeded gradients."""
    update, state, seen = jax.jit(tx.update), tx.init(params), []
    for seed in range(num_steps):
        updates, state = update(make_grads(params, seed) if grads is None else grads[seed], state, params)
        params = optax.apply_updates(params, updates)
        seen.append(updates)
    return params, state, seen


@functools.cache
def plain(num_steps: int = 2) -> tuple[Any, Any, list[Any]]:
    return take_steps(SCAPE(), make_params(), num_steps)


# Schedules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [scape_jax.scape, scape_jax.adams, scape_jax.adamw, scape_jax.topk])
def test_first_update_reads_the_first_value_of_the_schedule(make):
    """Case 1. A schedule read a step late or early has a first update that is not 0, or a second that is."""
    ramp = lambda count: jnp.asarray(count, jnp.float32)  # noqa: E731
    params = make_params()
    direct = make(ramp)
    injected = optax.inject_hyperparams(make)(learning_rate=lambda c: c)
    _, _, at_one = take_steps(make(1.0), params)
    for tx in (direct, injected):
        update, state = jax.jit(tx.update), tx.init(params)
        for count, wanted in enumerate((jax.tree.map(jnp.zeros_like, params), at_one[1])):
            updates, state = update(make_grads(params, count), state, params)
            if tx is injected:
                assert float(state.hyperparams["learning_rate"]) == count
            assert_close(updates, wanted)
            if count == 0:
                assert all(bool((u == 0).all()) for u in jax.tree.leaves(updates))


def test_injected_hyperparameters_change_nothing():
    """Traced b1, b2, eps, clip_norm and weight decay do what the numbers do."""
    inject = optax.inject_hyperparams(scape_jax.scape, static_args=scape_jax.STATIC_ARGS)
    tx = inject(
        0.05,
        density=0.25,
        block_size=64,
        density_warmup_steps=0,
        mask_every=1,
        staleness_power=1.0,
        weight_decay=0.1,
    )
    state = tx.init(make_params())
    assert set(state.hyperparams) == {"learning_rate", "b1", "b2", "eps", "weight_decay", "clip_norm"}
    wanted = take_steps(SCAPE(staleness_power=1.0, weight_decay=0.1), make_params())
    got = take_steps(tx, make_params())
    assert_close(got[0], wanted[0])
    assert_bit_equal(got[1].inner_state.mask, wanted[1].mask)


def test_injected_learning_rate_can_be_set_from_outside():
    tx = optax.inject_hyperparams(scape_jax.scape)(0.05)
    params, state = make_params(), None
    state = tx.init(params)
    state.hyperparams["learning_rate"] = jnp.float32(0.0)
    updates, _ = tx.update(make_grads(params), state, params)
    assert all(bool((u == 0).all()) for u in jax.tree.leaves(updates))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (scape_jax.scape, {"density": 0.25}),
        (scape_jax.scape, {"block_size": 64}),
        (scape_jax.scape, {"mask_every": 2}),
        (scape_jax.scape, {"staleness_power": 1.0}),
        (scape_jax.scape, {"density_warmup_steps": 3}),
        (scape_jax.topk, {"density": 0.25}),
        (scape_jax.topk, {"block_size": 64}),
    ],
)
def test_injecting_a_static_number_says_what_to_do(make, options):
    """A density must not be traced: shapes follow from it."""
    (name,) = options
    with pytest.raises(TypeError, match=rf"{name} .*static_args=scape_jax.STATIC_ARGS"):
        optax.inject_hyperparams(make)(0.05, **options).init(make_params())


@pytest.mark.parametrize("make", [scape_jax.scape, scape_jax.adams])
@pytest.mark.parametrize(
    "mask",
    [
        {"layer": {"kernel": True, "bias": True}, "odd": False, "temp": True},
        {"layer": True, "odd": False, "temp": True},
        lambda params: {"layer": True, "odd": False, "temp": True},
    ],
    ids=["tree", "prefix", "function"],
)
def test_weight_decay_mask(make, mask):
    params = make_params()
    zero = jax.tree.map(jnp.zeros_like, params)
    tx = make(0.5, weight_decay=0.1, weight_decay_mask=mask)
    updates, _ = tx.update(zero, tx.init(params), params)
    wanted = {name: jax.tree.map(lambda p: -0.05 * p, sub) for name, sub in params.items()}
    assert_close(updates, {**wanted, "odd": zero["odd"]})


# Masks and groups -------------------------------------------------------------------------------------------


def test_masked_out_leaves_have_no_state_and_pass_through():
    chosen = {"layer": {"kernel": True, "bias": True}, "odd": False, "temp": True}
    params, state, updates = take_steps(optax.masked(SCAPE(), chosen), make_params())
    inner = state.inner_state
    for field in (inner.h, inner.mask, inner.next_mask):
        assert jax.tree.leaves(field["odd"]) == []
    assert_bit_equal(updates[0]["odd"], make_grads(make_params(), 0)["odd"])
    # The clip factor is that of the leaves inside the mask.
    alone = {k: v for k, v in make_params().items() if k != "odd"}
    grads = [{k: v for k, v in make_grads(make_params(), seed).items() if k != "odd"} for seed in range(2)]
    wanted, _, _ = take_steps(SCAPE(), alone, grads=grads)
    assert_bit_equal({k: v for k, v in params.items() if k != "odd"}, wanted)


class Tiny(nnx.Module):
    """An embedding, a layer and a leaf that may be absent."""

    def __init__(self, rngs: nnx.Rngs, with_gain: bool = True):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.layer = nnx.Linear(8, 16, rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(())) if with_gain else None

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.head(jnp.tanh(self.layer(self.embed(tokens))))
        return x if self.gain is None else x * self.gain[...]


GROUP_OF = {"embed": "frozen", "layer": "sparse", "head": "dense", "gain": "dense"}


def group_labels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: GROUP_OF[path[0].key], params)


def tiny_loss(model: Tiny) -> jax.Array:
    return jnp.mean((model(jnp.arange(16)) - 1.0) ** 2)


def test_groups_of_an_nnx_model():
    """Case 3: a sparse, a dense and a frozen group under nnx.Optimizer; the frozen one keeps its bits."""
    model = Tiny(nnx.Rngs(0))
    tx = optax.multi_transform(
        {
            "sparse": SCAPE(weight_decay=0.1),
            "dense": scape_jax.adamw(0.05, weight_decay=0.1),
            "frozen": optax.set_to_zero(),
        },
        group_labels,
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(tiny_loss)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(12)]
    after = nnx.state(model, nnx.Param)
    assert_bit_equal(jax.tree.leaves(after["embed"]), jax.tree.leaves(before["embed"]))
    for group in ("layer", "head", "gain"):
        for a, b in zip(jax.tree.leaves(after[group]), jax.tree.leaves(before[group]), strict=True):
            assert bool((a != b).any())
    assert losses[-1] < 0.5 * losses[0]
    # The sparse group's state holds one buffer for each of its own leaves and nothing for the others.
    state = tx.init(nnx.state(model, nnx.Param)).inner_states["sparse"].inner_state
    assert {x.shape for x in jax.tree.leaves(state.h)} == {(1, 8, 16), (1, 16)}
    assert {x.shape for x in jax.tree.leaves(state.mask)} == {(4,)}


def test_nnx_model_equals_the_same_arrays_in_a_dict():
    """nnx.State holds its arrays in variables with paths that end in `.value`: no reason to differ."""
    model = Tiny(nnx.Rngs(0), with_gain=False)
    pure = lambda state: nnx.to_pure_dict(state)  # noqa: E731
    params, grads = pure(nnx.state(model, nnx.Param)), nnx.grad(tiny_loss)(model)
    wanted, _, _ = take_steps(SCAPE(), params, 2, grads=[pure(grads)] * 2)
    optimizer = nnx.Optimizer(model, SCAPE(), wrt=nnx.Param)
    update = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    for _ in range(2):
        update(model, optimizer, grads)
    assert_bit_equal(pure(nnx.state(model, nnx.Param)), wanted)


def test_labels_that_do_not_match_name_the_difference():
    tx = optax.partition({"a": SCAPE(), "b": optax.sgd(0.1)}, {"layer": "a", "od": "b", "temp": "a"})
    with pytest.raises(ValueError, match="od"):
        tx.init(make_params())


# Odd trees --------------------------------------------------------------------------------------------------


def test_none_and_empty_leaves_change_no_other():
    """Cases 3 and 5: None stays None; zero entries have no largest one, and 0/0 poisons a norm."""
    params = {**make_params(), "nothing": None, "empty": jnp.zeros((0, 10))}
    got, state, updates = take_steps(SCAPE(), params)
    assert got.pop("nothing") is None and updates[0]["nothing"] is None and state.h["nothing"] is None
    assert updates[0]["empty"].shape == got.pop("empty").shape == (0, 10)
    assert bool(jnp.isfinite(scape_jax.telemetry(state)["density"]))
    assert_bit_equal(got, plain()[0])


@pytest.mark.parametrize(
    "tx", [SCAPE(selection="leaf"), scape_jax.topk(0.1), scape_jax.adams(0.1)], ids=["scape", "topk", "adams"]
)
def test_an_empty_leaf_has_an_empty_update(tx):
    params = {"e": jnp.zeros((0, 10))}
    updates, state = tx.update(params, tx.init(params), params)
    assert updates["e"].shape == (0, 10)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state))


@pytest.mark.parametrize("tree", [{}, None, (), jnp.ones((8, 24)), [jnp.ones((8, 24)), (jnp.ones(3),)]])
def test_any_tree_will_do(tree):
    state = SCAPE().init(tree)
    updates, new_state = jax.eval_shape(SCAPE().update, tree, state, tree)
    assert jax.tree.structure(updates) == jax.tree.structure(tree)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)


def test_scalars_and_tiny_leaves_move_as_under_adams():
    """Case 4: a scalar and a leaf of 3, where k would round to 0, are exchanged whole, in every step."""
    params = {"w": jnp.ones((4, 4)), "temp": jnp.ones(()), "three": jnp.ones((3, 1))}
    got, _, _ = take_steps(scape_jax.scape(0.05, 0.1), params, 3)
    assert_close(got, take_steps(scape_jax.adams(0.05), params, 3)[0])


# Accumulation and safety ------------------------------------------------------------------------------------


def test_multi_steps_averages_before_the_clip():
    """Case 6: micro-gradients [2, 0] and [0, 2] give [1, 1] clipped, not the mean of two clipped ones."""
    params = {"w": jnp.zeros(2)}
    tx = optax.MultiSteps(scape_jax.scape(1.0, bias_correction="none", b1=0.0, b2=0.0, eps=1.0), 2)
    state = tx.init(params)
    for g in ([2.0, 0.0], [0.0, 2.0]):
        updates, state = tx.update({"w": jnp.array(g)}, state, params)
    g = np.float32(np.sqrt(0.5))
    assert_close(updates["w"], np.full(2, -g / (g + 1), np.float32))
    assert float(state.inner_opt_state.stats.grad_norm) == pytest.approx(np.sqrt(2), rel=1e-6)


def test_multi_steps_of_equal_gradients_is_one_step():
    tx = optax.MultiSteps(SCAPE(), 2)
    params, state, update = make_params(), tx.init(make_params()), jax.jit(tx.update)
    for seed in (0, 0, 1, 1):
        updates, state = update(make_grads(params, seed), state, params)
        params = optax.apply_updates(params, updates)
    assert_close(params, plain()[0])


def test_apply_if_finite_rejects_a_step_and_goes_on():
    tx = optax.apply_if_finite(SCAPE(skip_nonfinite=False), 3)
    params, update = make_params(), jax.jit(tx.update)
    bad = make_grads(params, 0)
    bad["temp"] = jnp.float32(jnp.nan)
    updates, state = update(bad, tx.init(params), params)
    assert all(bool((u == 0).all()) for u in jax.tree.leaves(updates))
    assert_bit_equal(state.inner_state, SCAPE().init(params))
    for seed in range(2):
        updates, state = update(make_grads(params, seed), state, params)
        params = optax.apply_updates(params, updates)
    assert int(state.total_notfinite) == 1
    assert_close(params, plain()[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_without_skipping_a_bad_gradient_passes_through(bad):
    """The user's own guard must see it: neither a silently dropped step nor zeros in its place."""
    tx, params = SCAPE(skip_nonfinite=False, clip_norm=None), make_params()
    update = jax.jit(tx.update)
    _, state = update(make_grads(params, 0), tx.init(params), params)
    grads = make_grads(params, 1)
    grads["layer"]["kernel"] = jnp.full_like(grads["layer"]["kernel"], bad)
    updates, state = update(grads, state, params)
    assert int(state.count) == 2 and int(state.stats.skipped) == 0
    assert int(jnp.isnan(updates["layer"]["kernel"]).sum()) == 3 * 16
    assert bool((updates["temp"] != 0).all()) and bool(jnp.isfinite(updates["odd"]).all())
    # What was sent and was bad is in m, what was not sent is in the residual.
    assert not bool(jnp.isfinite(state.h["layer"]["kernel"]).any())
