"""scripts/pretrain.py as a user runs it: a new process each time, signals, resume, refusals before anything
compiles.
"""

import os
import re
import signal
import stat
import subprocess
import time

import jax
import jax.numpy as jnp
import pytest

import models
from scripts import pretrain as script
from tests.training.runs_for_tests import command, environment, options, pretrain, tiny, write_corpus
from training import config as settings
from training import metrics, preflight
from training.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def started(arguments, cwd):
    """A process that has done a few steps, and what it has printed."""
    process = subprocess.Popen(
        command(*arguments),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        umask=0,
    )
    told, steps = "", 0
    for line in process.stdout:
        told += line
        steps += line.startswith("step ")
        if steps == 3:
            return process, told
    raise AssertionError(f"no third step:\n{told}")


ENDLESS = dict(optimizer__name="adams", mesh__data=2, run__steps=100_000)


def interrupted(arguments, number, cwd):
    """Sends the signal after a few steps; returns (exit code, step saved, arguments to go on, text)."""
    process, told = started(arguments, cwd)
    process.send_signal(number)
    told += process.communicate(timeout=200)[0]
    assert "Traceback" not in told
    step, go_on = re.search(r"saved step (\d+); to go on: python scripts/pretrain.py (.*)", told).groups()
    return process.returncode, int(step), go_on.split(), told


def test_ctrl_c_and_sigterm_save_and_say_how_to_resume(corpus, tmp_path):
    code, first, go_on, _ = interrupted(options(tiny(corpus, **ENDLESS)), signal.SIGINT, tmp_path)
    assert code == 130
    assert go_on == ["--resume", "runs/tiny-1"]
    code, second, _, told = interrupted(go_on, signal.SIGTERM, tmp_path)
    assert code == 143
    assert f"going on from step {first}" in told
    folder = tmp_path / "runs" / "tiny-1"
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps[-1] == second > first
        assert checkpoints.read_meta()["data"]["step"] == second
    records = metrics.read(folder)
    assert [r["step"] for r in records] == list(range(1, second + 1))  # no step twice or left out
    per_step = {r["bytes_sent_total"] / r["step"] for r in records}
    assert len(per_step) == 1  # the sum goes on, too
    assert not [path for path in folder.rglob("*") if path.stat().st_mode & stat.S_IWOTH]


def refused(capsys, *arguments):
    """The message of a refusal in this process."""
    assert script.main(list(arguments)) == 2
    return capsys.readouterr().err


def test_large_model_says_what_is_missing_before_compiling(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "available_bytes", lambda: 16 * 10**9)
    began = time.perf_counter()
    told = refused(capsys, "--config", "llama500m")
    assert time.perf_counter() - began < 20
    assert re.search(r"memory: 8 workers on one CPU need about [\d.]+ [GT]B, 16 GB are available", told)
    assert re.search(r"needs a machine with 8 GPUs of [\d.]+ GB or more.\n", told)
    assert "Here it cannot fit" in told and "both are missing" in told
    assert "data/slimpajama-6b-llama must hold train.tokens and validation.tokens" in told
    assert "write_tokens" in told and "vocab_size=32000" in told
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("name", "available"), [("llama500m", 22e9), ("llama134m", 17e9), ("demo", 1.4e8)])
def test_advice_on_memory_is_sound(name, available, monkeypatch):
    """The settings that it names do fit; the advice was to raise one setting or to lower another, each of no use."""
    monkeypatch.setattr(preflight, "available_bytes", lambda: int(available))
    config = settings.preset(name)
    told = preflight.memory_problem(config)
    flags = dict(
        re.findall(r"--([a-z]+\.[a-z]+) (\S+)", told.partition("Here it fits with ")[2].partition("(")[0])
    )
    assert flags
    assert preflight.memory_problem(settings.update(config, flags)) is None


@pytest.mark.parametrize(
    ("changes", "platform", "told"),
    [
        ({"optimizer.implementation": "pallas"}, "cpu", "needs CUDA devices, this run has cpu devices"),
        ({"optimizer.implementation": "triton", "optimizer.name": "adamw"}, "gpu", "this run has adamw"),
        (
            {"optimizer.implementation": "triton", "optimizer.block_size": 96},
            "gpu",
            "no kernel for block_size=96",
        ),
        ({"optimizer.implementation": "pallas"}, "gpu", None),
        ({"optimizer.implementation": "xla"}, "cpu", None),
    ],
)
def test_a_named_kernel_that_cannot_run_is_told_before_anything_is_compiled(
    monkeypatch, changes, platform, told
):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    problem = preflight.missing_kernel(settings.update(settings.preset("demo"), changes))
    assert (problem is None) == (told is None) and (told or "") in (problem or "")


def test_large_model_in_a_process_of_its_own(tmp_path):
    ended = pretrain(
        "--config", "llama500m", "--optimizer.density", "0.01", "--mesh.data", "32", cwd=tmp_path
    )
    assert ended.returncode == 2
    assert "slimpajama" in ended.stderr and "Traceback" not in ended.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "demmo"], "Did you mean 'demo'"),
        (["--config", "nope"], "got 'nope'. Use one of these."),
        (["--resume", "nowhere"], "must hold config.json, got nowhere"),
        (["--resume", "nowhere", "--config", "demo"], "leave --config out"),
        (["--config", "tiny", "--config-file", "absent.json"], "no settings file at absent.json"),
        (
            ["--config", "tiny", "--mesh.data", "512", "--data.global_batch", "512"],
            "needs 512 devices, this process has 8 (cpu). JAX had already started",
        ),
        (["--config", "tiny", "--data.source", "absent"], "absent must hold train.tokens"),
    ],
)
def test_refusals_exit_with_two(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *arguments)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("name", "length"), [("demo", 128), ("tiny_gpt", 32)])
def test_activations_are_near_what_the_compiler_reserves(name, length):
    changes = {"model.preset": name, "data.length": length, "mesh.data": 1, "data.global_batch": 4}
    config = settings.update(settings.preset("demo"), changes)
    model = config.model.build()
    batch = {"tokens": jax.ShapeDtypeStruct((4, length + 1), jnp.int32)}
    step = jax.jit(jax.value_and_grad(models.loss_fn(model))).lower(models.abstract_params(model), batch)
    reserved = step.compile().memory_analysis().temp_size_in_bytes
    estimate = preflight.estimate_memory(config)
    assert reserved / 1.4 < estimate.activations_bytes < reserved * 1.4
    assert estimate.parameters_bytes == estimate.gradients_bytes == 4 * models.num_params(model)


def test_memory_estimate_follows_the_settings():
    def total(**changes):
        values = {k.replace("__", "."): v for k, v in changes.items()}
        return preflight.estimate_memory(settings.update(settings.preset("llama500m"), values), on_gpu=True)

    base = total()
    assert total(data__accumulate=64).activations_bytes == base.activations_bytes // 2
    assert total(model__remat=True).activations_bytes < base.activations_bytes / 2
    assert total(optimizer__name="adamw").optimizer_bytes > 1.8 * base.optimizer_bytes
    assert total(mesh__data=16, data__accumulate=16) == base
    assert 15e9 < base.total_bytes < 40e9
