"""scripts/sweep.py with the tiniest sizes: grid, going on after an interruption, table and heat-map."""

import json
import math

import numpy as np
import pytest

from scripts import sweep
from tests.training.runs_for_tests import write_corpus

TINY = dict(
    steps=4, length=16, global_batch=4, width=32, n_layers=1, evaluations=1, eval_batches=1, final_batches=1
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_corpus(tmp_path_factory.mktemp("corpus"), tokens=5000))


def settings(source, out, **changes):
    grid = dict(
        local_steps=(2,), outer_learning_rates=(0.7,), momenta=(0.0, 0.9), topologies=("ring",), workers=(2,)
    )
    return sweep.Settings(
        **(TINY | grid | {"source": source, "out": out, "rows": "topology", "columns": "momentum"} | changes)
    )


def test_sweep_goes_on_and_grows(source, tmp_path, capsys):
    """A finished point is never run again, a line that was cut short is, and a grown grid keeps what there is."""
    sweep.main(settings(source, tmp_path))
    path = tmp_path / "sweep.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{second[:50]}")
    capsys.readouterr()
    sweep.main(settings(source, tmp_path, topologies=("ring", "complete"), momenta=(0.9, 0.0)))
    assert capsys.readouterr().out.count("done before") == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == json.loads(first) and len(lines) == 4
    again = next(line for line in lines[1:] if line["point"] == json.loads(second)["point"])
    assert again["loss"] == json.loads(second)["loss"]
    assert {line["point"]["topology"] for line in lines} == {"ring", "complete"}
    assert lines[0]["loss"] != again["loss"]  # the momentum reaches the outer step

    table = (tmp_path / "sweep.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| 2 |")]
    losses = [float(row.split("|")[6]) for row in rows]
    assert len(rows) == 4 and losses == sorted(losses)
    assert (tmp_path / "sweep.png").stat().st_size > 5_000


def test_points_of_another_task_are_not_taken(tmp_path):
    point = dict(workers=2, topology="ring", local_steps=2, outer_learning_rate=0.7, momentum=0.9)
    path = tmp_path / "sweep.jsonl"
    path.write_text(json.dumps({"point": point, "task": {"seed": 0}, "loss": 1.0}) + "\n")
    assert list(sweep.finished(path, {"seed": 0})) == [sweep.Point(**point)]
    assert not sweep.finished(path, {"seed": 1})


def test_heat_map_is_the_lowest_over_the_other_axes():
    """A run that diverged leaves its field to the others, and an empty field where it is alone."""
    results = {
        sweep.Point(8, topology, steps, 0.7, momentum): {"loss": loss}
        for topology, steps, momentum, loss in (
            ("ring", 10, 0.5, 2.0), ("ring", 10, 0.9, 1.5), ("ring", 30, 0.9, math.nan),
            ("complete", 10, 0.9, math.nan), ("complete", 10, 0.5, 3.0),
        )
    }  # fmt: skip
    down, across, lowest = sweep.heat(results, "topology", "local_steps")
    assert (down, across) == (["ring", "complete"], [10, 30])
    np.testing.assert_array_equal(lowest, [[1.5, np.nan], [3.0, np.nan]])
    sweep.picture(results, "topology", "local_steps", "topology")
    panels = sweep.picture(results, "momentum", "local_steps", "topology").axes
    assert [axes.get_title() for axes in panels] == [
        "topology: ring",
        "topology: complete",
        "",
    ]  # last: colours


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_steps": (2, 3)}, r"local_steps must be divisors of steps.*\[3\]"),
        ({"workers": (3,)}, r"workers must be divisors of global_batch.*\[3\]"),
        ({"momenta": (1.0,)}, r"momenta must be in \[0, 1\).*\[1.0\]"),
        ({"topologies": ()}, r"topologies must"),
        ({"rows": "momentum"}, "two settings"),
    ],
)
def test_bad_grids_are_refused_before_training(source, tmp_path, changes, message):
    with pytest.raises(SystemExit, match=message):
        sweep.main(settings(source, tmp_path, **changes))
