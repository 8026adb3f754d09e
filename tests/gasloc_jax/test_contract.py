"""One contract for every outer optimizer here, after optax's `contrib/_common_test.py`; one worker, no collective.

Each row of the table is compiled once (`run`); the tests look at what came out of three steps. The pseudo-gradients are
random: to optax they are gradients.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gasloc_jax as gj
from tests.gasloc_jax.side_by_side import make_mesh
from tests.helpers import assert_bit_equal, assert_close
from tests.quick_compile import quickest_compile  # noqa: F401
from tests.scape_jax.contract_table import Run, avals, make_grads, make_params, three_steps

# name -> (axis_name -> transformation)
TABLE = {
    "gasloc": lambda axis: gj.gasloc(axis_name=axis),
    "gasloc adam": lambda axis: gj.gasloc(optax.adam(0.1), gj.ring(), axis),
    "gasloc int8": lambda axis: gj.gasloc(optax.sgd(0.1), axis_name=axis, payload_dtype=jnp.int8),
    "mixed": lambda axis: gj.nesterov_gossip(topology=gj.random_ring(), axis_name=axis),
    "local": lambda axis: gj.nesterov_gossip(momentum="local", axis_name=axis),
    "diloco": lambda axis: gj.diloco(axis_name=axis),
    "diloco bf16": lambda axis: gj.diloco(axis_name=axis, payload_dtype=jnp.bfloat16),
    "local_sgd": lambda axis: gj.local_sgd(axis),
    "dadam": lambda axis: gj.dadam(axis_name=axis),
    "local_dadam": lambda axis: gj.local_dadam(gj.exponential(), axis),
    "noloco": lambda axis: gj.noloco(axis_name=axis),
}
every_optimizer = pytest.mark.parametrize("name", TABLE)


@functools.cache
def run(name: str) -> Run:
    return three_steps(TABLE[name](None))


@every_optimizer
def test_takes_unknown_extra_arguments_and_traces_once(name):
    assert run(name).num_traces == 1


@every_optimizer
def test_state_is_arrays_whose_types_and_places_never_change(name):
    """Shapes, dtypes and weak types (all False) of the state stay: else the second round recompiles."""
    first, *others = run(name).states
    assert not any(weak for *_, weak in avals(first))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(first))
    for state in others:
        assert jax.tree.structure(state) == jax.tree.structure(first)
        assert avals(state) == avals(first)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(state), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim) and a.committed == b.committed


@every_optimizer
def test_every_buffer_can_be_donated(name):
    assert run(name).old_state_deleted


@every_optimizer
def test_states_are_equal_on_init_under_jit_and_outside(name):
    assert_bit_equal(TABLE[name](None).init(make_params()), run(name).states[0])


@every_optimizer
def test_updates_are_like_the_parameters(name):
    r = run(name)
    for updates, params in zip(r.updates, r.params, strict=False):
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert avals(updates) == avals(params)
        assert all(bool(jnp.isfinite(u).all() & (u != 0).all()) for u in jax.tree.leaves(updates))


@every_optimizer
def test_bfloat16_parameters_get_bfloat16_updates(name):
    tx, params = TABLE[name](None), make_params(jnp.bfloat16)
    state = jax.eval_shape(tx.init, params)
    updates, new_state = jax.eval_shape(tx.update, params, state, params)
    assert avals(updates) == avals(params)
    assert avals(new_state) == avals(state)


@every_optimizer
def test_runs_in_a_conditional_and_under_vmap(name):
    """lax.cond compares the types of both branches, weak types too; vmap is two runs at once."""
    tx, params = TABLE[name](None), make_params()
    state = tx.init(params)
    cond = lambda take: jax.lax.cond(take, lambda: tx.update(params, state, params), lambda: (params, state))  # noqa: E731
    assert jax.tree.structure(jax.eval_shape(cond, True)[1]) == jax.tree.structure(state)
    grads = [make_grads(params, seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    updates, _ = jax.jit(jax.vmap(lambda g: tx.update(g, state, params)))(stacked)
    assert_close(jax.tree.map(lambda u: u[0], updates), run(name).updates[0])


@every_optimizer
def test_optax_tree_utilities(name):
    tx, state = TABLE[name](None), run(name).states[-1]
    # map_params finds what is like the parameters; an identity must give the state back.
    assert_bit_equal(optax.tree.map_params(tx, lambda x: x, state), state)
    assert int(optax.tree.get(state, "round")) == 3
    assert int(optax.tree.get(state, "skipped")) == 0
    assert int(optax.tree.get(optax.tree.set(state, skipped=jnp.int32(7)), "skipped")) == 7


@every_optimizer
def test_composes(name):
    """chain, masked, partition, MultiSteps and apply_if_finite hand over params and keep a state of arrays."""
    tx, params = TABLE[name](None), make_params()
    nested = optax.chain(
        optax.masked(tx, {"layer": True, "odd": False, "temp": True}),
        optax.MultiSteps(optax.apply_if_finite(tx, 3), 2).gradient_transformation(),
        optax.partition(
            {"a": tx, "b": optax.sgd(0.1, momentum=0.9)}, {"layer": "a", "odd": "b", "temp": "a"}
        ),
    )
    state = jax.eval_shape(nested.init, params)
    updates, new_state = jax.eval_shape(nested.update, params, state, params)
    assert avals(updates) == avals(params)
    assert avals(new_state) == avals(state)
    alone = optax.chain(optax.identity(), tx, optax.scale(-2.0))
    updates, state = jax.jit(alone.update)(make_grads(params, 0), alone.init(params), params)
    assert_close(updates, jax.tree.map(lambda u: -2.0 * u, run(name).updates[0]))


@pytest.mark.parametrize("name", ["gasloc", "local", "noloco"])
def test_a_non_finite_pseudo_gradient_is_as_none(name):
    """Used alone, without a round: zero instead, counted, and every buffer of the state stays finite."""
    tx, params = TABLE[name](None), make_params()
    update, state = jax.jit(tx.update), run(name).states[1]
    bad = make_grads(params, 1)
    bad["odd"] = bad["odd"].at[2, 3].set(jnp.nan)
    updates, after = update(bad, state, params)
    wanted, after_zero = update(jax.tree.map(jnp.zeros_like, params), state, params)
    assert_bit_equal(updates, wanted)
    assert int(after.skipped) == 1
    assert_bit_equal(after._replace(skipped=after_zero.skipped), after_zero)


@pytest.mark.parametrize("name", TABLE)
def test_state_under_shard_map_with_types_followed(name):
    """check_vma=True: collectives, switch and tables type-check in a user's own shard_map."""
    tx, params, own = TABLE[name]("worker"), make_params(), P("worker")

    def step(params):
        params = jax.tree.map(lambda x: x[0], params)
        updates, _ = tx.update(params, tx.init(params), params)
        return jax.tree.map(lambda x: x[None], updates)

    mapped = jax.shard_map(step, mesh=make_mesh(4), in_specs=own, out_specs=own, check_vma=True)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 4), params)
    assert avals(jax.eval_shape(mapped, stacked)) == avals(stacked)


@pytest.mark.parametrize("factory", [gj.diloco, gj.noloco, gj.nesterov_gossip])
def test_inject_hyperparams(factory):
    """The rate is in the state, a schedule of it counts rounds, and the update is that of the plain factory."""
    params, grads = make_params(), make_grads(make_params(), 0)
    injected = optax.inject_hyperparams(factory, static_args=gj.STATIC_ARGS)
    tx = injected(learning_rate=lambda count: jnp.where(count == 0, 0.0, 0.5), payload_dtype=jnp.float32)
    state = tx.init(params)
    first, state = jax.jit(tx.update)(grads, state, params)
    assert not any(bool(u.any()) for u in jax.tree.leaves(first))
    second, state = jax.jit(tx.update)(grads, state, params)
    assert all(bool(u.all()) for u in jax.tree.leaves(second))
    assert float(state.hyperparams["learning_rate"]) == 0.5
