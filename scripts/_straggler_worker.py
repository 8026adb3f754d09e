"""One worker of bench_straggler.py: trains in rounds by one method, and notes when it computed and when it waited.

    {"prepare": METHOD}                           -> {"bytes": that a worker sends in a round}
    {"rounds": n, "folder": path}                 -> {"rounds": [[start, steps done, exchange done, steps]]}

The times are this worker's, on the clock that all processes of a machine share. Its parameters after every few rounds go to
the folder, so that looking at the model costs the run nothing.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import gasloc_jax
import models
from scripts.bench_gossip import Task as Model
from training._outer_section import OuterConfig
from training._pace import ADAPT_EVERY, Pace
from training._processes import gathered
from training.corpus import prepare_stdlib
from training.data import make_loader
from training.distributed import join
from training.mesh import WORKER_AXIS
from training.workers import answer, commands


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is the same for all methods and workers."""

    local_steps: int = 30
    """H of every worker; with adapted steps the most."""
    rows: int = 4
    """Sequences of 128 bytes that a worker computes on in a step."""
    step_ms: float = 40.0
    """Least time of a local step; a worker that is faster sleeps. Four processes on two cores take turns of uneven length,
    and what is to be seen is what the links do: so all compute equally fast, as nodes of their own would."""
    learning_rate: float = 3e-3
    """Of the inner AdamW, constant after 100 steps of warm-up, so that methods can be compared at any time."""
    every: int = 5
    """Rounds between two looks at the parameters."""
    seed: int = 0
    """Of the parameters, the data and the random pairs."""


def _gasloc(**options: Any) -> Callable[[int], gasloc_jax.OuterOptimizer]:
    return lambda seed: gasloc_jax.gasloc(None, gasloc_jax.random_pairs(seed), WORKER_AXIS, **options)


# Name -> the outer optimizer for a seed, and whether local steps follow from measured times.
METHODS: dict[str, tuple[Callable[[int], gasloc_jax.OuterOptimizer], bool]] = {
    "diloco": (lambda seed: gasloc_jax.diloco(axis_name=WORKER_AXIS), False),
    "diloco_int8": (lambda seed: gasloc_jax.diloco(axis_name=WORKER_AXIS, payload_dtype=jnp.int8), False),
    "gasloc_1peer": (_gasloc(), False),
    "gasloc_1peer_adapt": (_gasloc(), True),
    "gasloc_1peer_int8": (_gasloc(payload_dtype=jnp.int8), False),
    "gasloc_1peer_int8_adapt": (_gasloc(payload_dtype=jnp.int8), True),
}


def model() -> models.LlamaConfig:
    return Model().model()


class Trainer:
    """Everything that a run needs, made once for each method."""

    def __init__(self, task: Task, method: str):
        make, adapt = METHODS[method]
        outer, workers = make(task.seed), jax.process_count()
        self.task, config = task, model()
        warm_up = optax.linear_schedule(0.0, task.learning_rate, 100)
        inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(warm_up, b2=0.95, weight_decay=0.1))
        local = gasloc_jax.make_local_step(models.loss_fn(config), inner)
        self.round = gasloc_jax.make_round(local, outer, gasloc_jax.make_mesh(workers))
        self.params = models.init_params(config, task.seed)
        settings = OuterConfig(name="gasloc", local_steps=task.local_steps, adapt=adapt)
        own = slice(jax.process_index(), jax.process_index() + 1)
        self.pace = Pace(settings, outer.pool(workers), own)
        self.loader = make_loader(
            prepare_stdlib().train,
            global_batch=task.rows * workers,
            length=config.max_length,
            seed=task.seed,
            num_workers=workers,
            process_index=jax.process_index(),
            process_count=workers,
        )
        self.read = self.batches()

    def batches(self) -> Any:
        """H batches of this worker; one that takes fewer steps leaves the rest out."""
        read = np.stack([next(self.loader)["tokens"] for _ in range(self.task.local_steps)])[None]
        return {"tokens": jax.make_array_from_process_local_data(self.round.batch_sharding, read)}

    def one(self, state: Any, counts: list[int]) -> tuple[Any, list[float]]:
        start = time.monotonic()
        state, metrics = self.round.local(state, self.read, counts)
        self.read = self.batches()  # the next round's, while this one computes
        jax.block_until_ready((state, metrics))
        least_secs = counts[jax.process_index()] * self.task.step_ms * 1e-3
        time.sleep(max(0.0, start + least_secs - time.monotonic()))
        stepped = time.monotonic()
        state = jax.block_until_ready(self.round.exchange(state))
        return state, [start, stepped, time.monotonic()]

    def run(self, rounds: int, folder: pathlib.Path) -> list[list[float]]:
        state, noted = self.round.init(self.params), []
        for number in range(rounds):
            counts = self.pace.steps_of_next_round()
            state, times = self.one(state, counts)
            noted.append([*times, counts[jax.process_index()]])
            self.pace.add(number, counts, times[1] - times[0], times[2] - times[1])
            if (number + 1) % self.task.every == 0:
                own = jax.tree.map(lambda x: x.addressable_data(0)[0], state.params)
                leaves = jax.device_get(jax.tree.leaves(own))
                np.savez(folder / f"{number + 1}-{jax.process_index()}.npz", *leaves)
        return noted


def main(task: Task) -> None:
    join()
    trainer: Trainer | None = None
    answer(parameters=models.num_params(model()), jax=jax.__version__)
    for command in commands():
        if "prepare" in command:
            if trainer is not None:
                trainer.loader.close()
            trainer = None  # frees the last one
            trainer = Trainer(task, command["prepare"])
            state = trainer.round.init(trainer.params)
            gathered(
                np.zeros((1, ADAPT_EVERY, 2), np.float32)
            )  # compiles what the first choice of steps will gather with
            for _ in range(8):  # compiles, and lets all pairs meet
                state, _ = trainer.one(state, [1] * jax.process_count())
            answer(bytes=trainer.round.wire_bytes(trainer.params))
        else:
            assert trainer is not None
            answer(rounds=trainer.run(command["rounds"], pathlib.Path(command["folder"])))
    if trainer is not None:
        trainer.loader.close()


if __name__ == "__main__":
    main(tyro.cli(Task, description=__doc__))
