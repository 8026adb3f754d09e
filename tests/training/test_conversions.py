"""A new run from the parameters of another method's: those are the saved ones, bit for bit, and all else is fresh.

Each source has parameters of its own seed, and in every buffer something that a fresh state has not.
"""

import dataclasses

import jax
import numpy as np
import pytest

from tests import helpers
from tests.training.runs_for_tests import tiny, write_corpus
from tests.training.test_resume_matrix import ROUNDS, SCAPE, advance, three_leaves
from training import config as settings
from training import runs
from training._leaves import by_path
from training.checkpoint import Checkpoints
from training.train import build, save, start

__all__ = ["three_leaves"]
KINDS = {
    "scape": SCAPE,
    "adamw": {"mesh.data": 2, "optimizer.name": "adamw"},
    "adams": {"mesh.data": 2, "optimizer.name": "adams"},
    "gasloc": ROUNDS,
}
# What each worker of a run in rounds has is so many times the seed's parameters: their mean is exact.
FACTORS = np.array([2, 2, -2, 2], np.float32)


@pytest.fixture(scope="module")
def setups(tmp_path_factory):
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"))
    return {kind: build(tiny(corpus, **changes)) for kind, changes in KINDS.items()}


@pytest.fixture(scope="module")
def saved(setups, tmp_path_factory):
    """The folder of a run of each kind, and the parameters of one model in it."""
    found = {}
    for kind, setup in setups.items():
        folder, config = tmp_path_factory.mktemp(kind), settings.update(setup.config, {"run.seed": 1})
        runs.new_folder(settings.update(config, {"run.folder": str(folder)}))
        setup = dataclasses.replace(setup, config=config)
        state = start(setup)
        params = jax.device_get(state.params)
        if setup.in_rounds:
            params = jax.tree.map(lambda x: x[0], params)
            each = jax.tree.map(lambda x: np.stack([x * factor for factor in FACTORS]), params)
            state.params = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), each, state.params)
        state.opt_state = jax.tree.map(
            lambda x: jax.device_put(np.asarray(x) + np.ones((), x.dtype), x.sharding), state.opt_state
        )
        state.step = 7
        with Checkpoints(folder) as checkpoints:
            save(setup, state, checkpoints)
        state.loader.close()
        found[kind] = folder, params
    return found


@pytest.mark.parametrize(
    ("source", "worker", "target", "factor"),
    [
        ("adamw", None, "scape", 1),
        ("adams", None, "scape", 1),
        ("scape", None, "adamw", 1),
        ("scape", None, "adams", 1),
        ("adamw", None, "gasloc", 1),
        ("scape", None, "gasloc", 1),
        ("gasloc", None, "adams", 1),
        ("gasloc", None, "scape", 1),
        ("gasloc", 2, "scape", FACTORS[2]),
    ],
)
def test_the_parameters_alone_are_taken_over(source, worker, target, factor, setups, saved):
    folder, params = saved[source]
    plain = setups[target]
    changes = {"checkpoint.parameters_from": str(folder), "checkpoint.parameters_worker": worker}
    setup = dataclasses.replace(plain, config=settings.update(plain.config, changes))
    state, fresh = start(setup), start(plain)
    expected = jax.tree.map(lambda x: x * np.float32(factor), params)
    if setup.in_rounds:  # every worker starts from them
        expected = jax.tree.map(lambda x: np.stack([x] * plain.config.mesh.worker), expected)
    helpers.assert_bit_equal(state.params, expected)
    with pytest.raises(AssertionError):
        helpers.assert_bit_equal(fresh.params, expected)

    helpers.assert_bit_equal(state.opt_state, fresh.opt_state)
    filled = [path for path, x in by_path(state.opt_state).items() if np.any(np.asarray(x))]
    assert all(path.endswith("stats/clip_factor") for path in filled), filled
    assert state.step == 0 and not any(state.totals.values())
    assert state.loader.get_state() == fresh.loader.get_state() and state.loader.step == 0
    assert f"step 7 of {folder}" in state.source

    losses = advance(setup, state, setup.method.steps_ahead(0))
    assert np.all(np.isfinite(losses)) and state.step > 0
    for one in (state, fresh):
        one.loader.close()
