"""The inner step of a worker: gradients of several micro-batches are averaged before the optimizer sees them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gasloc_jax as gj
import scape_jax
from tests.helpers import assert_close
from tests.quick_compile import quickest_compile  # noqa: F401


def in_parts(count):
    return lambda loss_fn: functools.partial(scape_jax.loss_and_grads, loss_fn, accumulate=count)


def linear(params, batch):
    """Mean over rows of <params, row>: the gradient of a batch is its mean row."""
    return jnp.mean(batch @ params["w"])


def test_two_micro_batches_are_the_whole_batch():
    params, batch = {"w": jnp.array([1.0, -2.0, 0.5])}, jax.random.normal(jax.random.key(0), (6, 3))
    ends = []
    for count in (1, 2):
        step = gj.make_local_step(linear, optax.adamw(0.1), value_and_grad=in_parts(count))
        ends.append(jax.jit(step.step)(params, step.init(params), batch))
    assert_close(ends[1], ends[0], terms=6)
    assert_close(
        ends[0], jax.jit(gj.make_local_step(linear, optax.adamw(0.1)).step)(params, step.init(params), batch)
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([[2.0, 0.0], [0.0, 2.0]], [-np.sqrt(0.5), -np.sqrt(0.5)]), ([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0])],
)
def test_clipping_is_of_the_mean(rows, expected):
    """Case 6: [0.707, 0.707], not [0.5, 0.5] of parts clipped one by one, nor [0.447, 0.894] of a clipped running sum."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    step = gj.make_local_step(linear, tx, value_and_grad=in_parts(2))
    params = {"w": jnp.zeros(2)}
    params, _, _ = jax.jit(step.step)(params, step.init(params), jnp.array(rows))
    assert_close(params["w"], np.array(expected, np.float32))
