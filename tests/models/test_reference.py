"""The fast forward pass and loss against the float64 reference, and against central differences.

Catches a wrong norm, activation, rotary pairing, mask, head grouping, scale, residual or label shift.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.helpers import assert_close
from tests.models import reference_numpy as reference
from tests.models.random_models import random_params

TINY = models.LlamaConfig(
    vocab_size=23, max_length=16, n_layers=2, width=24, n_heads=6, n_kv_heads=2, ff_width=40, dtype="float32"
)
SCALED = models.RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=16)
CONFIGS = {
    "gpt": models.GPTConfig(
        vocab_size=23, max_length=16, n_layers=2, width=24, n_heads=3, ff_width=40, dtype="float32"
    ),
    "llama": TINY,
    "llama_tied": dataclasses.replace(TINY, tied_head=True),
    "llama_wide_heads": dataclasses.replace(TINY, head_dim=10, n_kv_heads=3, rope_theta=100.0),
    "llama_scaled": dataclasses.replace(TINY, rope_theta=50.0, head_dim=16, rope_scaling=SCALED),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name):
    config = CONFIGS[name]
    params = random_params(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 16), dtype=np.int32)
    got = jax.jit(models.apply, static_argnums=0)(config, params, jnp.asarray(tokens))
    want = np.stack([reference.logits(config, params, row) for row in tokens])
    assert_close(got, want, "model", dtype=jnp.float32)


@pytest.mark.parametrize(("name", "chunk"), [("gpt", None), ("llama", 6)])
def test_loss_and_weights(name, chunk):
    config = dataclasses.replace(CONFIGS[name], loss_chunk=chunk)
    params = random_params(config)
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, config.vocab_size, (3, 17), dtype=np.int32)
    losses = np.stack([reference.token_losses(config, params, row) for row in tokens])
    loss = jax.jit(models.loss_fn(config))
    assert_close(loss(params, {"tokens": tokens}), losses.mean(), "model", dtype=jnp.float32)
    weighted = jax.jit(jax.value_and_grad(models.loss_fn(config)))
    per_target = rng.uniform(0, 2, losses.shape).astype(np.float32)
    want = (losses * per_target).sum() / per_target.sum()
    got, _ = weighted(params, {"tokens": tokens, "weight": per_target})
    assert_close(got, want, "model", dtype=jnp.float32)
    value, grads = weighted(params, {"tokens": tokens, "weight": np.zeros_like(per_target)})
    assert float(value) == 0.0 and not any(np.any(g) for g in jax.tree.leaves(grads))
    per_row = np.array([1.0, 0.0, 1.0], np.float32)
    total, weight = jax.jit(models.loss_sums_fn(config))(params, {"tokens": tokens, "weight": per_row})
    assert_close(total, losses[[0, 2]].sum(), "model", dtype=jnp.float32)
    assert float(weight) == 32.0


@pytest.mark.parametrize("name", ["gpt", "llama_tied"])
def test_gradient_by_central_differences(name):
    """The directional derivative of the float64 reference loss: catches any gradient lost on the way."""
    config = CONFIGS[name]
    params = random_params(config)
    row = np.random.default_rng(3).integers(0, config.vocab_size, 9, dtype=np.int32)
    grads = jax.jit(jax.grad(models.loss_fn(config)))(params, {"tokens": row[None]})
    along = random_params(config, seed=4)
    want_terms = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:

        def shifted(step, path=path, leaf=leaf):
            return jax.tree_util.tree_map_with_path(
                lambda p, x: np.float64(x) + (step * np.float64(_at(along, p)) if p == path else 0), params
            )

        h = 1e-5
        above, below = (reference.token_losses(config, shifted(s), row).mean() for s in (h, -h))
        want_terms[jax.tree_util.keystr(path)] = (above - below) / (2 * h)
    got_terms = {
        jax.tree_util.keystr(path): np.vdot(np.float64(g), np.float64(_at(along, path)))
        for path, g in jax.tree_util.tree_flatten_with_path(grads)[0]
    }
    for path, want in want_terms.items():
        np.testing.assert_allclose(got_terms[path], want, rtol=2e-4, atol=2e-5, err_msg=path)


def _at(tree, path):
    for key in path:
        tree = tree[key.key]
    return tree


def test_label_is_the_next_token():
    """A model that always predicts its input token has loss 0 on a constant row and a large one otherwise."""
    vocab = 5
    z = 20.0 * jax.nn.one_hot(jnp.array([[1, 2, 3]]), vocab)
    assert_close(models.token_losses(z, jnp.array([[1, 2, 3]])), np.full((1, 3), np.log1p(4 * np.exp(-20.0))),
                 dtype=jnp.float32)  # fmt: skip
    assert np.all(models.token_losses(z, jnp.array([[2, 3, 4]])) > 19)
