"""Compiles GASLoC's exchange for 8 GPUs and prints, as JSON, what its fusions read and write."""

import json

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import gasloc_jax
import models
from scripts import bench_round
from tests.gpu_compile import deviceless
from tests.gpu_compile.hlo import entry_operations

WORKERS = 8


def main() -> None:
    mesh = Mesh(np.array(deviceless.devices(WORKERS)), ("worker",))
    config = bench_round.model(4.0)
    outer = gasloc_jax.gasloc(
        optax.sgd(0.7, momentum=0.9, nesterov=True), gasloc_jax.random_pairs(), "worker"
    )
    local_step = gasloc_jax.make_local_step(models.loss_fn(config), optax.sgd(1e-3))
    rounds = gasloc_jax.make_round(local_step, outer, mesh)
    state = rounds.abstract_state(models.abstract_params(config))
    specs = rounds.specs(state)

    # As `Round.run` gives them: the anchor is an argument of its own, the parameters before the round's local steps.
    def exchange(state, anchor):
        return rounds.worker.exchange(state._replace(anchor=anchor))

    mapped = rounds._mapped(exchange, (specs, rounds._over_workers), specs)
    compiled = deviceless.compile_on(mesh, jax.jit(mapped, donate_argnums=0), state, state.params)
    operations = entry_operations(compiled.as_text())
    line = {
        "params_bytes": 4 * models.num_params(config),
        "fusion_bytes": sum(operation.bytes for operation in operations if operation.name == "fusion"),
        "operations": sorted({operation.name for operation in operations}),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    print(deviceless.run("tests.gpu_compile.compile_exchange"))
