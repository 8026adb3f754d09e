"""Validation loss: each held-out token counted once, whatever the batches and the workers."""

import math

import jax
import numpy as np
import pytest

import models
from tests import helpers
from tests.training.runs_for_tests import write_corpus
from training.data import eval_batches
from training.evaluate import Evaluation, evaluate, place
from training.mesh import AXIS_NAME
from training.token_file import open_tokens

MODEL = models.preset("tiny")
LENGTH = 16


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return open_tokens(write_corpus(tmp_path_factory.mktemp("corpus"), tokens=5000) / "validation.tokens")


@pytest.fixture(scope="module")
def params():
    return models.init_params(MODEL, 0)


def loss_of(held_out, params, workers, global_batch, **options):
    batches = eval_batches(held_out, global_batch, LENGTH, num_workers=workers, **options)
    return evaluate(MODEL, params, batches, helpers.make_mesh(workers), AXIS_NAME)


def test_every_token_but_the_first_counts_once(held_out, params):
    """Against one window after the other, with the tail of 500 - 31 * 16 tokens as a window of its own."""
    tokens = held_out.read_windows(np.zeros(1, np.int64), len(held_out))[0]
    apply, total = jax.jit(models.apply, static_argnums=0), 0.0
    for first in range(0, len(tokens) - 1, LENGTH):
        window = tokens[None, first : first + LENGTH + 1]
        logits = apply(MODEL, params, window[:, :-1])
        total += float(models.token_losses(logits, window[:, 1:]).sum())
    found = loss_of(held_out, params, workers=4, global_batch=8)
    assert found.tokens == len(tokens) - 1 == 499
    np.testing.assert_allclose(found.loss, total / 499, rtol=1e-5)


@pytest.mark.parametrize(("workers", "global_batch"), [(1, 3), (2, 32), (8, 16)])
def test_batches_and_workers_do_not_matter(held_out, params, workers, global_batch):
    whole = loss_of(held_out, params, workers=4, global_batch=8)
    found = loss_of(held_out, params, workers=workers, global_batch=global_batch)
    assert found.tokens == whole.tokens
    np.testing.assert_allclose(found.loss, whole.loss, rtol=1e-5)


def test_rows_are_dealt_to_the_workers():
    mesh = helpers.make_mesh(4)
    placed = place({"tokens": np.arange(8).reshape(8, 1)}, mesh, AXIS_NAME)["tokens"]
    assert [s.data.ravel().tolist() for s in placed.addressable_shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_stop_leaves_no_half_result(held_out, params):
    answers = iter([False, False, True])
    batches = eval_batches(held_out, 4, LENGTH, num_workers=2)
    mesh = helpers.make_mesh(2)
    assert evaluate(MODEL, params, batches, mesh, AXIS_NAME, should_stop=lambda: next(answers)) is None


def test_derived_figures():
    found = Evaluation(loss=math.log(2) * 3, tokens=10)
    assert found.bits_per_token == pytest.approx(3)
    assert found.perplexity == pytest.approx(8)
    assert Evaluation(loss=1e6, tokens=1).perplexity == math.inf
    assert math.isnan(Evaluation(loss=math.nan, tokens=1).bits_per_token)


def test_uniform_model_has_the_entropy_of_the_vocabulary(held_out, params):
    zeros = jax.tree.map(lambda x: x * 0, params)
    assert loss_of(held_out, zeros, workers=2, global_batch=8).loss == pytest.approx(math.log(61), rel=1e-6)
