"""One of several real processes, a worker each: runs every case and writes what its own worker ended with.

Usage: python -m tests.gasloc_jax.gossip_process PORT NUM_PROCESSES INDEX FOLDER
"""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gasloc_jax as gj
from tests.gasloc_jax.side_by_side import loss_fn, make_batches, make_params

ROUNDS, MOST = 5, 3
CASES = {
    "pairs": lambda: (gj.gasloc(topology=gj.random_pairs(seed=4), axis_name="worker"), {}),
    "ring int8 fragments": lambda: (
        gj.gasloc(
            topology=gj.random_ring(), axis_name="worker", payload_dtype=jnp.int8, payload_block_size=16
        ),
        {"fragments": 2, "delay": 1},
    ),
    "diloco": lambda: (gj.diloco(axis_name="worker"), {}),
}
# Few cases for each number of processes: starting and compiling is what costs.
CASES_OF = {2: ("pairs", "diloco"), 3: ("pairs", "ring int8 fragments"), 4: ("pairs",)}


def run(name: str, num_workers: int) -> tuple[gj.Round, gj.RoundState]:
    """Five rounds in which workers take different numbers of steps, on all devices there are."""
    outer, options = CASES[name]()
    mesh = gj.make_mesh(num_workers, devices=jax.devices()[:num_workers])
    round = gj.make_round(gj.make_local_step(loss_fn, optax.adamw(0.02)), outer, mesh, **options)
    state = round.init(make_params())
    for t in range(ROUNDS):
        steps = [2 + (t + n) % (MOST - 1) for n in range(num_workers)]
        state, _ = round(state, make_batches(num_workers, MOST, seed=t), steps)
    return round, state


def main(port: str, num_processes: int, index: int, folder: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, index)
    assert jax.device_count() == num_processes
    found = {}
    for name in CASES_OF[num_processes]:
        round, state = run(name, num_processes)
        for path, x in state.params.items():
            (shard,) = x.addressable_shards
            assert shard.index[0].start == index
            found[f"{name}/{path}"] = np.asarray(shard.data)
        for path, x in round.mean_params(state).items():
            found[f"{name}/mean {path}"] = np.asarray(x.addressable_data(0))
        found[f"{name}/distance"] = np.asarray(round.consensus_distance(state).addressable_data(0))
    try:
        round.init(make_params(seed=index))
    except ValueError as error:
        found["error"] = np.array(str(error))
    np.savez(Path(folder) / f"{index}.npz", **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
