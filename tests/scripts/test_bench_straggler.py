"""bench_straggler on four real processes with one slow link, small; its table and verdicts."""

import json
import subprocess
import sys

import pytest

from scripts import _straggler_report as report
from tests.training.runs_for_tests import ROOT, environment
from training.launch import Cluster


def test_bench_of_four_processes(tmp_path):
    with Cluster(4, bandwidth="1gbit") as cluster:
        if not cluster.shaped:
            pytest.skip(cluster.note)
    command = [
        sys.executable,
        "scripts/bench_straggler.py",
        "--out",
        tmp_path,
        "--rounds",
        "4",
        "--every",
        "4",
    ]
    command += ["--shares", "0.1", "--methods", "gasloc_1peer_adapt", "--local-steps", "2", "--mbit", "200"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads((tmp_path / "straggler.json").read_text())["runs"]
    assert [len(rows) for rows in run["rounds"]] == [8] * 4 and len(run["curve"]) == 2
    link_secs = run["bytes_per_round"] * 8 / 20e6
    for worker, rows in enumerate(run["rounds"]):
        assert all(
            start < stepped < exchanged and 1 <= steps <= 2 for start, stepped, exchanged, steps in rows
        )
        # Of four workers two meet the slow link in each round, which holds both back.
        slow = [exchanged - stepped >= 0.9 * link_secs for _, stepped, exchanged, _ in rows]
        assert all(slow) if worker == 3 else any(slow)
    assert 0 < min(run["idle"]) and max(run["idle"]) < 1
    assert (tmp_path / "straggler.png").stat().st_size > 10_000


def made(method, secs, curve, idle):
    rows = [[0.0, 0.5 * secs, secs, 30]]
    return {
        "method": method, "share": 0.1, "bytes_per_round": 1000, "secs": secs, "curve": curve, "idle": [idle] * 3 + [0.5],
        "mean_steps": [30] * 3 + [20], "rounds": [rows] * 4,
    }  # fmt: skip


def test_time_to_the_same_loss():
    base = made("diloco", 100.0, [[50.0, 2.0], [100.0, 1.5]], 0.6)
    good = made("gasloc_1peer_adapt", 60.0, [[30.0, 1.6], [50.0, 1.5], [60.0, 1.4]], 0.1)
    never = made("gasloc_1peer_int8_adapt", 60.0, [[60.0, 1.6]], 0.2)
    assert report.reached(good, 1.5) == 50.0 and report.reached(never, 1.5) is None
    result = {
        "settings": {"mbit": 80, "local_steps": 30}, "runs": [base, good, never], "parameters": 5, "cores": 2, "date": "d",
        "kernel": "k", "python": "p", "jax": "j", "command": "c",
    }  # fmt: skip
    for one in result["runs"]:
        one |= {"date": "d", "command": "bench"}
    text = report.markdown(result)
    assert (
        "gasloc_1peer_adapt: DiLoCo's loss after 0.50 of its time (goal 0.5), fast workers idle 10.0%" in text
    )
    assert (
        text.count(": met.") == 1 and "int8_adapt: DiLoCo's loss never" in text and text.count("NOT met") == 1
    )
    assert len(report.picture(result).axes) == 4
