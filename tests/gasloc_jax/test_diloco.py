"""The complete graph is DiLoCo, bit for bit: each worker, every round, against our own composition of optax and a mean.

Both are compiled in the same way, under shard_map with the same layout: in another one XLA may contract other products and
sums to fused multiply-adds, which differ by a rounding.
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

import gasloc_jax as gj
from tests.gasloc_jax.side_by_side import loss_fn, make_batches, make_mesh, make_params, make_round, on_host
from tests.helpers import assert_bit_equal

ROUNDS, STEPS = 6, 3
UNEQUAL = (2, 3, 1)
OUTERS = {
    "nesterov": lambda: optax.sgd(0.7, momentum=0.9, nesterov=True),
    "sgd": lambda: optax.sgd(1.0),
    "adam": lambda: optax.adam(0.05),
}


@functools.cache
def program(num_workers: int, name: str) -> Any:
    """(parameters, inner state, outer state, batches, steps of each worker) -> the first three after a round."""
    inner, outer = optax.adamw(0.02), OUTERS[name]()

    def one_round(params, inner_state, outer_state, batches, num_steps):
        anchor, local, inner_state, outer_state, batches = jax.tree.map(
            lambda x: x[0], (params, params, inner_state, outer_state, batches)
        )

        def step(i, carry):
            local, inner_state = carry
            grads = jax.grad(loss_fn)(local, jax.tree.map(lambda x: x[i], batches))
            updates, inner_state = inner.update(grads, inner_state, local)
            return optax.apply_updates(local, updates), inner_state

        # A traced number of steps: of unrolled ones the compiler would contract other products and sums.
        local, inner_state = lax.fori_loop(0, num_steps[0], step, (local, inner_state))
        delta = jax.tree.map(jnp.subtract, anchor, local)
        if num_workers > 1:
            delta = lax.pmean(delta, "worker")
        updates, outer_state = outer.update(delta, outer_state, anchor)
        new = optax.apply_updates(anchor, updates)
        return jax.tree.map(lambda x: x[None], (new, inner_state, outer_state))

    own, mesh = P("worker"), make_mesh(num_workers)
    return jax.jit(jax.shard_map(one_round, mesh=mesh, in_specs=own, out_specs=own, check_vma=False))


@functools.cache
def diloco_by_hand(num_workers: int, name: str, steps: tuple[int, ...] | None = None) -> list[Any]:
    """Parameters of all workers after each round, from nothing of gasloc_jax; STEPS local steps on each by default."""
    params = jax.tree.map(lambda x: jnp.stack([x] * num_workers), make_params())
    states = jax.vmap(optax.adamw(0.02).init)(params), jax.vmap(OUTERS[name]().init)(params)
    taken, out = np.array(steps or [STEPS] * num_workers, np.int32), []
    for t in range(ROUNDS):
        batches = make_batches(num_workers, STEPS, seed=t)
        params, *states = program(num_workers, name)(params, *states, batches, taken)
        out.append(on_host(params))
    return out


def rounds_of(outer: Any, num_workers: int, steps: tuple[int, ...] | None = None) -> list[Any]:
    round = make_round(outer, num_workers, optax.adamw(0.02))
    state, out = round.init(make_params()), []
    for t in range(ROUNDS):
        state, _ = round(
            state, make_batches(num_workers, STEPS, seed=t), STEPS if steps is None else list(steps)
        )
        out.append(on_host(state.params))
    return out


@pytest.mark.parametrize(("num_workers", "name"), [(w, name) for w in (1, 2, 3, 8) for name in OUTERS])
def test_complete_graph_is_diloco(num_workers, name):
    got = rounds_of(gj.gasloc(OUTERS[name](), gj.complete(), "worker"), num_workers)
    for ours, wanted in zip(got, diloco_by_hand(num_workers, name), strict=True):
        assert_bit_equal(ours, wanted)
    # All workers hold the same bits, and they did move.
    for path, x in got[-1].items():
        assert {x[n].tobytes() for n in range(num_workers)} == {x[0].tobytes()}
        assert (x[0] != make_params()[path]).all()


def test_diloco_is_gasloc_on_the_complete_graph():
    assert_bit_equal(rounds_of(gj.diloco(axis_name="worker"), 3), diloco_by_hand(3, "nesterov"))


def test_unequal_numbers_of_steps():
    """Workers that took 2, 3 and 1 steps: the mean of what they got to, and not the same as with 3 steps on each."""
    got = rounds_of(gj.diloco(axis_name="worker"), 3, UNEQUAL)
    assert_bit_equal(got, diloco_by_hand(3, "nesterov", UNEQUAL))
    assert (got[-1]["embedding"] != diloco_by_hand(3, "nesterov")[-1]["embedding"]).all()


@pytest.mark.parametrize("payload_dtype", [jnp.bfloat16, jnp.int8])
def test_compressed_workers_still_agree_to_the_bit(payload_dtype):
    """What is gathered is one message for all; an owner's own unrounded mean would make it differ from the others."""
    last = rounds_of(gj.diloco(axis_name="worker", payload_dtype=payload_dtype), 3)[-1]
    wanted = diloco_by_hand(3, "nesterov")[-1]
    for path, x in last.items():
        assert {x[n].tobytes() for n in range(3)} == {x[0].tobytes()}
        np.testing.assert_allclose(x, wanted[path], atol=0.02)
        assert (x != wanted[path]).any(), "nothing was compressed"
