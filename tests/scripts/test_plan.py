"""scripts/plan.py: the plan of a run, its advice, its files, and what it refuses."""

import json
import signal
import subprocess
import sys

import pytest

import models
from scripts import plan
from training import _sim_plan as planning
from training import config as settings
from training.simulate import METHODS, exchange_of


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def rows_of(config="llama500m", bandwidth="400gbit", **changes):
    given = plan.Settings(workers=64, bandwidth=bandwidth, **changes)
    made, _ = plan.make_plan(settings.preset(config), given)
    return made, [made.predict(method) for method in planning.alternatives(given.densities)]


def test_a_plan_prints_every_method_and_one_to_take(capsys):
    assert (
        plan.main("--config llama1p8b --workers 64 --bandwidth 25gbit --densities 0.1 0.03 --paper".split())
        == 0
    )
    shown = lines(capsys)
    first = [line.split()[0] for line in shown if line.strip()]
    for name in (
        "config:",
        "adamw",
        "adams",
        "scape_d0.1",
        "scape_d0.03_bf16",
        "diloco",
        "gasloc_1peer",
        "Take",
        "Assumed:",
    ):
        assert name in first
    dense = next(line for line in shown if line.startswith("adams "))
    assert "1.00x" in dense and "14.4 GB" in dense
    text = " ".join(" ".join(shown).split())
    assert "gh200 at 40% of 989 TFLOP/s (assumed, not measured)" in text
    assert "1.983" in text and "1232 TFLOP/s a GPU, more than a GH200 can" in text


def test_the_settings_own_method_is_planned_with_its_changes(capsys):
    """Settings of pretrain.py may follow: another density is another row of one's own."""
    arguments = (
        "--config llama500m --workers 8 --bandwidth 10gbit --optimizer.density 0.02 --data.global_batch 512"
    )
    assert plan.main(arguments.split()) == 0
    text = "\n".join(lines(capsys))
    assert "config: scape d=0.02" in text and "2,097,152 tokens" in text


def test_rounds_come_from_the_configuration_or_the_command_line():
    config = settings.preset("gasloc551m")
    made, _ = plan.make_plan(config, plan.Settings(workers=8, bandwidth="1gbit"))
    own, same = made.predict_own(), made.predict(METHODS["gasloc_1peer"])
    assert own.local_steps == 30 and own.exposed_secs == pytest.approx(same.exposed_secs)
    made, _ = plan.make_plan(config, plan.Settings(workers=8, bandwidth="1gbit", local_steps=10))
    assert made.predict_own().exposed_secs == pytest.approx(3 * own.exposed_secs)


@pytest.mark.parametrize(
    "given", [{"tokens_per_sec": 32768.0}, {"step_secs": 2.0}]
)  # 2**22 tokens of a step on 64 workers
def test_a_measured_worker_sets_the_compute(given):
    _, rows = rows_of(**given)
    for row in rows:
        assert (
            row.compute_secs == pytest.approx(2.0) and row.update_secs == 0.0
        )  # that is in what was measured


def test_a_device_sets_compute_and_update():
    _, rows = rows_of(device="a100", utilisation=0.5)
    by_name = {row.method: row for row in rows}
    config = models.preset("llama500m")
    flops = 6 * (models.num_params(config) - 32000 * 1536) + 6 * 16 * 1536 * 4096
    assert by_name["adams"].compute_secs == pytest.approx(65536 * flops / 0.5 / 312e12)
    assert by_name["adamw"].update_secs == pytest.approx(28 * models.num_params(config) / 0.8 / 2e12)


def test_advice_goes_with_the_link():
    """Nothing to save on a fast link, more and more on slower ones."""
    taken = [
        planning.advice(rows_of(bandwidth=bandwidth)[1])[0].method
        for bandwidth in ("1tbit", "300gbit", "40gbit", "8gbit", "100mbit")
    ]
    assert taken == ["adams", "adams_bf16", "scape_d0.1_bf16", "scape_d0.01", "gasloc_1peer_fragments4"]
    reason = planning.advice(rows_of(bandwidth="1tbit")[1])[1]
    assert "have little to save" in reason


def test_curves_are_written(tmp_path, capsys):
    out = tmp_path / "new" / "plan"
    arguments = f"--config tiny --workers 4 --bandwidth 1mbit --curve --curve-workers 4 8 16 --out {out}"
    assert plan.main(arguments.split()) == 0
    found = json.loads((out / "scaling.json").read_text())
    assert found["command"].endswith("--curve-workers 4 8 16 --out " + str(out))
    assert set(found["strong"]) == set(planning.CURVES)
    strong, weak = found["strong"]["adams"], found["weak"]["adams"]
    assert [row["workers"] for row in strong] == [4, 8, 16]
    assert len(found["weak"]["diloco"]) == 3  # no curve ends before the others
    assert strong[0]["compute_secs"] == pytest.approx(4 * strong[2]["compute_secs"])
    assert weak[0]["compute_secs"] == pytest.approx(weak[2]["compute_secs"])
    assert (out / "scaling.png").stat().st_size > 10_000
    text = (out / "scaling.md").read_text()
    assert "| method | 4 | 8 | 16 |" in text and "not measured" in text and str(out) in text


def test_a_folder_that_cannot_be_made_is_told_before_any_work(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below"):
        arguments = f"--config tiny --workers 4 --bandwidth 1mbit --curve --curve-workers 4 --out {out}"
        assert plan.main(arguments.split()) == 2
        shown = capsys.readouterr()
        assert f"--out must be a folder that can be made and written, got {out}: " in shown.err
        assert shown.err.count("\n") == 1 and not shown.out
    assert file.read_text() == "mine"


def test_predictions_are_held_against_measured_cells(tmp_path, capsys):
    params = models.abstract_params(plan.model(0.1))
    sent = exchange_of(METHODS["adams"], params, 4).sent_bytes
    secs = 0.3 + 8 * sent / 1e7
    cell = {
        "method": "adams",
        "bandwidth": 1e7,
        "compute_secs": 0.2,
        "update_secs": 0.1,
        "bytes_per_step": sent,
    }
    cells = [
        cell | {"step_secs": secs},
        cell | {"step_secs": 2 * secs, "update_secs": -0.01, "compute_secs": 0.31},
    ]
    file = tmp_path / "comm.json"
    file.write_text(json.dumps({"settings": {"million": 0.1, "workers": 4}, "cells": cells}))
    assert plan.main(["--measured", str(file)]) == 0
    text = "\n".join(lines(capsys))
    assert "1 of 2 within 15%" in text and "-50%" in text


@pytest.mark.parametrize("reached", ["| numpy\n", "| training._sim_report\n"])
def test_ctrl_c_during_the_imports_is_a_line(reached):
    """Python tells each module that it has imported, so that the signal comes at a known place."""
    command = [sys.executable, "-X", "importtime", plan.__file__, *"--workers 4 --bandwidth 1gbit".split()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr:
                if line.replace(" ", "").endswith(reached.replace(" ", "")):
                    process.send_signal(signal.SIGINT)
                    break
            rest = process.stderr.read()
        finally:
            process.kill()
    assert process.returncode == 130
    told = [line for line in rest.splitlines() if not line.startswith("import time:")]
    assert told == ["Interrupted."]


GIVEN = '{"settings": {"million": 0.1, "workers": 4}, "cells": '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "lacks settings with million > 0 and workers >= 2, or cells"),
        ("[1]", "lacks settings"),
        ('{"settings": {"million": "a", "workers": 4}, "cells": [{}]}', "lacks settings"),
        (GIVEN + "[]}", "lacks settings"),
        (GIVEN + '[{"method": "adams"}]}', "a cell must hold method"),
        ("some notes", "which is no JSON"),
        (b"\xff\xfe", "which is no JSON"),
        (
            GIVEN
            + '[{"method": "adams", "bandwidth": "x", "step_secs": 1, "compute_secs": 1, "update_secs": 1, '
            '"bytes_per_step": 1}]}',
            "bandwidth of a cell must be a number, got 'x'",
        ),
    ],
)
def test_a_file_that_holds_no_cells_is_named_in_a_line(text, message, tmp_path, capsys):
    file = tmp_path / "x.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert plan.main(["--measured", str(file)]) == 2
    told = capsys.readouterr().err
    assert message in told and str(file) in told and "comm.json of scripts/bench_comm.py" in told
    assert told.startswith("error: ") and told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--workers 4", "--workers and --bandwidth must be given"),
        ("--measured nothing.json", "must be a comm.json of scripts/bench_comm.py, got nothing.json"),
        ("--config lama1p8b --workers 4 --bandwidth 1gbit", "Did you mean 'llama1p8b'?"),
        ("--workers 4 --bandwidth 1gb", "a bandwidth must be"),
        ("--workers 4 --bandwidth 1gbit --latency 5m", "a latency must be"),
        ("--workers 16385 --bandwidth 1gbit", "must be at most 16384, got 16385"),
        ("--workers 4 --bandwidth 1gbit --curve --curve-workers 4 99999", "must be at most 16384, got 99999"),
        ("--workers 0 --bandwidth 1gbit", "--workers must be at least 1, got 0"),
        ("--workers 4 --bandwidth 1gbit --device gh20", "Did you mean 'gh200'?"),
        ("--workers 4 --bandwidth 1gbit --tokens-per-sec 3 --step-secs 1", "say the same, got both"),
        ("--workers 4 --bandwidth 1gbit --step-secs 0", "--step-secs must be above 0, got 0.0"),
        ("--workers 4 --bandwidth 1gbit --utilisation 2", "above 0 and at most 1, got 2.0"),
        ("--workers 4 --bandwidth 1gbit --local-steps 0", "--local-steps must be at least 1, got 0"),
        ("--workers 4 --bandwidth 1gbit --densities 2", "density must be in (0, 1], got 2.0"),
        ("--workers 4 --bandwidth 1gbit --curve --curve-workers 0", "--curve-workers must be numbers >= 1"),
        ("--workers 4 --bandwidth 1gbit --optimizer.density 3", "optimizer.density must be in (0, 1], got 3"),
    ],
)
def test_what_does_not_fit_is_told_in_a_line(arguments, message, capsys):
    assert plan.main(arguments.split()) == 2
    told = capsys.readouterr().err
    assert message in told and told.startswith("error: ") and told.count("\n") == 1
