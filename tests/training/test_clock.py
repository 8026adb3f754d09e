"""A clock that is set back harms nothing: steps, not times, say what is newest."""

import io
import itertools
import os
import shutil
import time

import pytest

from tests import helpers
from tests.training.runs_for_tests import tiny, write_corpus
from tests.training.test_checkpoint import make_state, save
from training import config as settings
from training import metrics, runs
from training.checkpoint import Checkpoints
from training.train import build, train

HOUR, DAY = 3600, 24 * 3600


@pytest.fixture
def backwards(monkeypatch):
    """Every look at the clock finds it an hour earlier."""
    began, looks = time.time_ns(), itertools.count()
    now = lambda: began - next(looks) * HOUR * 10**9  # noqa: E731
    monkeypatch.setattr(time, "time_ns", now)
    monkeypatch.setattr(time, "time", lambda: now() / 1e9)
    return looks


def touch(folder, secs):
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (secs, secs))


def steps_in(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def test_a_run_and_its_resume(backwards, tmp_path):
    changes = {"run.steps": 10, "checkpoint.every": 2, "checkpoint.keep": 3, "mesh.data": 2}
    config = tiny(write_corpus(tmp_path), **changes, **{"optimizer.name": "adams"})
    setup, folder = build(config), tmp_path / "run"
    runs.new_folder(settings.update(config, {"run.folder": str(folder)}))
    assert train(setup, folder, out=io.StringIO()).exit_code == 0
    assert next(backwards) > 10, "the run must look at the clock"
    first = metrics.read(folder)
    assert [r["step"] for r in first if "loss" in r] == list(range(1, 11))
    assert steps_in(folder) == [6, 8, 10]

    shutil.rmtree(folder / "checkpoints" / "10")  # as of a run that was killed just before
    (folder / "summary.json").unlink()
    for step, secs in ((6, DAY), (8, -DAY)):
        touch(folder / "checkpoints" / str(step), os.stat(folder).st_mtime + secs)
    out = io.StringIO()
    outcome = train(setup, folder, resume=True, out=out)
    assert (outcome.exit_code, outcome.step) == (0, 10) and "going on from step 8" in out.getvalue()
    assert steps_in(folder) == [6, 8, 10]
    again = metrics.read(folder)
    assert [r["step"] for r in again] == [r["step"] for r in first]
    for key in ("loss", "validation_loss", "bytes_sent_total"):
        assert metrics.series(again, key) == metrics.series(first, key)
    assert all(r["tokens_per_sec"] > 0 for r in again if "loss" in r)


def test_a_step_set_aside_twice_at_one_time(monkeypatch, tmp_path):
    """An hour that comes twice: the second checkpoint of a step does not take the place of the first."""
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    for seed in (1, 2):
        save(tmp_path, 5, *make_state(helpers.make_mesh(2), seed=seed))
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.set_aside(after=4)
            assert not checkpoints.steps
    assert len(list((tmp_path / "damaged").iterdir())) == 2
