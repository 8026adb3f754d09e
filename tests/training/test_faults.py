"""Processes that are lost, stopped or told to end, as whole runs over loopback: all end within seconds, and go on later."""

import contextlib
import re
import resource
import signal
import time

import pytest

from scripts.chaos import Group, checkpoints, last_step, sealed
from tests.training.runs_for_tests import environment, long, options, tiny, write_corpus
from training.config import update

FILE_BYTES = 1 << 14  # less than a checkpoint's arrays, more than a run writes otherwise
SECS = 240.0  # two processes start and compile beside other tests
ROUNDS = {
    "outer.name": "gasloc", "outer.local_steps": 2, "mesh.worker": 2, "mesh.data": 1, "optimizer.name": "adams",
    "run.steps": 4000, "checkpoint.every": 4, "run.folder": "run",
}  # fmt: skip
STEPS = {
    "mesh.data": 2, "optimizer.name": "adams", "run.steps": 4000, "checkpoint.every": 5, "run.folder": "run",
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), tokens=60_000)


class Run(Group):
    """Two processes that train as one, in a folder of their own."""

    def __init__(self, folder, *arguments):
        super().__init__(folder, arguments, 2, environment())
        self.folder = folder / "run"

    def wait(self, condition):
        self.wait_until(condition, SECS)

    def steps(self):
        return last_step(self.folder)


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(Run(tmp_path, *arguments))


def test_the_others_end_when_one_is_killed_and_the_run_goes_on(corpus, start):
    """Process 0, whose end JAX's own service in the others does not survive either."""
    lost, run = 0, start(*options(update(tiny(corpus), STEPS)))
    run.wait(lambda: run.steps() >= 12)
    run.processes[lost].kill()
    other = 1 - lost
    assert run.processes[other].wait(20) == 75, run.told(other)
    told = run.told(other)
    assert f"error: process {lost} (" in told and "was lost" in told and "--resume" in told
    assert "Traceback" not in told
    saved = checkpoints(run.folder)[-1]
    again = start("--resume", "run", "--run.steps", str(saved + 4))
    assert again.codes(SECS) == [0, 0], again.told(0) + again.told(1)
    assert f"going on from step {saved}" in again.told(0)
    assert again.steps() == saved + 4


@pytest.mark.parametrize(
    "where",
    [
        {
            "log.every": 3,
            "checkpoint.every": 0,
        },  # lines and evaluations far apart: nobody waits for one of them
        {"eval.every": 1, "eval.batches": 0, "checkpoint.every": 1, "checkpoint.keep": 100},
    ],
    ids=["in a step", "in an evaluation or a save"],
)
def test_a_signal_to_one_process_ends_all_after_the_same_step(corpus, start, where):
    """Case 19 (a) and (c); half an average is not logged."""
    run = start(*options(update(tiny(corpus), STEPS | where)))
    run.wait(lambda: run.steps() >= 6)
    run.processes[1].send_signal(signal.SIGTERM)
    assert run.codes(20) == [143, 143], run.told(0) + run.told(1)
    saved, told = checkpoints(run.folder), run.told(0)
    assert f"saved step {saved[-1]}; to go on, in all 2 processes" in told
    assert saved == ([saved[-1]] if where["checkpoint.every"] == 0 else list(range(1, saved[-1] + 1)))
    assert len(set(re.findall(r"validation loss .* \((.*) tokens\)", told))) == int("eval.every" in where)


def test_a_signal_while_the_first_step_is_compiled_ends_all_at_once(corpus, start):
    """Case 19 (b): there is nothing to save, and a compilation may take longer than a scheduler's grace time."""
    run = start(*options(update(tiny(corpus), STEPS)))
    run.wait(lambda: "compiling" in run.told(0))
    run.processes[1].send_signal(signal.SIGTERM)
    began = time.monotonic()
    codes = run.codes(20)
    if "first step after" not in run.told(0):  # it was still compiling
        assert codes == [143, 143] and time.monotonic() - began < 10
        assert "nothing is lost by that" in run.told(0) and not checkpoints(run.folder)
    assert not any(
        line.startswith(("error:", "Traceback")) for i in range(2) for line in run.told(i).splitlines()
    )


@pytest.mark.parametrize("full", [0, pytest.param(1, marks=long)])
def test_a_full_disk_ends_all_and_leaves_the_checkpoints_whole(corpus, start, full):
    """Of either process; a limit on the size of its files stands for the disk."""
    # Equal arrays are process 0's to write; in rounds each process has its own.
    run = start(*options(update(tiny(corpus), (STEPS, ROUNDS)[full])))
    run.wait(lambda: len(sealed(run.folder)) > 0)
    resource.prlimit(run.processes[full].pid, resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    codes = run.codes(60)
    told = run.told(full)
    assert codes == [74, 74], run.told(0) + run.told(1)
    last = told.splitlines()[-1]
    assert last.startswith("error: the run's folder") and "writable, with space left" in last
    assert f"error: process {full}" in run.told(1 - full)
    saved = sealed(run.folder)[-1]
    again = start("--resume", "run", "--run.steps", str(saved + 2))
    assert again.codes(SECS) == [0, 0], again.told(0) + again.told(1)
    assert f"going on from step {saved}" in again.told(0)
    assert not list((run.folder / "checkpoints").glob("*tmp*")) and not (run.folder / "damaged").exists()


@long
def test_a_full_disk_that_a_line_finds_first(corpus, start):
    run = start(*options(update(tiny(corpus), STEPS | {"checkpoint.every": 0})))
    run.wait(lambda: run.steps() >= 3)
    resource.prlimit(run.processes[0].pid, resource.RLIMIT_FSIZE, (2048, 2048))
    assert run.codes(60) == [74, 74], run.told(0) + run.told(1)


@long
def test_a_folder_that_vanishes_is_one_clear_error(corpus, start):
    run = start(*options(update(tiny(corpus), STEPS)))
    run.wait(lambda: len(sealed(run.folder)) > 0)
    run.folder.rename(run.folder.with_name("elsewhere"))
    assert run.codes(60) == [74, 74], run.told(0) + run.told(1)
    assert "must be there and writable" in run.told(0) and "Traceback" not in run.told(0) + run.told(1)


def test_a_process_that_stands_still_is_named_and_ends_the_run(corpus, start):
    run = start(*options(update(tiny(corpus), ROUNDS | {"run.hang_secs": 2.0, "checkpoint.every": 0})))
    run.wait(lambda: run.steps() >= 140)  # of the last 50 rounds none was compiled
    run.processes[1].send_signal(signal.SIGSTOP)
    assert run.processes[0].wait(40) == 75, run.told(0)
    told = run.told(0)
    assert "error: no progress for" in told and "process 1 (" in told and "did not answer" in told
    assert "Thread 0x" in told  # all stacks
    run.processes[1].send_signal(signal.SIGCONT)
    assert run.processes[1].wait(20) == 75, run.told(1)
