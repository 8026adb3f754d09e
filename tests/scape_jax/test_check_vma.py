"""SCAPE and the baselines in a user's own shard_map: with check_vma=True as with False, on 4 workers.

check_vma=True proves by types that parameters and replicated state stay equal on all workers; it also sums
gradients of replicated parameters silently, which must not pass for local ones.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import scape_jax
from tests.helpers import assert_bit_equal, make_mesh
from tests.quick_compile import quickest_compile  # noqa: F401
from tests.scape_jax.contract_table import COMMUNICATING, SCAPE, make_params

WORKERS = 4


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    """Quadratic, and another one on each worker: its gradient depends on the batch and on the parameters."""
    return sum(jnp.mean((jnp.sum(x) * jnp.mean(batch) - x) ** 2) for x in jax.tree.leaves(params))


def user_step(tx: Any, params: Any, *, check_vma: bool, local_gradients: bool = True) -> tuple[Any, Any]:
    """(init, step) as a user writes them, with state_specs as the only help."""
    mesh = make_mesh(WORKERS)
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    shapes = jax.eval_shape(
        jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), params
    )
    specs = scape_jax.state_specs(shapes, "data")

    def step(params, state, batch):
        # Without pcast, gradients of replicated parameters arrive summed over the workers.
        at = lax.pcast(params, "data", to="varying") if local_gradients else params
        grads = jax.grad(loss_fn)(at, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    init = jax.jit(mapped(tx.init, in_specs=P(), out_specs=specs))
    return init, jax.jit(mapped(step, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)))


BATCH = np.linspace(-1.0, 2.0, WORKERS, dtype=np.float32)


@pytest.mark.parametrize("name", COMMUNICATING)
def test_types_prove_that_parameters_stay_equal(name):
    """out_specs=P() under check_vma=True is refused where parameters or replicated state could differ."""
    tx, params = COMMUNICATING[name]("data"), make_params()
    init, step = user_step(tx, params, check_vma=True)
    state = jax.eval_shape(init, params)
    new_params, new_state = jax.eval_shape(step, params, state, BATCH)
    assert jax.tree.map(lambda x: x.shape, new_params) == jax.tree.map(lambda x: x.shape, params)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)


@pytest.mark.parametrize("name", ["scape", "scape leaf index stale", "topk adams"])
def test_both_settings_do_the_same(name):
    """Bit for bit over 3 steps: the promise to the type system changes no operation."""
    results, start = [], {"layer": make_params()["layer"]}
    for check_vma in (True, False):
        params = start
        init, step = user_step(COMMUNICATING[name]("data"), params, check_vma=check_vma)
        state = init(params)
        for _ in range(3):
            params, state = step(params, state, BATCH)
        results.append((params, state))
    assert_bit_equal(*results)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), results[0][0], start)
    assert all(jax.tree.leaves(moved))


def test_init_inside_the_same_shard_map():
    """A state made and used in one program starts from zeros that are typed alike on all workers."""
    tx, params = SCAPE(axis_name="data"), make_params()

    def run(params, batch):
        state = tx.init(params)
        grads = jax.grad(loss_fn)(lax.pcast(params, "data", to="varying"), batch)
        updates, _ = tx.update(grads, state, params)
        return optax.apply_updates(params, updates)

    mapped = jax.shard_map(
        run, mesh=make_mesh(WORKERS), in_specs=(P(), P("data")), out_specs=P(), check_vma=True
    )
    jax.eval_shape(mapped, params, BATCH)


@pytest.mark.parametrize("name", ["adams", "adamw", "topk adamw", "scape"])
def test_gradients_summed_by_check_vma_are_refused(name):
    """Adam hides a factor of W in the gradient; an error does not."""
    tx, params = COMMUNICATING[name]("data"), make_params()
    init, step = user_step(tx, params, check_vma=True, local_gradients=False)
    state = jax.eval_shape(init, params)
    with pytest.raises(ValueError, match=r"already summed over 'data'.*jax\.lax\.pcast.*check_vma=False"):
        jax.eval_shape(step, params, state, BATCH)


def test_one_of_many_summed_gradients_is_refused_too():
    """A user who casts a part of the parameters."""
    tx, params = SCAPE(axis_name="data"), make_params()
    grads = jax.tree.map(jnp.ones_like, params)

    def step(params, grads):
        local = lax.pcast(grads, "data", to="varying")
        return tx.update({**local, "odd": grads["odd"]}, tx.init(params), params)[0]

    mapped = jax.shard_map(step, mesh=make_mesh(WORKERS), in_specs=P(), out_specs=P(), check_vma=True)
    with pytest.raises(ValueError, match="already summed"):
        jax.eval_shape(mapped, params, grads)
