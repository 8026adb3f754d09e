"""Token ids outside the vocabulary are named with their position before anything compiles."""

import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.models.random_models import random_params


def test_good_tokens_come_back():
    tokens = np.array([[0, 256], [3, 4]], np.uint16)
    assert models.check_tokens(tokens, 257) is tokens
    assert models.check_tokens(np.zeros((0, 4), np.int32), 5).shape == (0, 4)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([1, 2, 257, 900]), r"in \[0, 257\), got id 257 at position 2"),
        (np.array([[1, 2], [3, -1]]), r"got id -1 at position \(1, 1\).*vocabulary of 257"),
        (np.array([70000], np.uint32), "got id 70000 at position 0"),
        (np.array([1.0]), "must be integers, got float64"),
    ],
)
def test_bad_tokens(tokens, message):
    with pytest.raises(ValueError, match=message):
        models.check_tokens(tokens, 257)


def test_an_unchecked_id_makes_the_loss_nan():
    """Not clipped to some other token: a run that skipped the check must not look healthy."""
    config = models.preset("tiny")
    params = random_params(config)
    tokens = jnp.full((1, 5), config.vocab_size, jnp.int32)
    assert np.isnan(models.loss_fn(config)(params, {"tokens": tokens}))
