"""The Slurm jobs without a cluster: what they would run, and one of them run by a stand-in for srun on this machine."""

import json
import subprocess
import sys

import pytest

from scripts import pretrain
from tests.training.runs_for_tests import ROOT, environment, write_corpus
from training import config as settings

JOBS = sorted((ROOT / "scripts" / "slurm").glob("*.sbatch"))


def job(file, tmp_path, *arguments, secs=60, **variables):
    """Runs the batch script as Slurm would, with stand-ins for its two commands; returns its exit code and output."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    stand_ins = {
        "srun": f'exec {sys.executable} -m tests.scripts.srun_for_tests "$@"',
        "scontrol": f"echo scontrol $* >> {tmp_path}/scontrol",
    }
    for name, line in stand_ins.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    known = environment()
    known |= {"PATH": f"{tmp_path}/bin:{known['PATH']}", "CODE": str(ROOT), "PYTHON": sys.executable}
    known |= {"OUT": f"{tmp_path}/out", "SLURM_JOB_ID": "4711", "SLURM_NNODES": "8"}
    done = subprocess.run(
        ["bash", str(file), *arguments],
        cwd=tmp_path,
        env=known | variables,
        capture_output=True,
        text=True,
        timeout=secs,
    )
    return done.returncode, done.stdout + done.stderr


def told(file, tmp_path, *arguments, code=0, **variables):
    """Options of srun, arguments of pretrain.py and XLA_FLAGS."""
    out = tmp_path / "told.json"
    assert job(file, tmp_path, *arguments, TELL=str(out), EXIT=str(code), **variables) == (code, "")
    options, command, flags = json.loads(out.read_text())
    assert command[:2] == [sys.executable, str(ROOT / "scripts" / "pretrain.py")]
    return options, command[2:], flags


def test_there_are_jobs():
    assert [file.stem for file in JOBS] == ["gasloc551m", "llama500m"]


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.stem)
def test_a_job_trains_its_preset_on_eight_gpus(file, tmp_path):
    options, arguments, _ = told(file, tmp_path, "--run.steps", "7", DATA="data/mine")
    config, resumed = pretrain.parse(arguments)
    expected = settings.update(
        settings.preset(file.stem),
        {"data.source": "data/mine", "run.steps": 7, "log.every": config.log.every},
    )
    assert config == expected and resumed is None
    assert config.mesh.devices == 8 and "%t" in options["output"]
    assert not (tmp_path / "scontrol").exists()


def test_a_job_that_ran_out_of_time_is_queued_again_and_goes_on(tmp_path):
    _, arguments, _ = told(JOBS[0], tmp_path, code=143)
    assert arguments[0] == "--config"
    assert (tmp_path / "scontrol").read_text() == "scontrol requeue 4711\n"
    saved = tmp_path / "out" / "4711" / "runs" / "gasloc551m-1" / "checkpoints" / "300"
    saved.mkdir(parents=True)
    assert told(JOBS[0], tmp_path)[1] == ["--resume"]
    assert (
        told(JOBS[0], tmp_path, SLURM_JOB_ID="4712")[1] == arguments
    )  # another job does not take this run up


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(75, "0", True), (137, "9", True), (75, "10", False), (2, "0", False), (130, "0", False)],
)
def test_a_job_that_lost_a_task_is_queued_again_a_few_times(tmp_path, code, restarts, again):
    told(JOBS[0], tmp_path, code=code, SLURM_RESTART_COUNT=restarts)
    assert (tmp_path / "scontrol").exists() == again


def test_xla_knows_the_flags(tmp_path):
    """It aborts the process at one that it does not know."""
    flags = {told(file, tmp_path)[2] for file in JOBS}
    assert len(flags) == 1 and "latency_hiding" in next(iter(flags))
    subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env=environment() | {"XLA_FLAGS": flags.pop()},
        check=True,
        timeout=60,
    )


def test_a_job_trains_over_two_tasks(tmp_path):
    corpus = write_corpus(tmp_path, tokens=4000)
    small = (
        "--model.vocab_size 61 --model.n_layers 1 --optimizer.name adamw --run.steps 4"  # compiles quickly
    )
    arguments = f"{small} --eval.every 0 --eval.final_batches 1 --log.tensorboard False".split()
    code, output = job(
        ROOT / "scripts" / "slurm" / "llama500m.sbatch", tmp_path, *arguments, secs=120,
        CONFIG="tiny", DATA=str(corpus), TASKS="2", SLURM_NNODES="2",
    )  # fmt: skip
    folder = tmp_path / "out" / "4711"
    first, second = ((folder / f"task-{task}.log").read_text() for task in (0, 1))
    assert code == 0, output + first + second
    assert "waiting for 2 processes at localhost:" in first and "(by Slurm)" in first and "report: " in first
    assert "report: " not in second and "Traceback" not in first + second
    assert json.loads((folder / "runs" / "tiny-1" / "config.json").read_text())["mesh"]["data"] == 2
    assert json.loads((folder / "runs" / "tiny-1" / "summary.json").read_text())["steps"] == 4
