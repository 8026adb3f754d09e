"""Two real processes train in rounds over loopback: a slow one takes fewer steps, and a text that ends stops nobody."""

import json
import math
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.training.rounds_process import BOUNDS, PROCESSES, STEPS, settings_of
from tests.training.runs_for_tests import ROOT, environment
from training.data import make_loader
from training.token_file import open_tokens, write_tokens

LENGTH, WINDOWS = 32, 11  # five batches of two sequences an epoch: it ends in every other round of three


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    ids = np.random.default_rng(0).integers(0, 61, WINDOWS * LENGTH + 1)
    for name in ("train", "validation"):
        write_tokens(folder / f"{name}.tokens", [ids], 61, "test")
    return folder


@pytest.fixture(scope="module")
def ended(corpus, tmp_path_factory):
    """What both processes wrote; they have 60 seconds."""
    out = tmp_path_factory.mktemp("out")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "tests.training.rounds_process", str(port)]
    processes = [
        subprocess.Popen(
            [*command, str(index), str(corpus), str(out)],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(PROCESSES)
    ]
    try:
        told = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * PROCESSES, told
    return [
        (json.loads((out / f"{index}.json").read_text()), np.load(out / f"{index}.npz"))
        for index in range(PROCESSES)
    ]


def test_slow_process_takes_fewer_steps(ended):
    """Both choose the same from what both measured; a process that asked its own clock alone would wait forever."""
    (one, _), (two, _) = ended
    assert one == two
    fast, slow = one["state"]["local_steps"]
    assert BOUNDS["outer.fewest_steps"] <= slow < 3 <= fast <= BOUNDS["outer.most_steps"]
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
