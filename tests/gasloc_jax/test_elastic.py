"""Workers that join or leave between two rounds: the mean of the parameters stays, and the run goes on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gasloc_jax as gj
from pallas_kernels.resized import resized
from tests.helpers import assert_bit_equal
from tests.quick_compile import quickest_compile  # noqa: F401

PAYLOADS = {"float32": None, "int8": jnp.int8}


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] - 1.0) ** 2) + jnp.mean(params["v"] ** 2)


def params():
    rng = np.random.default_rng(0)
    return {
        "w": rng.standard_normal((6, 4)).astype(np.float32),
        "v": rng.standard_normal((3,)).astype(np.float32),
    }


def make(workers, payload="float32", topology=None, **options):
    outer = gj.gasloc(
        topology=topology or gj.random_pairs(),
        axis_name="worker",
        payload_dtype=PAYLOADS[payload],
        payload_block_size=32,
    )
    mesh = gj.make_mesh(workers, devices=jax.devices()[:workers])
    return gj.make_round(gj.make_local_step(loss_fn, optax.adamw(1e-2)), outer, mesh, **options)


def trained(run, rounds=3, state=None, seed=1):
    state = run.init(params()) if state is None else state
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        batches = rng.standard_normal((run.num_workers, 2, 5, 6)).astype(np.float32)
        state, metrics = run(state, batches, 2)
    return state, metrics


def means(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64).mean(0), tree)


@pytest.mark.parametrize(
    ("before", "after", "payload"),
    [(4, 2, "float32"), (2, 4, "int8"), (4, 3, "int8"), (3, 4, "float32"), (2, 1, "int8"), (1, 2, "int8")],
)
def test_the_mean_model_stays(before, after, payload):
    old, new = make(before, payload), make(after, payload)
    state, _ = trained(old)
    held = jax.device_get(state)
    found = new.resize(held)
    got = jax.device_get(found)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(
        lambda x: (x.shape, x.dtype), jax.device_get(new.init(params()))
    )
    for name, x in means(held.params).items():
        np.testing.assert_allclose(means(got.params)[name], x, rtol=0, atol=3e-7)
    if after > before:
        for name, x in held.params.items():
            np.testing.assert_array_equal(got.params[name][:before], x)
            np.testing.assert_allclose(
                got.params[name][before:],
                np.broadcast_to(x.mean(0), got.params[name][before:].shape),
                atol=3e-7,
            )
    twins = np.arange(after) % before
    assert_bit_equal(got.inner, jax.tree.map(lambda x: x[twins], held.inner))
    assert got.round.tolist() == [3] * after
    _, metrics = trained(new, 2, found, seed=2)
    assert np.isfinite(np.asarray(metrics["loss"])).all()


def test_what_compression_owes_of_a_mean_is_kept():
    """In the compressed mean of all workers the residual is mass: dropped, the mean model would lose what was trained."""
    old, new = make(4, "int8", gj.complete()), make(2, "int8", gj.complete())
    held = jax.device_get(trained(old)[0])
    got = jax.device_get(new.resize(held))
    for x, y in zip(held.outer.residual, got.outer.residual, strict=True):
        size = min(x.shape[-1], y.shape[-1])
        assert np.abs(x).max() > 0
        np.testing.assert_allclose(
            y.mean(0)[..., :size], x.mean(0)[..., :size], rtol=0, atol=1e-6 * np.abs(x).max()
        )
        assert not x[..., size:].any() and not y[..., size:].any()  # padding


@pytest.mark.parametrize("options", [{"delay": 1}, {"fragments": 2, "stacked": lambda path: path == "w"}])
def test_fragments_and_delays(options):
    old, new = make(4, **options), make(2, **options)
    held = jax.device_get(trained(old)[0])
    got = jax.device_get(new.resize(held))
    for tree, other in ((held.params, got.params), (held.anchor, got.anchor)):
        for name, x in means(tree).items():
            np.testing.assert_allclose(means(other)[name], x, rtol=0, atol=3e-7)
    _, metrics = trained(new, 3, new.resize(held), seed=2)
    assert np.isfinite(np.asarray(metrics["loss"])).all()


def test_as_many_workers_change_nothing():
    run = make(4, "int8")
    held = jax.device_get(trained(run)[0])
    assert_bit_equal(jax.device_get(run.resize(held)), held)


def test_a_round_must_be_whole():
    run = make(2, delay=1)
    state = run.exchange(run.init(params()))
    with pytest.raises(ValueError, match="between two rounds, got one between their halves"):
        make(4, delay=1).resize(state)


@pytest.mark.parametrize("after", [1, 2, 3, 4, 7])
def test_the_mean_of_numbers(after):
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    found = np.asarray(resized(jnp.asarray(x), after))
    assert found.shape == (after, 5)
    np.testing.assert_allclose(found.mean(0), x.mean(0), rtol=0, atol=3e-7)
    assert resized(jnp.asarray(x, jnp.bfloat16), after).dtype == jnp.bfloat16
