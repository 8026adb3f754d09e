"""One contract for every optimizer here, after optax's `contrib/_common_test.py`; one worker, no collective.

Each row of the table is compiled once (`run`); the tests look at what came out of three steps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import scape_jax
from tests.helpers import assert_bit_equal, assert_close
from tests.quick_compile import quickest_compile  # noqa: F401
from tests.scape_jax.contract_table import (
    NEEDS_PARAMS,
    TABLE,
    Run,
    avals,
    make_grads,
    make_params,
    three_steps,
)

every_optimizer = pytest.mark.parametrize("name", TABLE)


@functools.cache
def run(name: str) -> Run:
    return three_steps(TABLE[name](None))


@every_optimizer
def test_takes_unknown_extra_arguments_and_traces_once(name):
    assert run(name).num_traces == 1


@every_optimizer
def test_state_types_never_change(name):
    """Shapes, dtypes and weak types (all False) of the state stay: else the second step recompiles."""
    first, *others = run(name).states
    assert not any(weak for *_, weak in avals(first))
    for state in others:
        assert jax.tree.structure(state) == jax.tree.structure(first)
        assert avals(state) == avals(first)


@every_optimizer
def test_state_stays_where_it_is(name):
    first, *others = run(name).states
    for state in others:
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(state), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim) and a.committed == b.committed


@every_optimizer
def test_state_is_arrays_only(name):
    for state in run(name).states:
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))


@every_optimizer
def test_every_buffer_can_be_donated(name):
    assert run(name).old_state_deleted


@every_optimizer
def test_states_are_equal_on_init_under_jit_and_outside(name):
    params = make_params()
    assert_bit_equal(TABLE[name](None).init(params), run(name).states[0])


@every_optimizer
def test_updates_are_like_the_parameters(name):
    r = run(name)
    for updates, params in zip(r.updates, r.params, strict=False):
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert avals(updates) == avals(params)
        assert all(bool(jnp.isfinite(u).all()) for u in jax.tree.leaves(updates))


@every_optimizer
def test_bfloat16_parameters_get_bfloat16_updates_and_a_float32_state(name):
    tx, params = TABLE[name](None), make_params(jnp.bfloat16)
    state = jax.eval_shape(tx.init, params)
    updates, new_state = jax.eval_shape(tx.update, params, state, params)
    assert avals(updates) == avals(params)
    assert avals(new_state) == avals(state)
    if "adamw" not in name:  # optax's own moments follow the parameters
        assert avals(state) == avals(run(name).states[0])


@pytest.mark.parametrize("name", ["adams", "scape"])
def test_bfloat16_parameters_take_the_same_step(name):
    tx, params, grads = TABLE[name](None), make_params(jnp.bfloat16), make_grads(make_params(jnp.bfloat16), 0)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    widened = jax.tree.map(lambda u: u.astype(jnp.float32), updates)
    assert_close(widened, run(name).updates[0], "bf16", terms=4)  # the gradient is rounded too


@every_optimizer
def test_every_entry_moves_in_the_first_step(name):
    """Step 1 exchanges everything but in top-k: no leaf is left out, nor a short last row, nor the scalar."""
    for update in jax.tree.leaves(run(name).updates[0]):
        sparse = name.startswith("topk") and update.size >= 64
        assert int((update != 0).sum()) == (round(0.25 * update.size) if sparse else update.size)


@every_optimizer
def test_runs_in_a_conditional(name):
    """lax.cond compares the types of both branches, weak types too."""
    tx, params = TABLE[name](None), make_params()

    def step(params, state, take):
        return jax.lax.cond(take, lambda: tx.update(params, state, params), lambda: (params, state))

    state = tx.init(params)
    _, after = jax.eval_shape(step, params, state, True)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@every_optimizer
def test_params_may_be_left_out_without_weight_decay(name):
    tx, params = TABLE[name](None), make_params()
    update = functools.partial(jax.eval_shape, tx.update, params, tx.init(params))
    if name in NEEDS_PARAMS:
        with pytest.raises(ValueError, match="params"):
            update()
    else:
        assert avals(update()[0]) == avals(params)


@every_optimizer
def test_optax_tree_utilities(name):
    tx, params = TABLE[name](None), make_params()
    state = run(name).states[-1]
    # map_params finds what is like the parameters; an identity must give the state back.
    assert_bit_equal(optax.tree.map_params(tx, lambda x: x, state), state)
    if name.startswith(("scape", "scale_by_scape")):
        assert int(optax.tree.get(state, "skipped")) == 0
        changed = optax.tree.set(state, skipped=jnp.int32(7))
        assert int(optax.tree.get(changed, "skipped")) == 7
        h = optax.tree.get(state, "h")
        assert jax.tree.map(lambda x, p: x.shape[1:] == p.shape, h, params) == jax.tree.map(
            lambda _: True, params
        )


@every_optimizer
def test_specs_of_a_nested_state_match_its_structure(name):
    """Through chain, masked, partition and MultiSteps: the same tree, per-worker fields sharded."""
    tx, params = TABLE[name](None), make_params()
    nested = optax.chain(
        optax.masked(tx, {"layer": True, "odd": False, "temp": True}),
        optax.MultiSteps(optax.apply_if_finite(tx, 3), 2).gradient_transformation(),
        optax.partition(
            {"a": tx, "b": optax.sgd(0.1, momentum=0.9)}, {"layer": "a", "odd": "b", "temp": "a"}
        ),
    )
    for transformation in (tx, nested):
        state = jax.eval_shape(transformation.init, params)
        specs = scape_jax.state_specs(state, "data")
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        assert jax.tree.structure(specs, is_leaf=is_spec) == jax.tree.structure(state)
        found = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]
        paths = [jax.tree_util.keystr(k) for k, spec in found if spec == PartitionSpec("data")]
        assert all(any(f".{f}" in p for f in ("h", "next_mask", "residual")) for p in paths)
        wanted = {"scape": 4, "scale_by_scape": 4, "topk": 1}
        kind = next((k for k in wanted if name.startswith(k)), None)
        assert bool(paths) == (kind is not None)


@pytest.mark.parametrize("name", ["adams", "scape", "topk adams"])
def test_chain_changes_nothing(name):
    """Alone, or between stateless neighbours in a chain: the same updates, bit for bit."""
    params, r = make_params(), run(name)
    tx = optax.chain(optax.identity(), TABLE[name](None), optax.scale(-2.0))
    updates, state = jax.jit(tx.update)(make_grads(params, 0), tx.init(params), params)
    assert_bit_equal(updates, jax.tree.map(lambda u: -2.0 * u, r.updates[0]))
    assert_bit_equal(state[1], r.states[1])


@pytest.mark.parametrize("name", ["scale_by_adams", "adams", "scape leaf index stale", "topk adams"])
def test_update_under_vmap(name):
    """Two independent runs at once, as in a sweep over seeds, equal one run each."""
    tx, params = TABLE[name](None), make_params()
    grads = [make_grads(params, seed) for seed in range(2)]
    state = tx.init(params)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    updates, _ = jax.jit(jax.vmap(lambda g: tx.update(g, state, params)))(stacked)
    assert_close(jax.tree.map(lambda u: u[0], updates), run(name).updates[0])
    assert np.isfinite(np.asarray(updates["odd"][1])).all()
