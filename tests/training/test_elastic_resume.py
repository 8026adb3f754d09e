"""A run goes on with another number of workers: nothing is lost but what has no meaning for others (case 16)."""

import io
import json

import jax
import numpy as np
import pytest

from tests import helpers
from tests.training.runs_for_tests import tiny, write_corpus
from training import config as settings
from training import metrics, runs
from training.checkpoint import Checkpoints
from training.train import abstract_state, build, restore, train

ROUNDS = {
    "outer.name": "gasloc", "outer.local_steps": 2, "mesh.worker": 4, "mesh.data": 1, "optimizer.name": "adams",
    "run.steps": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(config, folder, *, resume=False):
    """(setup, records, what was printed)."""
    setup, out = build(config), io.StringIO()
    if not resume:
        runs.new_folder(settings.update(config, {"run.folder": str(folder)}))
    outcome = train(setup, folder, resume=resume, out=out)
    assert outcome.exit_code == 0
    return setup, metrics.read(folder), out.getvalue()


def saved(setup, folder, step):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(*abstract_state(setup), setup.config, step)


def read_rows(folder):
    """Step -> the position of the data after it, as the checkpoints tell."""
    with Checkpoints(folder) as checkpoints:
        return {
            step: checkpoints.read_meta(step)["data"]["step"] for step in checkpoints._manager.all_steps()
        }


FEW_SPARSE = ["norm", "attention", "up", "gate"]  # what is dense; each sparse leaf costs a second to compile


def test_data_parallel(corpus, tmp_path):
    data, before = 2, tiny(corpus, run__steps=5, optimizer__dense=FEW_SPARSE)
    setup, _, _ = run(before, tmp_path / "run")
    old = saved(setup, tmp_path / "run", 5)
    after = settings.update(before, {"mesh.data": data, "run.steps": 8})
    with Checkpoints(tmp_path / "run") as checkpoints:
        state = restore(build(after), checkpoints)
        state.loader.close()
    helpers.assert_bit_equal(state.params, old.params)
    assert {x.sharding.mesh.devices.size for x in jax.tree.leaves(state.params)} == {data}
    _, records, told = run(after, tmp_path / "run", resume=True)
    assert f"of 1 x 4 workers, for 1 x {data}" in told
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 9))
    assert all(np.isfinite(r["loss"]) for r in records if "loss" in r)
    assert read_rows(tmp_path / "run") == {5: 5, 8: 8}  # no sequence twice, none left out
    assert json.loads((tmp_path / "run" / "config.json").read_text())["mesh"]["data"] == data
    # and back
    _, records, told = run(settings.update(before, {"run.steps": 10}), tmp_path / "run", resume=True)
    assert f"of 1 x {data} workers, for 1 x 4" in told and read_rows(tmp_path / "run")[10] == 10


def test_rounds(corpus, tmp_path):
    workers = 2
    before = tiny(corpus, **ROUNDS)
    setup, _, _ = run(before, tmp_path / "run")
    old = saved(setup, tmp_path / "run", 4)
    after = settings.update(
        before, {"mesh.worker": workers, "run.steps": 8, "outer.local_steps": [2] * workers}
    )
    with Checkpoints(tmp_path / "run") as checkpoints:
        state = restore(build(after), checkpoints)
        state.loader.close()
    mean = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64).mean(0), jax.device_get(tree))  # noqa: E731
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), mean(state.params), mean(old.params)
    )
    _, records, told = run(after, tmp_path / "run", resume=True)
    assert f"of 4 x 1 workers, for {workers} x 1" in told and read_rows(tmp_path / "run") == {4: 4, 8: 8}
    assert all(np.isfinite(r["loss"]) for r in records if "loss" in r)


def test_islands_of_another_size(corpus, tmp_path):
    """SCAPE over an island, GASLoC between them: both numbers change at once."""
    changes = ROUNDS | {
        "optimizer.name": "scape",
        "mesh.worker": 2,
        "mesh.data": 4,
        "optimizer.dense": FEW_SPARSE,
    }
    before = tiny(corpus, **changes)
    run(before, tmp_path / "run")
    after = settings.update(before, {"mesh.worker": 4, "mesh.data": 2, "run.steps": 8})
    _, records, told = run(after, tmp_path / "run", resume=True)
    assert "of 2 x 4 workers, for 4 x 2" in told
    assert all(np.isfinite(r["loss"]) for r in records if "loss" in r)


def test_another_model_is_still_refused(corpus, tmp_path):
    before = tiny(corpus, run__steps=1, optimizer__dense=FEW_SPARSE)
    run(before, tmp_path / "run")
    other = build(settings.update(before, {"mesh.data": 2, "model.n_layers": 3}))
    with Checkpoints(tmp_path / "run") as checkpoints, pytest.raises(ValueError, match="nothing was loaded"):
        restore(other, checkpoints)
    leaf = build(settings.update(before, {"mesh.data": 2, "optimizer.selection": "leaf"}))
    with Checkpoints(tmp_path / "run") as checkpoints, pytest.raises(ValueError):
        restore(leaf, checkpoints)
