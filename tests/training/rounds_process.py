"""One of two real processes, a worker each, that train in rounds: process 1 is slow, and the text ends inside a round.

Usage: python -m tests.training.rounds_process PORT INDEX CORPUS OUT
"""

import dataclasses
import json
import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.experimental import io_callback

import gasloc_jax
import models
from tests.training.runs_for_tests import tiny
from training.mesh import WORKER_AXIS
from training.outer import local_step, make_outer
from training.train import build, start

# A step itself takes milliseconds: next to the nap it is fast on any machine, however loaded.
PROCESSES, STEPS, NAP_SECS = 2, 31, 0.25
BOUNDS = {"outer.local_steps": 3, "outer.fewest_steps": 1}


def settings_of(corpus):
    """Rounds of three steps of two sequences, ten whole ones and one of a single step, adapted."""
    rounds = {
        "optimizer.name": "adamw", "outer.name": "gasloc", "outer.adapt": True, **BOUNDS, "mesh.worker": PROCESSES,
        "mesh.data": 1, "data.global_batch": 2, "run.steps": STEPS,
    }  # fmt: skip
    return tiny(corpus, **rounds)


def slowed(step):
    """The same program everywhere: how long a step takes is found out where it runs."""

    def nap(loss):
        time.sleep(NAP_SECS * jax.process_index())
        return np.zeros_like(loss)

    def slow(params, state, batch):
        params, state, measured = step.step(params, state, batch)
        measured["loss"] += io_callback(nap, measured["loss"], measured["loss"])
        return params, state, measured

    return gasloc_jax.LocalStep(step.init, slow)


def slow_in_process_1(setup):
    slow_step = slowed(local_step(models.loss_fn(setup.model), setup.tx, 1))
    round = gasloc_jax.make_round(slow_step, make_outer(setup.config), setup.mesh, WORKER_AXIS)
    return dataclasses.replace(setup, step=round)


def main(port: str, index: int, corpus: str, out: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, index)
    setup, told, rounds, read = slow_in_process_1(build(settings_of(corpus))), [], [], {}
    method, state = setup.method, start(setup)
    method.check(0, told.append)
    while state.step < STEPS:
        steps = method.steps_ahead(state.step)
        batch = method.read(state.loader, steps)
        (shard,) = batch["tokens"].addressable_shards
        read[str(len(rounds))] = np.asarray(shard.data)[0]
        state.params, state.opt_state, measured = method.advance(state.params, state.opt_state, batch, steps)
        state.step += steps
        (measured,) = method.collect([measured])
        found = {name: float(measured[name]) for name in ("loss", "loss_worker_max", "skipped")}
        rounds.append({"step": state.step, "local_steps": measured["local_steps"], **found, **method.times()})
    mean = method.model(state.params, state.opt_state)
    finite = all(bool(np.isfinite(x.addressable_data(0)).all()) for x in jax.tree.leaves(mean))
    found = {
        "told": told,
        "rounds": rounds,
        "finite": finite,
        "state": method.get_state(),
        "position": state.loader.step,
    }
    np.savez(f"{out}/{index}.npz", **read)
    with open(f"{out}/{index}.json", "w") as file:
        json.dump(found, file)
    state.loader.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
