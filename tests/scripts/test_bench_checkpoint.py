"""scripts/bench_checkpoint.py at its smallest: what it reports, and what it refuses."""

import json

import pytest

from scripts import bench_checkpoint as bench
from tests.training.runs_for_tests import tiny, write_corpus


def test_what_a_checkpoint_costs(tmp_path, monkeypatch):
    config = tiny(write_corpus(tmp_path))
    monkeypatch.setattr(bench.configs, "preset", lambda name: config)
    result = bench.main(bench.Settings(config="tiny", steps=2, repeats=2, out=tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert result["step_secs"] > 0 and len(result["held_up_secs_each"]) == 2
    assert result["held_up_of_a_step"] == pytest.approx(result["held_up_secs"] / result["step_secs"])
    assert result["state_bytes"] > 4 * 10_000


def test_settings_that_measure_nothing_are_refused():
    with pytest.raises(SystemExit, match="steps and repeats must be at least 1, got 0 and 5"):
        bench.main(bench.Settings(steps=0))
