"""Two real processes train in rounds over loopback: a slow one takes fewer steps, a text that ends stops nobody, and from
the command line one of them writes.
"""

import json
import math
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.training.rounds_process import BOUNDS, PROCESSES, STEPS, settings_of
from tests.training.runs_for_tests import ROOT, environment, options
from training import metrics
from training.config import update
from training.data import make_loader
from training.distributed import join
from training.mesh import prepare_devices
from training.token_file import open_tokens, write_tokens

LENGTH, WINDOWS = 32, 11  # five batches of two sequences an epoch: it ends in every other round of three


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    ids = np.random.default_rng(0).integers(0, 61, WINDOWS * LENGTH + 1)
    for name in ("train", "validation"):
        write_tokens(folder / f"{name}.tokens", [ids], 61, "test")
    return folder


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def together(*arguments_of_each, variables=({}, {}), cwd=ROOT, secs=100):
    """Runs the processes at the same time; returns (exit code, output, errors) of each."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *map(str, arguments)],
            cwd=cwd,
            env=environment() | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments, own in zip(arguments_of_each, variables, strict=True)
    ]
    try:
        told = [process.communicate(timeout=secs) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(processes, told, strict=True)]


@pytest.fixture(scope="module")
def ended(corpus, tmp_path_factory):
    """What both processes wrote."""
    out, port = tmp_path_factory.mktemp("out"), free_port()
    processes = range(PROCESSES)
    found = together(*(["tests.training.rounds_process", port, index, corpus, out] for index in processes))
    assert [code for code, _, _ in found] == [0] * PROCESSES, found
    return [
        (json.loads((out / f"{index}.json").read_text()), np.load(out / f"{index}.npz"))
        for index in processes
    ]


def test_slow_process_takes_fewer_steps(ended):
    """Both choose the same from what both measured; a process that asked its own clock alone would wait forever."""
    (one, _), (two, _) = ended
    assert one == two
    fast, slow = one["state"]["local_steps"]
    assert BOUNDS["outer.fewest_steps"] <= slow < fast <= BOUNDS["outer.local_steps"]
    assert one["told"][0].startswith("local steps of the workers: [3, 3] -> ")
    rounds = one["rounds"]
    assert [r["step"] for r in rounds] == [*range(3, STEPS, 3), STEPS]
    # Five timed rounds after the one that compiles, and then fewer steps of the slow one, but for the last round of one.
    assert [r["local_steps"] for r in rounds[:6]] == [[3, 3]] * 6
    assert all(r["local_steps"][1] < 3 for r in rounds[6:]) and rounds[-1]["local_steps"] == [1, 1]
    assert "local_secs" not in rounds[0]
    own, waited = (np.sum([r[name] for r in rounds[1:6]], axis=0) for name in ("local_secs", "exchange_secs"))
    assert own[1] > own[0] and waited[1] < waited[0]  # each worker's own time, and the fast one waits
    assert one["finite"] and all(math.isfinite(r["loss"]) and r["skipped"] == 0 for r in rounds)


def test_text_that_ends_inside_a_round_stops_nobody(ended, corpus):
    """Case 14: the next epoch begins, at the same step everywhere, and each process reads rows of its own."""
    config = settings_of(corpus)
    loader = make_loader(
        open_tokens(corpus / "train.tokens"),
        global_batch=2,
        length=LENGTH,
        seed=config.run.seed,
        num_workers=2,
    )
    assert loader.batches_per_epoch == 5 and loader.unused_per_epoch == 1
    for number, r in enumerate(ended[0][0]["rounds"]):
        whole = [next(loader)["tokens"] for _ in range(max(r["local_steps"]))]
        for worker, (_, read) in enumerate(ended):
            np.testing.assert_array_equal(read[str(number)][: len(whole), 0], [x[worker] for x in whole])
    assert loader.epoch >= 6 and [found["position"] for found, _ in ended] == [loader.step] * 2
    loader.close()


def group(count=PROCESSES):
    port = free_port()
    return [
        {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}
        for index in range(count)
    ]  # fmt: skip


def test_pretrain_over_two_processes(corpus, tmp_path):
    """One of them writes: each record stands once, in one run's folder; the slow one's worker takes fewer steps."""
    changes = {"run.steps": 21, "eval.every": 12, "checkpoint.every": 12, "log.tensorboard": True}
    command = ["tests.training.pretrain_process", *options(update(settings_of(corpus), changes))]
    (first, told, errors), (second, silent, other_errors) = together(
        command, command, variables=group(), cwd=tmp_path
    )
    assert first == second == 0, errors + other_errors
    assert [
        line for line in silent.splitlines() if "[Gloo]" not in line
    ] == []  # that one is printed below JAX
    assert "Traceback" not in errors + other_errors
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["tiny-1"]
    folder = tmp_path / "runs" / "tiny-1"
    records = metrics.read(folder)
    logged, checked = ([r for r in records if name in r] for name in ("loss", "validation_loss"))
    assert [r["step"] for r in logged] == list(range(3, 22, 3)) and [r["step"] for r in checked] == [12, 21]
    fast, slow = logged[-1]["local_steps"]
    assert 1 <= slow < fast <= 3 and f"{slow} to {fast} local steps" in told
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert told.count("report: ") == 1 and told.count("Summary") == 1
    assert json.loads((folder / "summary.json").read_text())["local_steps"] == [fast, slow]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["12", "21"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "got no JAX_COORDINATOR_ADDRESS and no JAX_PROCESS_ID. Set them, or unset JAX_NUM"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "got no JAX_NUM_PROCESSES and no JAX_PROCESS_ID"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, r"in 0\.\..* = 1, got 2"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "whole number, got 'two'"),
        ({"JAX_COORDINATOR_ADDRESS": "a", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "got 'a'. Write host:port"),
    ],
)  # fmt: skip
def test_group_that_is_half_described(variables, message):
    with pytest.raises(ValueError, match=message):
        join(variables)


def test_no_group(corpus):
    """A batch script of a Slurm job with several tasks is one process: srun makes the others."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert (
        join({})
        == join(slurm)
        == join(slurm | {"SLURM_STEP_NODELIST": "a", "SLURM_STEP_NUM_TASKS": "1"})
        == 1
    )
    with pytest.raises(ValueError, match=r"mesh.worker must be divisible by the processes, 2, got 3\. Use 4"):
        prepare_devices(1, "cpu", islands=3, processes=2)
