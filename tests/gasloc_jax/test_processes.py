"""Real processes over loopback give the numbers of one process with as many virtual devices."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.gasloc_jax.gossip_process import CASES_OF, run
from tests.helpers import TOLERANCES
from tests.quick_compile import ENVIRONMENT, quick_compile  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(num_processes: int, folder: Path) -> list[subprocess.Popen]:
    port, environment = free_port(), {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | ENVIRONMENT
    command = [sys.executable, "-m", "tests.gasloc_jax.gossip_process", str(port), str(num_processes)]
    return [
        subprocess.Popen(
            [*command, str(index), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(num_processes)
    ]


@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_processes_equal_virtual_devices(num_processes, tmp_path):
    """Every process draws the same graphs without a word; otherwise they would wait for each other until the limit."""
    processes = start(num_processes, tmp_path)
    expected = {name: run(name, num_processes) for name in CASES_OF[num_processes]}  # while the processes run
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * num_processes, outputs
    rtol, atol = TOLERANCES["params"]
    for index in range(num_processes):
        found = np.load(tmp_path / f"{index}.npz")
        for name, (round, state) in expected.items():
            # int8 may round a tie the other way; everything else differs by the order of sums.
            kind = {"rtol": rtol, "atol": 0.02 if "int8" in name else atol}
            mean = round.mean_params(state)
            for path, x in state.params.items():
                np.testing.assert_allclose(found[f"{name}/{path}"][0], np.asarray(x)[index], **kind)
                np.testing.assert_allclose(found[f"{name}/mean {path}"], np.asarray(mean[path]), **kind)
            distance = float(round.consensus_distance(state))
            np.testing.assert_allclose(found[f"{name}/distance"], distance, **kind)
        # Each process had initialised from its own seed: told, not trained.
        assert "all workers must start from the same parameters" in str(found["error"])
        assert f"worker(s) {list(range(1, num_processes))} differs" in str(found["error"])
