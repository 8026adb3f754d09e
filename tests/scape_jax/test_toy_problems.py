"""Every optimizer minimises four toy problems, as in optax's common tests: it must find the minimum, not only run.

The four lie side by side in one tree and one loss, so that an optimizer is compiled once: a quadratic, Rosenbrock's
valley, a matrix factorisation whose factors are large enough to be sparse, and a logistic regression.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import scape_jax
from tests.quick_compile import quickest_compile  # noqa: F401

STEPS = 1500
RATE = optax.cosine_decay_schedule(0.05, STEPS)

# Blocks of 32: the factors have 4 rows each, of which 8 entries a row travel at density 0.25.
OPTIMIZERS = {
    "scale_by_adams": lambda: optax.chain(scape_jax.scale_by_adams(), optax.scale_by_learning_rate(RATE)),
    "adams": lambda: scape_jax.adams(RATE, clip_norm=None),
    "adams none": lambda: scape_jax.adams(RATE, clip_norm=None, bias_correction="none"),
    "adamw": lambda: scape_jax.adamw(RATE, clip_norm=None),
    "topk adamw": lambda: scape_jax.topk(RATE, 0.25, block_size=32, clip_norm=None),
    "topk adams": lambda: scape_jax.topk(RATE, 0.25, block_size=32, clip_norm=None, optimizer="adams"),
    "scape": lambda: scape_jax.scape(RATE, 0.25, block_size=32, clip_norm=None),
    "scape clipped": lambda: scape_jax.scape(RATE, 0.25, block_size=32, clip_norm=10.0),
    "scape leaf stale": lambda: scape_jax.scape(
        RATE, 0.25, block_size=32, clip_norm=None, selection="leaf", staleness_power=1.0, mask_every=2
    ),
}


def initial_params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return {
        "quadratic": jnp.array([-1.0, 10.0, 1.0]),
        "rosenbrock": jnp.zeros(2),
        "factors": {"left": normal(32, 4), "right": normal(4, 32)},
        "logistic": {"weight": jnp.zeros((4, 3)), "bias": jnp.zeros(3)},
    }


def problems() -> Any:
    """params -> dict of the four losses, all with minimum value 0 but the logistic one's."""
    rng = np.random.default_rng(1)
    product = jnp.asarray(rng.standard_normal((32, 4)) @ rng.standard_normal((4, 32)), jnp.float32)
    points = jnp.asarray(rng.standard_normal((64, 4)), jnp.float32)
    # Labels from noisy scores: the classes overlap, so that a finite minimum exists.
    noisy = points @ jnp.asarray(rng.standard_normal((4, 3)), jnp.float32) + rng.gumbel(size=(64, 3))
    labels = jnp.argmax(noisy, axis=1)

    def losses(params: Any) -> dict[str, jax.Array]:
        x, y = params["rosenbrock"]
        logits = points @ params["logistic"]["weight"] + params["logistic"]["bias"][None, :]
        return {
            "quadratic": jnp.sum((params["quadratic"] - jnp.array([1.0, -1.0, 1.0])) ** 2),
            "rosenbrock": (1.0 - x) ** 2 + 100.0 * (y - x**2) ** 2,
            "factors": jnp.mean((params["factors"]["left"] @ params["factors"]["right"] - product) ** 2),
            "logistic": optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(),
        }

    return losses


def logistic_minimum(losses: Any) -> float:
    """By Newton's method in float32: an independent way to the same minimum."""
    flat, unflatten = ravel_pytree(initial_params()["logistic"])
    f = lambda v: losses({**initial_params(), "logistic": unflatten(v)})["logistic"]  # noqa: E731
    # The logits' common shift has no curvature: a small ridge makes the system solvable.
    newton = jax.jit(
        lambda v: v - jnp.linalg.solve(jax.hessian(f)(v) + 1e-4 * jnp.eye(v.size), jax.grad(f)(v))
    )
    for _ in range(20):
        flat = newton(flat)
    return float(f(flat))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_finds_the_minimum(name):
    tx, losses = OPTIMIZERS[name](), problems()

    @jax.jit
    def minimise(params):
        def step(carry, _):
            params, state = carry
            grads = jax.grad(lambda p: sum(losses(p).values()))(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), length=STEPS)
        return params, losses(params), state

    params, final, state = minimise(initial_params())
    assert float(final["quadratic"]) < 1e-3
    assert float(final["rosenbrock"]) < 1e-2
    np.testing.assert_allclose(params["rosenbrock"], [1.0, 1.0], atol=0.1)
    assert float(final["factors"]) < 1e-2
    assert float(final["logistic"]) < logistic_minimum(losses) + 1e-3
    if name.startswith("scape"):
        figures = scape_jax.telemetry(state)
        assert float(figures["density"]) < 0.35, "the factors were not sparse: this would test AdamS"
