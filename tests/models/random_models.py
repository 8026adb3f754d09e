"""Random parameters and tokens from NumPy: nothing compiles, and no zeros or ones hide a mistake."""

import jax
import jax.numpy as jnp
import numpy as np

import models


def random_params(config, seed=0, std=0.3):
    """Normal values in every leaf, biases and norms too: initial values would hide a missing bias."""
    leaves, tree = jax.tree.flatten(models.abstract_params(config))
    rng = np.random.default_rng(seed)
    return tree.unflatten([jnp.asarray(rng.normal(0, std, leaf.shape), leaf.dtype) for leaf in leaves])


def random_tokens(config, batch=2, length=12, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, config.vocab_size, (batch, length), dtype=np.int32))
