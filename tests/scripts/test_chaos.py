"""A short soak: a few faults of drawn kinds, and the losses of the undisturbed run at the end."""

import json

import pytest

from scripts import chaos
from tests.training.runs_for_tests import long


@long
def test_a_run_survives_faults_bit_for_bit(tmp_path):
    settings = chaos.Settings(
        out=tmp_path,
        faults=2,
        processes=2,
        kinds=("kill one", "flip a bit"),
        steps_between=8,
        checkpoint_every=4,
        seed=1,
    )
    result = chaos.main(settings)
    assert result["different"] == [] and result["compared"] >= 20
    assert [f["as_documented"] for f in result["faults"]] == [True] * 2, result["faults"]
    assert {f["kind"] for f in result["faults"]} == set(settings.kinds)
    for fault in result["faults"]:
        if fault["kind"] == "kill one":
            assert fault["lost_steps"] <= 2 * settings.checkpoint_every  # one may have been under way
    assert json.loads((tmp_path / "chaos.json").read_text()) == result
    assert "bit for bit: yes" in (tmp_path / "chaos.md").read_text() and not (tmp_path / "work").exists()


def test_unknown_kinds_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="kinds must be among kill one"):
        chaos.main(chaos.Settings(out=tmp_path, kinds=("earthquake",)))
