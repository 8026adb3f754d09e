"""Rotary frequencies, plain and with Llama-3 scaling, against published numbers (case 27) and invariants."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import models
from models._layers import rotary_tables, rotate
from tests.helpers import assert_close
from tests.models import reference_numpy as reference

LLAMA3 = models.RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)


def test_llama3_scaling_has_the_published_frequencies():
    plain = models.rotary_frequencies(64, 500000.0)
    scaled = models.rotary_frequencies(64, 500000.0, LLAMA3)
    ratio = plain / scaled
    assert plain.shape == (32,) and plain[0] == 1.0
    assert np.sum(ratio == 1.0) == 15 and np.all(ratio[:15] == 1.0)
    assert np.sum(np.isclose(ratio, 8.0, rtol=1e-12)) == 14 and np.allclose(ratio[18:], 8.0, rtol=1e-12)
    np.testing.assert_allclose(plain[[15, 31]], [2.1311e-3, 3.0139e-6], rtol=5e-5)
    np.testing.assert_allclose(scaled[[15, 31]], [1.3719e-3, 3.7673e-7], rtol=5e-5)


def test_scaling_equals_the_three_cases_written_out():
    got = models.rotary_frequencies(64, 500000.0, LLAMA3)
    want = [reference.llama_frequency(i, 64, 500000.0, LLAMA3) for i in range(32)]
    np.testing.assert_allclose(got, want, rtol=1e-13)


def test_scaling_reaches_the_logits():
    """The setting is not dropped on the way to the tables."""
    config = models.preset("tiny")
    scaled = dataclasses.replace(config, rope_scaling=models.RopeScaling(original_length=8))
    for plain_table, scaled_table in zip(rotary_tables(config, 8), rotary_tables(scaled, 8), strict=True):
        assert np.max(np.abs(plain_table - scaled_table)) > 0.1


def test_rotation_depends_on_distance_only_and_keeps_length():
    config = dataclasses.replace(models.preset("tiny"), max_length=64)
    rng = np.random.default_rng(0)
    q, k = (
        np.broadcast_to(rng.normal(size=(1, 1, 1, 8)), (1, 64, 1, 8)).astype(np.float32) for _ in range(2)
    )
    tables = rotary_tables(config, 64)
    q_rot, k_rot = rotate(jnp.asarray(q), tables), rotate(jnp.asarray(k), tables)
    scores = np.einsum("blhe,bshe->ls", q_rot, k_rot)
    for distance in (0, 1, 9):
        diagonal = np.diagonal(scores, -distance)
        assert_close(diagonal, np.full_like(diagonal, diagonal[0]), "model")
    assert_close(np.linalg.norm(q_rot, axis=-1), np.linalg.norm(q, axis=-1), "f32", terms=8)
    assert np.ptp(scores) > 0.1
