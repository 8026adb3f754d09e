"""A checkpoint of one line of JAX and Python goes on under the other: each line has written one, by checkpoints/write.py."""

import json
import shutil

import pytest

from tests.training.checkpoints.write import FOLDER, MORE, STEP, TOKENS, sums
from tests.training.runs_for_tests import write_corpus
from tests.training.test_resume_matrix import advance
from training import config as settings
from training import runs
from training._integrity import FILE
from training.checkpoint import Checkpoints
from training.train import build, restore

LINES = ("jax0.10", "jax0.12")


def config_of(line, corpus):
    places = {"run.folder": "", "data.source": str(corpus)}
    return settings.update(runs.load_config(FOLDER / line), places)


def expected_of(line):
    return json.loads((FOLDER / line / "expected.json").read_text())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), tokens=TOKENS)


@pytest.fixture(scope="module")
def setup(corpus):
    return build(config_of(LINES[0], corpus))


def test_each_line_wrote_the_same_run(setup, corpus):
    for line in LINES:
        assert f"jax{expected_of(line)['jax']}".startswith(f"{line}.")
        assert config_of(line, corpus) == setup.config
        assert sum(path.stat().st_size for path in (FOLDER / line).rglob("*") if path.is_file()) < 200_000


@pytest.mark.parametrize("line", LINES)
def test_it_goes_on(line, setup, tmp_path):
    folder, expected, notes = tmp_path / "run", expected_of(line), []
    shutil.copytree(FOLDER / line, folder)
    assert (folder / "checkpoints" / str(STEP) / FILE).is_file()
    with Checkpoints(folder) as checkpoints:
        state = restore(setup, checkpoints, notes.append)
    assert state.step == STEP and not notes
    assert state.loader.get_state() == expected["data"]
    assert sums(state) == expected["arrays"]
    losses = advance(setup, state, MORE)
    state.loader.close()
    assert losses == pytest.approx(expected["losses"], rel=1e-5)
