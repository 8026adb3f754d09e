"""scripts/gpu_check.py on a CPU: the command itself, what it writes, that a wrong or broken kernel is told and not hidden.

No figure is looked at: there is no GPU. Every call on every named shape is traced, which finds one that does not fit.
"""

import dataclasses
import functools
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from pallas_kernels.compact import compact_rows
from scripts import _gpu_bandwidth, _gpu_settings, _gpu_tasks, gpu_check
from scripts._gpu_calls import OPS
from scripts._gpu_run import Limits, form
from scripts._gpu_update import llama500m
from tests.scripts import dying_process
from tests.training.runs_for_tests import ROOT, environment

# Other packages of the environment are not needed on the machine that this is for.
ABSENT = ("rich", "tyro", "flax", "orbax", "grain", "matplotlib", "tensorboardX", "safetensors", "yaml")


def command(*arguments, secs=240, **variables):
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), *arguments],
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=secs,
    )


def test_quick_run(tmp_path):
    """The command from another folder: all tables, and every field of the JSON that a reader of results looks for."""
    out = tmp_path / "figures" / "check.json"
    ended = command("--quick", "--ops", "select_rows", "scatter_rows", "apply_pass", "--out", str(out))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for words in (
        "Against the plain-JAX",
        "Update of 24,672 parameters",
        "Bandwidth",
        "Goals",
        "None of these times",
    ):
        assert words in ended.stdout, words
    found = json.loads(out.read_text())
    assert found["device"]["platform"] == "cpu" and found["settings"]["quick"] is True
    assert found["versions"]["jax"] == jax.__version__ and found["versions"]["optax"]
    assert found["date"] and len(found["commit"]) == 40 and found["errors"] == [] and 0 < found["secs"]
    checks = [row for row in found["checks"] if row["implementation"] == "pallas"]
    assert [(row["op"], row["status"]) for row in checks] == [
        ("select_rows", "equal"), ("scatter_rows", "equal"), ("apply_pass", "equal"),
    ]  # fmt: skip
    assert {row["status"] for row in found["checks"] if row["implementation"] == "triton"} <= {
        "equal",
        "not here",
    }
    timed = {row["op"]: row for row in found["bandwidth"]}
    assert sorted(timed) == ["apply_pass", "scatter_rows", "select_rows"]
    assert all(r["gb_per_sec"] > 0 and r["copy_gb_per_sec"] > 0 and r["repeats"] == 2 for r in timed.values())
    methods = {row["method"]: row for row in found["update"]}
    assert list(methods) == ["optax.adamw", "optax.clip + adamw", "scape d=0.1", "scape d=0.01"]
    assert methods["optax.adamw"]["ratio_median"] == 1 and all(r["median_ms"] > 0 for r in methods.values())
    # On a CPU there are no bandwidths of kernels, so only the update's goals are judged.
    assert [goal["met"] is None for goal in found["goals"]] == [True] * 4 + [False] * 2


def test_without_a_gpu_it_says_what_it_needs(tmp_path):
    ended = command("--out", str(tmp_path / "out.json"))
    assert ended.returncode == 2 and list(tmp_path.iterdir()) == []
    assert "needs a CUDA GPU" in ended.stderr and "JAX runs on cpu" in ended.stderr
    assert "Use --quick to run every check on a CPU" in ended.stderr


def test_needs_little_else_installed():
    """Imports in a process where what the other scripts need is not to be found."""
    code = f"import sys\nfor name in {ABSENT}: sys.modules[name] = None\nfrom scripts import gpu_check"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), check=True, timeout=60)


def run(tmp_path, tasks, monkeypatch, process=gpu_check.in_this_process):
    """(exit code, result) of these tasks."""
    limits = Limits(quick=True, parameters=1, repeats=2)
    monkeypatch.setattr(gpu_check, "tasks_of", lambda _: [(task, limits) for task in ("device", *tasks)])
    settings = _gpu_settings.Settings(quick=True, out=tmp_path / "out.json")
    code, result = gpu_check.main(settings, process)
    assert json.loads(settings.out.read_text()) == json.loads(json.dumps(result))
    return code, result


def planted(op, wrong):
    """The operation with a kernel that is `wrong(output)`; its reference stays."""

    def function(*arrays, implementation=None, **options):
        out = op.function(
            *arrays, implementation="xla", **{k: v for k, v in options.items() if k != "interpret"}
        )
        return wrong(out) if implementation == "pallas" else out

    return dataclasses.replace(op, function=function)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x.at[3].add(1.0), r"1 of 3704 entries of output 0 differ; entry 3 is"),
        (lambda x: x.at[7].set(jnp.nan), r"entry 7 is nan"),
        (lambda x: x[:-1], r"output 0 is float32 \(3703,\), must be float32 \(3704,\)"),
        (lambda x: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_wrong_kernel_is_told_and_hides_no_other(wrong, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(OPS, "compact_rows", planted(OPS["compact_rows"], wrong))
    code, result = run(tmp_path, ["check compact_rows", "check pack_rows"], monkeypatch)
    assert code == 1
    bad, good = (
        next(r for r in result["checks"] if (r["op"], r["implementation"]) == (op, "pallas"))
        for op in ("compact_rows", "pack_rows")
    )
    assert bad["status"] in ("wrong", "error") and re.search(message, bad["detail"])
    assert good["status"] == "equal"
    assert f"compact_rows odd_tail, pallas: {bad['status']}: {bad['detail']}" in capsys.readouterr().out


def test_zeros_of_either_sign_differ_where_bits_count():
    one, other = jnp.zeros((4,)), -jnp.zeros((4,))
    assert _gpu_tasks.judge(one, other, ())["status"] == "wrong"
    assert _gpu_tasks.judge(one, other, (0,))["status"] == "equal"
    near = jnp.asarray([1.0, -2.0, jnp.inf, jnp.nan])
    assert _gpu_tasks.judge(near * (1 + 3e-7), near, (0,))["status"] == "equal"
    for wrong in (near * 1.001, near.at[3].set(0.0), near.at[2].set(3.0)):
        assert _gpu_tasks.judge(wrong, near, (0,))["status"] == "wrong"


def test_process_that_ends_or_hangs_costs_its_task_only(monkeypatch):
    assert dying_process.UNUSABLE == _gpu_tasks.UNUSABLE
    monkeypatch.setattr(_gpu_tasks, "work", dying_process.work)
    told = []
    tasks = [(name, None) for name in ("one", "ends", "gets Ctrl-C", "spoils", "two", "hangs", "three")]
    gpu_check.in_another_process(tasks, lambda task, row: told.append((task, row)) or True, silent=4.0)
    rows = [(task, row.get("detail", row["status"])) for task, row in told if row]
    assert rows == [
        ("one", "told"), ("ends", "the process ended with 7"), ("gets Ctrl-C", "told"), ("spoils", "told"),
        ("two", "told"), ("hangs", "no answer for 4 s"), ("three", "told"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_every_named_shape_fits(name):
    """Inputs are what arg_specs says, and calls follow on each other; traced only, so the large shapes too."""
    op = OPS[name]
    key = jax.eval_shape(lambda: jax.random.key(0))
    for spec, call in op.calls.items():
        like = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]  # noqa: E731
        assert like(jax.eval_shape(functools.partial(op.inputs, call), key)) == like(call.arrays), spec
        again = _gpu_bandwidth.in_a_row(op, call, form(op, call, "xla", False), 2)
        replaced, _ = jax.eval_shape(again, *_gpu_bandwidth.several(op, call, call.arrays, 2))
        out = jax.eval_shape(form(op, call, "xla", False), *call.arrays)
        assert like(replaced) == like([call.arrays[number] for number in op.follows(call)]), spec
        # No more than what comes in and goes out, and what is replaced.
        given, written = (
            sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(t)) for t in (call.arrays, out)
        )
        assert 0 < op.moved(call) <= given + written, spec


def test_no_call_in_a_row_is_left_out():
    """XLA keeps one of equal calls; select searches in a loop, so the loops are counted."""
    op, call = OPS["select_rows"], OPS["select_rows"].calls["odd_tail"]

    def loops(times):
        program = _gpu_bandwidth.in_a_row(op, call, form(op, call, "xla", False), times)
        return (
            jax.jit(program)
            .lower(*_gpu_bandwidth.several(op, call, call.arrays, times))
            .compile()
            .as_text()
            .count(" while(")
        )

    assert loops(3) == 3 * loops(1) > 0


def test_out_of_time_nothing_is_started():
    """Each task says so, and no shape is compiled."""
    late = Limits(quick=True, parameters=1, repeats=2, until=0.0)
    for task in ("check pack_rows", "bandwidth pack_rows", "update default"):
        (row,) = _gpu_tasks.rows_of_task(task, late)
        assert row["status"] == "not run", task
    rows = list(_gpu_tasks.check("pack_rows", late))
    assert {row["status"] for row in rows} == {"not run"}


def test_bytes_by_hand():
    """The floor of issue and paper: 20 bytes for each parameter of a step, and the masks and the payload."""
    call = OPS["apply_pass"].calls["mlp_10"]
    size = 16 * 4096 * 1536
    assert OPS["apply_pass"].moved(call) == size * (20 + 3 / 8) + 4 * call.static["k"] * size // 4096
    select = OPS["select_rows"]
    assert select.moved(select.calls["mlp_1"]) == size * (4 + 1 / 8)
    # Sectors that hold a kept entry, counted on a mask made for it.
    compact = OPS["compact_rows"]
    call = compact.calls["odd_tail"]
    x, words = jax.jit(functools.partial(compact.inputs, call))(jax.random.key(0))
    mask = np.unpackbits(np.asarray(words).view(np.uint8), bitorder="little")[: x.size]
    assert (compact_rows(x, words, **call.static).size, mask.sum()) == (3704, 3704)
    sectors = np.add.reduceat(mask, np.arange(0, x.size, 8)).astype(bool).sum()
    expected = compact.moved(call) - words.size * 4 - 3704 * 4
    assert abs(expected / (sectors * 32) - 1) < 0.03
    # Of h only what is kept and was not last time, in the two masks that are made for the timing.
    moment = OPS["moment_pass"]
    call = moment.calls["odd_tail"]
    h, g, *masks = jax.jit(functools.partial(moment.inputs, call))(jax.random.key(0))
    last, now = (np.unpackbits(np.asarray(w).view(np.uint8), bitorder="little")[: h.size] for w in masks)
    sectors = np.add.reduceat(now & ~last & 1, np.arange(0, h.size, 8)).astype(bool).sum()
    others = g.nbytes + 2 * masks[0].nbytes + now.sum() * 4 + -(-h.size // 4096) * 4
    assert abs((moment.moved(call) - others) / (sectors * 32) - 1) < 0.02


def test_shapes_are_those_of_the_model():
    params = models.abstract_params(models.preset("llama500m"))
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.shape
        for path, x in jax.tree.leaves_with_path(params)
    }
    assert llama500m(_gpu_settings.PARAMETERS) == shapes
    sizes = [sum(int(np.prod(s)) for s in llama500m(n).values()) for n in (int(5e8), int(5e7), 1)]
    assert 3e8 < sizes[0] < 5e8 and 2e7 < sizes[1] < 5e7 and sizes[2] < 1e6
