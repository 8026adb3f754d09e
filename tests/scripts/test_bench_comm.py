"""bench_comm on two real processes with links of a known speed, small; its twin without messages; its table."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import scape_jax
from scripts import _comm_methods as methods
from scripts import _comm_report as report
from tests.training.runs_for_tests import ROOT, environment
from training.launch import Cluster
from training.simulate import METHODS

OPTIONS = ["--million", "0.05", "--rows", "1", "--local-steps", "2", "--workers", "2", "--cell-secs", "0.2"]
CHOSEN = ["adams", "scape_d0.1_bitmap", "gasloc_1peer"]


@pytest.fixture(scope="module")
def shaped():
    with Cluster(2, bandwidth="1gbit") as cluster:
        if not cluster.shaped:
            pytest.skip(cluster.note)


def bench(folder, *options):
    done = subprocess.run(
        [sys.executable, "scripts/bench_comm.py", "--out", folder, *OPTIONS, "--cache", folder / "cache", *options],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_bench_of_two_processes(shaped, tmp_path):
    """Every figure is there, and the interface counts the bytes that the closed form says, plus headers."""
    code, told = bench(tmp_path, "--methods", *CHOSEN, "--speeds", "20")
    assert code == 0, told
    result = json.loads((tmp_path / "comm.json").read_text())
    assert [c["method"] for c in result["cells"]] == CHOSEN
    for cell in result["cells"]:
        # Few bytes, so the meeting before them weighs, and so does what is on its way when the counters are read.
        assert -0.05 < report.counted(cell) < 0.2, cell
        assert cell["step_secs"] > 0.9 * cell["bytes_per_step"] * 8 / cell["bandwidth"]
        parts = cell["compute_secs"] + cell["update_secs"] + cell["exposed_secs"]
        assert parts == pytest.approx(cell["step_secs"]) and cell["compute_secs"] > 0
    dense, scape, gossip = result["cells"]
    assert scape["bytes_per_step"] < dense["bytes_per_step"] / 3 and gossip["steps"] == 2
    assert (tmp_path / "comm.png").stat().st_size > 10_000 and "| 20 | adams |" in (
        tmp_path / "comm.md"
    ).read_text()

    before = (tmp_path / "comm.json").stat().st_mtime_ns
    code, told = bench(tmp_path, "--methods", *CHOSEN, "--speeds", "20", "--rows", "2")
    assert code == 1 and "cells of other settings" in told
    assert (tmp_path / "comm.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["scape_d0.01_index", "scape_d0.1_bf16", "adams_bf16"])
def test_twin_without_messages_has_all_the_rest(name):
    """Same parameters in, no collective, and as much arithmetic as the step itself."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    params = {"w": np.ones((64, 1024), np.float32), "b": np.zeros(8, np.float32)}
    loss = lambda params, x: (x @ params["w"]).mean() + params["b"].sum()  # noqa: E731

    def lowered():
        step = scape_jax.make_train_step(loss, METHODS[name].make(), mesh)
        state = step.init(step.place(params))
        return lambda: step.lower(
            step.place(params), state, np.ones((8, 64), np.float32), final=True
        ).as_text()

    with_messages, without = lowered(), lowered()
    whole = with_messages()
    with methods.without_messages(4):
        alone = without()
    count = lambda text, word: text.count(f"stablehlo.{word}")  # noqa: E731
    for word in ("all_reduce", "all_gather"):
        assert count(alone, word) == 0
        assert count(whole, word) >= (0 if word == "all_gather" and name == "adams_bf16" else 1)
    for word in ("dot_general", "sqrt", "while", "divide", "select", "gather"):
        assert count(alone, word) == count(whole, word), word


def cell(method, mbit, secs, ideal, steps=1, sent=1000):
    return {
        "method": method, "bandwidth": mbit * 1e6, "steps": steps, "repeats": 2, "step_secs": secs, "compute_secs": 0.04,
        "update_secs": 0.01, "exposed_secs": secs - 0.05, "ideal_secs": ideal, "bytes_per_step": 1000,
        "sent_bytes": [sent, 1010],
    }  # fmt: skip


def test_table_and_verdicts():
    cells = [
        cell("adams", 50, 1.0, 0.9),
        cell("scape_d0.01_index", 50, 0.1, 0.08),
        cell("diloco", 50, 2.0, 2.0, steps=10, sent=1100),
    ]
    result = {
        "settings": {"workers": 4, "rows": 4}, "cells": cells, "parameters": 5, "cores": 2, "date": "d", "kernel": "k",
        "python": "p", "jax": "j", "command": "c",
    }  # fmt: skip
    for made, one in zip("aab", cells, strict=True):
        one |= {"date": "d", "command": f"bench {made}"}
    text = report.markdown(result)
    assert text.count("    bench a    # d\n") == text.count("    bench b    # d\n") == 1  # each command once
    assert "| 50 | diloco | 2,000 | 40 | 10 | 1,950 | 1.00 | 5.0x | 1 | +10.0% |" in text
    assert (
        "dense AdamS waits 95% of a step" in text
        and "scape_d0.01_index: 10.0 times as fast (goal 10, met)" in text
    )
    assert "1 of 3 cells above 1.15 of their ideal: scape_d0.01_index at 50" in text
    assert "1 of 3 cells with bytes more than 5 % off: diloco at 50" in text
    assert len(report.picture(result).axes) == 1


def test_table_shows_the_methods_that_the_simulator_knows():
    assert report.METHODS == tuple(METHODS) and set(methods.LATE.values()) <= set(METHODS)
