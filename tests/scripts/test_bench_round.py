"""scripts/bench_round.py at its smallest: what it reports, and what it refuses."""

import json

import pytest

from scripts import bench_round as bench


def test_figures_and_file(tmp_path):
    out = tmp_path / "figures" / "round.json"
    result = bench.main(
        bench.Settings(
            million=0.1, workers=2, local_steps=1, repeats=2, methods=("gasloc_1peer_fragments4",), out=out
        )
    )
    assert json.loads(out.read_text()) == result
    assert list(result["methods"]) == ["diloco", "gasloc_1peer_fragments4"]
    diloco, fragments = result["methods"].values()
    assert diloco["round_ratio"] == diloco["exchange_ratio"] == 1
    assert fragments["round_ms"] > fragments["exchange_ms"] > 0
    # Two workers: a ring all-reduce sends the model once, and so does one peer; a fourth of it, with a row of rounding.
    assert diloco["wire_bytes"] == 4 * result["params"]
    assert fragments["wire_bytes"] == pytest.approx(result["params"], rel=0.05)


def test_what_cannot_be_timed_is_refused():
    with pytest.raises(SystemExit, match=r"methods must be among diloco, .*got \['dilico'\]"):
        bench.main(bench.Settings(methods=("dilico",)))
