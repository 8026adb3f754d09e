"""Workers that come and go between two steps: the mean residual stays, masks go to their new owners, training goes on."""

import jax
import numpy as np
import optax
import pytest

import scape_jax
from pallas_kernels.bits import unpack
from pallas_kernels.resized import resized
from tests.helpers import assert_bit_equal
from tests.quick_compile import quickest_compile  # noqa: F401
from tests.scape_jax.side_by_side import BLOCK, make_batches, make_params, make_step, one_program

SHAPES = {"a": (12, 64), "short": (37, 19), "bias": (70,)}  # each sparse leaf costs a second to compile


def scape(codec="bitmap", **options):
    return one_program(scape_jax.scape(1e-2, 0.1, axis_name="data", block_size=BLOCK, codec=codec, **options))


def trained(tx, num_workers, steps=4):
    step = make_step(tx, num_workers)
    params = step.place(make_params(shapes=SHAPES))
    state = step.init(params)
    for batch in make_batches(8, steps, shapes=SHAPES):
        params, state, _ = step(params, state, batch)
    return jax.device_get((params, state))


def go_on(tx, num_workers, params, state, steps=2, seed=9):
    """The losses and the parameters after more steps on `num_workers`."""
    step = make_step(tx, num_workers)
    like = step.init(step.place(params))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), like) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    params, state = (
        step.place(params),
        jax.tree.map(lambda x, new: jax.device_put(x, new.sharding), state, like),
    )
    losses = []
    for batch in make_batches(12, steps, seed, SHAPES):
        params, state, metrics = step(params, state, batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(params), jax.device_get(state)


def scape_state(state):
    (found,) = [x for x in jax.tree.leaves(state, is_leaf=is_scape) if is_scape(x)]
    return found


def is_scape(x):
    return isinstance(x, scape_jax.ScaleByScapeState)


def residuals(state):
    """Leaf -> float64 (W, entries), zero on the mask; and the moments on it."""
    found = {}
    for name, h in scape_state(state).h.items():
        mask = scape_state(state).mask[name]
        flat = np.asarray(h, np.float64).reshape(len(h), -1)
        on = np.ones(flat.shape[1], bool) if mask is None else np.asarray(unpack(mask, flat.shape[1]))
        found[name] = np.where(on, 0, flat), np.where(on, flat, 0)
    return found


def bits(state):
    """Leaf -> bool (entries,): the next mask of all owners."""
    found = {}
    for name, own in scape_state(state).next_mask.items():
        if own is not None:
            size = scape_state(state).h[name][0].size
            found[name] = np.asarray(unpack(np.asarray(own).reshape(-1), size))
    return found


@pytest.mark.parametrize(
    ("before", "after", "codec"), [(4, 2, "index"), (2, 4, "bitmap"), (4, 3, "index"), (1, 2, "bitmap")]
)
def test_nothing_that_waits_is_lost(before, after, codec):
    tx = scape(codec)
    params, state = trained(tx, before)
    new = jax.device_get(scape_jax.resize_workers(state, after, block_size=BLOCK))
    for name, (old_e, old_m) in residuals(state).items():
        new_e, new_m = residuals(new)[name]
        assert new_e.shape[0] == after
        scale = np.abs(old_e).max()
        np.testing.assert_allclose(new_e.mean(0), old_e.mean(0), rtol=0, atol=1e-6 * scale)
        assert (new_m == old_m[:1]).all()  # the first moment is the same for all
        stay = min(before, after)
        if after >= before:
            np.testing.assert_array_equal(new_e[:stay], old_e[:stay])
    old_bits, new_bits = bits(state), bits(new)
    assert {name: x.tolist() for name, x in old_bits.items()} == {
        name: x.tolist() for name, x in new_bits.items()
    }
    losses, *_ = go_on(tx, after, params, new)
    assert np.isfinite(losses).all()


def test_as_many_workers_change_nothing():
    _, state = trained(scape(), 4)
    assert_bit_equal(jax.device_get(scape_jax.resize_workers(state, 4, block_size=BLOCK)), state)


def test_the_next_exchange_sends_what_it_would_have_sent():
    """On the same data the mean of gradient and residual is the same on 4 workers and on 2, and so is the step."""
    tx = scape()
    params, state = trained(tx, 4)
    _, on_four, _ = go_on(tx, 4, params, state, steps=1)
    new = jax.device_get(scape_jax.resize_workers(state, 2, block_size=BLOCK))
    _, on_two, _ = go_on(tx, 2, params, new, steps=1)
    dropped = scape_state(new)._replace(
        h=jax.tree.map(
            lambda h, e: h - e.reshape(h.shape).astype(h.dtype),
            scape_state(new).h,
            {n: e for n, (e, _) in residuals(new).items()},
        )
    )
    lost = jax.tree.map(lambda x: dropped if is_scape(x) else x, new, is_leaf=is_scape)
    _, without, _ = go_on(tx, 2, params, lost, steps=1)
    for name, x in on_four.items():
        np.testing.assert_allclose(on_two[name], x, rtol=1e-5, atol=1e-6)
    assert any(not np.allclose(without[name], x, rtol=1e-5, atol=1e-6) for name, x in on_four.items())


def test_other_states_and_any_nesting():
    tx = optax.chain(scape_jax.topk_gradients(0.1, axis_name="data", block_size=BLOCK), optax.trace(0.9))
    _, state = trained(tx, 4)
    new = jax.device_get(scape_jax.resize_workers(state, 3))
    for before, after in zip(
        jax.tree.leaves(state[0].residual), jax.tree.leaves(new[0].residual), strict=True
    ):
        assert after.shape[0] == 3
        np.testing.assert_allclose(after.mean(0), before.mean(0), rtol=0, atol=1e-6 * np.abs(before).max())
    assert_bit_equal(new[1], state[1])
    dense = scape_jax.adams(1e-3, axis_name="data")
    _, state = trained(dense, 2, steps=1)
    assert_bit_equal(jax.device_get(scape_jax.resize_workers(state, 4)), state)


def test_bad_numbers():
    with pytest.raises(ValueError, match="num_workers must be"):
        scape_jax.resize_workers((), 0)
    with pytest.raises(ValueError, match="selection must be"):
        scape_jax.resize_workers((), 2, selection="row")
    tx = scape(selection="leaf")
    _, state = trained(tx, 2, steps=1)
    with pytest.raises(ValueError, match="as many as before, 2, with selection='leaf', got 4"):
        scape_jax.resize_workers(state, 4, block_size=BLOCK, selection="leaf")
    assert_bit_equal(
        jax.device_get(scape_jax.resize_workers(state, 2, block_size=BLOCK, selection="leaf")), state
    )


@pytest.mark.parametrize("after", [1, 2, 3, 4, 7])
def test_the_mean_of_numbers(after):
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    found = np.asarray(resized(x, after))
    assert found.shape == (after, 5)
    np.testing.assert_allclose(found.mean(0), x.mean(0), rtol=0, atol=3e-7)
