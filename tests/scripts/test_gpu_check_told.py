"""scripts/gpu_check.py, what it tells of given rows: exit codes, goals, wrong arguments, Ctrl-C. Nothing is run by JAX."""

import json

import pytest

from scripts import _gpu_report, _gpu_settings, gpu_check


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "pak"], "invalid choice: 'pak'"),
        (["--seconds", "0"], "--seconds: must be a finite number above 0, as 330; got 0"),
        (["--seconds", "nan"], "got nan"),
        (["--seconds", "inf"], "got inf"),
        (["--parameters", "0"], "--parameters: must be a whole number of at least 1, as 15 or 100e6; got 0"),
        (["--parameters", "1e400"], "got 1e400"),
        (["--parameters", "nan"], "got nan"),
        (["--parameters", "1.5"], "got 1.5"),
        (["--repeats", "0"], "--repeats: must be a whole number of at least 1"),
        (["--repeats", "few"], "got few"),
        (["--out", "."], "--out . cannot be written (Is a directory)"),
        (["--out", f"{__file__}/x.json"], "cannot be written ("),
    ],
)
def test_wrong_settings(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        _gpu_settings.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_settings_of_the_command(tmp_path):
    out = tmp_path / "new" / "out.json"
    given = _gpu_settings.parse(["--quick", "--parameters", "1e6", "--seconds", "0.5", "--out", str(out)])
    assert (given.parameters, given.repeats, given.seconds) == (1_000_000, 2, 0.5)
    assert not out.exists()
    out.write_text("kept")
    given = _gpu_settings.parse(["--repeats", "3", "--out", str(out)])
    assert (given.parameters, given.repeats, out.read_text()) == (_gpu_settings.PARAMETERS, 3, "kept")


EQUAL = ("check a", {"op": "a", "spec": "s", "implementation": "pallas", "status": "equal"})
DEVICE = ("device", {"platform": "cpu", "device": "cpu"})


def telling(*told, then=lambda: None):
    """A run that tells these rows, each the whole of its task."""

    def run(tasks, took, *_):
        for task, row in told:
            took(task, row)
            took(task, None)
        then()

    return run


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ([EQUAL], 0),
        ([EQUAL, ("check b", EQUAL[1] | {"status": "not here", "detail": "no Triton"})], 0),
        ([EQUAL, ("check b", EQUAL[1] | {"status": "not run", "detail": "out of time"})], 0),
        ([EQUAL, ("check b", EQUAL[1] | {"status": "error", "detail": "told"})], 1),
        ([EQUAL, ("update default", {"method": "m", "status": "error", "detail": "told"})], 1),
        ([EQUAL, ("bandwidth a", EQUAL[1] | {"status": "error", "detail": "told"})], 1),
        ([EQUAL, ("update default", {"status": "error", "detail": "told"})], 1),
        ([("check a", EQUAL[1] | {"status": "not run", "detail": "out of time"})], 1),
        ([], 1),
    ],
)
def test_exit_codes(told, code, tmp_path, capsys):
    settings = _gpu_settings.Settings(quick=True, out=tmp_path / "out.json")
    assert gpu_check.main(settings, telling(DEVICE, *told))[0] == code
    assert ("No kernel was checked." in capsys.readouterr().out) == (EQUAL not in told)


def test_a_failed_write_costs_no_table(tmp_path, capsys):
    """The place of the JSON becomes a folder before the first task ends."""
    out = tmp_path / "out.json"
    out.mkdir()
    code, _ = gpu_check.main(_gpu_settings.Settings(quick=True, out=out), telling(DEVICE, EQUAL))
    told = capsys.readouterr()
    assert code == 1 and "a, pallas  1 equal" in told.out
    assert "out.json could not be written: " in told.err and "written after" not in told.out


def test_interrupted(tmp_path, capsys):
    def interrupt():
        raise KeyboardInterrupt

    settings = _gpu_settings.Settings(quick=True, out=tmp_path / "out.json")
    assert gpu_check.main(settings, telling(then=interrupt))[0] == 130
    assert capsys.readouterr().out == "" and not settings.out.exists()
    code, result = gpu_check.main(settings, telling(DEVICE, EQUAL, then=interrupt))
    told = capsys.readouterr()
    assert code == 130 and "a, pallas  1 equal" in told.out and told.err == "Interrupted after 0 s.\n"
    assert json.loads(settings.out.read_text()) == json.loads(json.dumps(result)) and result["interrupted"]


def test_goals_are_those_of_the_kernels_that_the_optimizer_takes():
    def goal(*rows):
        found = [
            {"op": "apply_pass", "spec": str(i), "implementation": kernel, "bytes": 1e9, "of_copy": share}
            | {"status": "error" if share is None else "timed"}
            for i, (kernel, share) in enumerate(rows)
        ]
        goals = _gpu_report.goals({"bandwidth": found, "update": []})
        (only,) = (goal for goal in goals if goal["goal"].startswith("apply_pass"))
        return only["reached"], only["met"], only["triton"]

    assert goal(("pallas", 0.7), ("triton", 0.9), ("pallas", 0.9)) == (0.7, False, 0.9)
    assert goal(("pallas", 0.8), ("triton", 0.5)) == (0.8, True, 0.5)
    assert goal(("triton", 0.9), ("xla", 0.9)) == (None, None, 0.9)
    # A large shape that failed may be the slowest.
    assert goal(("pallas", 0.9), ("pallas", None)) == (0.9, None, None)
    assert goal(("pallas", 0.7), ("pallas", None)) == (0.7, False, None)
