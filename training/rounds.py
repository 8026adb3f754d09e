"""Training in rounds: every island takes its local steps, then they exchange by an outer optimizer (gasloc_jax).

Data: in each nominal step the global batch is dealt to the workers, so what one reads in an epoch no other does. For a
round all rows up to the largest number of steps are read at once; a worker that takes fewer leaves the rest of its rows
out, which `sequences_left_out` counts. The position of the data is that of the last row read for anyone, so a resumed run
reads on exactly there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import gasloc_jax
import models
import scape_jax
from training._pace import Pace
from training._processes import gathered
from training.data import BatchLoader
from training.evaluate import evaluate_each
from training.mesh import AXIS_NAME, WORKER_AXIS
from training.method import Sent, resize_workers

if TYPE_CHECKING:
    from training.train import Setup


class Rounds:
    """`Method` of an outer optimizer: params are those of every worker, (W, *shape), opt_state is the rest of the state."""

    unit = "round"

    def __init__(self, setup: Setup):
        config = setup.config
        self._config, self._outer, self._round = config, config.outer, setup.step
        self._model, self._params = setup.model, models.abstract_params(setup.model)
        self._workers = config.mesh.worker
        self._here = self._workers // jax.process_count()
        own = slice(jax.process_index() * self._here, (jax.process_index() + 1) * self._here)
        self._pace = Pace(self._outer, self._round.worker.outer.pool(self._workers), own)
        self._tx = setup.tx
        self._island_bytes = 0.0
        self._left_out = 0
        self._last_steps = self._outer.steps_per_round  # nominal ones, of the last round
        self._told: set[int] = set()  # workers whose first loss was told
        self._note: Callable[[str], Any] = lambda text: None
        self._counts: list[int] = []  # of the round that was read last
        self._updates: np.ndarray | None = None  # of each worker, as last collected
        self._round_bytes = self._round.wire_bytes(self._params)
        dense = scape_jax.wire_bytes(self._params, num_workers=self._workers, method="all_reduce")
        self._dense_bytes = dense.dense_total_bytes
        # On virtual CPU devices programs with collectives must not be in flight together: see gasloc_jax.Round.
        self._waits = setup.mesh.devices.flat[0].platform == "cpu"
        self.in_flight = 0 if self._waits or self._outer.measures else 2
        self._telemetry: Any = None  # a program, once it is asked for
        # Each worker's own, so that nobody waits for all in every round; `collect` puts them together for a line.
        self._figures = jax.jit(_figures, out_shardings=NamedSharding(setup.mesh, PartitionSpec(WORKER_AXIS)))

    @property
    def local_steps(self) -> list[int]:
        """H_i of every worker in a whole round."""
        return self._pace.local_steps

    def check(self, step: int, note: Callable[[str], Any]) -> None:
        self._note = note
        processes = jax.process_count()
        if self._workers % processes:
            raise ValueError(
                f"mesh.worker must be divisible by the processes, {processes}, got {self._workers}. An island lies in "
                "one process."
            )
        problem = self._outer.last_round_problem(step, self._config.run.steps)
        if problem and step < self._config.run.steps:
            raise ValueError(problem)

    def begin(self, params: Any) -> tuple[Any, Any]:
        self._updates = None
        return _split(self._round.init(params))

    def abstract(self) -> tuple[Any, Any]:
        return _split(self._round.abstract_state(self._params))

    def resize(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        devices, optimizer = self._config.mesh.data, self._config.optimizer
        state = opt_state._replace(params=params)
        inner = jax.vmap(lambda tree: resize_workers(tree, devices, optimizer))(state.inner)
        return _split(self._round.resize(state._replace(inner=inner)))

    def steps_ahead(self, step: int) -> int:
        return min(self._outer.steps_per_round, self._config.run.steps - step)

    def read(self, loader: BatchLoader, steps: int) -> Any:
        """(W, H, batch, length + 1), always of one shape: what no worker takes is left zero."""
        self._counts = [min(count, steps) for count in self._pace.steps_of_next_round()]
        if steps != self._outer.steps_per_round:
            self._note(f"the last round takes the {steps} steps that are left")
        taken, most = max(self._counts), self._outer.steps_per_round
        read = [next(loader) for _ in range(taken)]
        rows = len(read[0]["tokens"])
        here = self._here
        self._left_out += (self._workers * taken - sum(self._counts)) * (rows // here)
        sharding = self._round.batch_sharding
        placed = {}
        for name in read[0]:
            whole = np.zeros((here, most, rows // here, *read[0][name].shape[1:]), read[0][name].dtype)
            for i, batch in enumerate(read):
                whole[:, i] = batch[name].reshape(here, rows // here, *batch[name].shape[1:])
            placed[name] = jax.make_array_from_process_local_data(sharding, whole)
        return placed

    def before_first(self, params: Any, opt_state: Any, batch: Any, left: int) -> None:
        self._note("compiling the round ...")

    def advance(self, params: Any, opt_state: Any, batch: Any, steps: int) -> tuple[Any, Any, dict[str, Any]]:
        state, counts = opt_state._replace(params=params), self._counts
        known: dict[str, Any] = {"local_steps": counts}
        if self._outer.measures:
            state, measured = self._timed(state, batch, counts)
        else:
            state, measured = self._round(state, batch, counts)
        rows = self._config.data.global_batch // self._workers
        known["tokens"] = sum(counts) * rows * self._config.data.length
        per_worker = {name: measured[name] for name in ("loss", "grad_norm", "clip_factor")}
        per_worker["dropped"] = measured["skipped"]
        figures = self._figures(per_worker, state.steps, state.skipped, _skipped(state))
        if self._waits:
            jax.block_until_ready(figures)
        return *_split(state), {"figures": figures, **known}

    def collect(self, window: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Communicates 28 bytes a worker and round."""
        names, dtypes = zip(*((name, x.dtype) for name, x in window[0]["figures"].items()), strict=True)
        mine = np.array(
            [[_own(measured["figures"][name]) for name in names] for measured in window], np.int32
        )
        whole = gathered(np.ascontiguousarray(mine.transpose(2, 0, 1)))  # (W, rounds, figures)
        collected: list[dict[str, Any]] = []
        lost: set[int] = set()
        for i, measured in enumerate(window):
            found = {name: whole[:, i, k].view(dtypes[k]) for k, name in enumerate(names)}
            known = {name: value for name, value in measured.items() if name != "figures"}
            sound = _sound(found)
            if self._updates is not None:
                sound &= found["updates"] > self._updates  # else all its steps were skipped
            self._updates = found["updates"]
            lost |= set(np.flatnonzero(~sound).tolist())
            self._tell_lost(np.flatnonzero(~sound).tolist(), found["dropped"])
            told = {"dropped_workers": sorted(lost), "nothing_sound": not sound.any()}
            collected.append(_over_workers(found, sound) | known | told)
        return collected

    def _tell_lost(self, lost: list[int], dropped: np.ndarray) -> None:
        """Once for each worker: later ones are in metrics.jsonl."""
        for n in lost:
            if n not in self._told:
                what = "parameters not finite, its round was dropped"
                if not dropped[n]:
                    what = "a gradient was not finite or a loss far above the usual one, and its steps were skipped"
                self._note(f"worker {n}: {what}")
                self._told.add(n)

    def skipped(self, opt_state: Any) -> int:
        return 0  # of each worker its own, which `collect` puts together

    def failure(self, step: int, opt_state: Any) -> str | None:
        found = (opt_state.round, opt_state.skipped, opt_state.steps, _skipped(opt_state))
        rounds, dropped, steps, skipped = gathered(np.stack([_own(x) for x in found], axis=1)).T
        if np.any((dropped < rounds) & (skipped < steps)):
            return None
        return (
            f"every round of every worker was dropped, or all its steps skipped: in {rounds.max()} rounds none had finite "
            "gradients and parameters. Use a smaller --schedule.learning_rate, and look at the data."
        )

    def sent(self, step: int, steps: int) -> Sent:
        line: dict[str, Any] = {"wire_bytes": self._round_bytes}
        if self._config.mesh.data > 1:
            inner = [
                self._tx.wire(self._params, num_workers=self._config.mesh.data, step=s).total_bytes
                for s in range(step - steps + 1, step + 1)
            ]
            self._island_bytes += sum(inner)
            line["island_bytes_total"] = self._island_bytes
        self._last_steps = steps
        if len(set(self.local_steps)) > 1 or self._left_out:
            line["sequences_left_out"] = self._left_out
        return Sent(self._round_bytes, steps * self._dense_bytes, line)

    def sent_per_step(self, step: int) -> Sent:
        return Sent(self._round_bytes / self._last_steps, self._dense_bytes, {})

    def telemetry(self, opt_state: Any) -> dict[str, Any]:
        """Means over the islands of SCAPE's figures; of max_age the largest. A few scalars are communicated."""
        if self._telemetry is None:
            specs, whole = self._round.specs(opt_state).inner, PartitionSpec()
            mapped = jax.shard_map(
                _telemetry, mesh=self._round.mesh, in_specs=(specs,), out_specs=whole, check_vma=False
            )
            self._telemetry = jax.jit(mapped)
        figures = self._telemetry(opt_state.inner)
        return jax.block_until_ready(figures) if self._waits else figures

    def times(self) -> dict[str, Any]:
        return self._pace.line()

    def model(self, params: Any, opt_state: Any) -> Any:
        """The mean over workers; one all-reduce of the parameters."""
        return self._round.mean_params(opt_state._replace(params=params))

    def disagreement(
        self, params: Any, opt_state: Any, batches: Any, should_stop: Callable[[], bool]
    ) -> dict[str, float] | None:
        state = opt_state._replace(params=params)
        found = {"consensus_distance": float(self._round.consensus_distance(state))}
        if self._outer.evaluate_workers:
            mesh = self._round.mesh
            losses = evaluate_each(
                self._model, params, batches, mesh, WORKER_AXIS, AXIS_NAME, should_stop=should_stop
            )
            if losses is None:
                return None
            found["validation_loss_worker_min"] = float(losses.min())
            found["validation_loss_worker_max"] = float(losses.max())
        return found

    def get_state(self) -> dict[str, Any]:
        return self._pace.get_state() | {
            "island_bytes": self._island_bytes,
            "sequences_left_out": self._left_out,
            "last_steps": self._last_steps,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._pace.set_state(state)
        self._updates = None
        self._island_bytes, self._left_out = state["island_bytes"], state["sequences_left_out"]
        self._last_steps = state["last_steps"]

    def _timed(
        self, state: gasloc_jax.RoundState, batch: Any, counts: list[int]
    ) -> tuple[gasloc_jax.RoundState, dict[str, Any]]:
        """A round in its two halves, each with a wait for its end, so that this process can time them."""
        jax.block_until_ready(state)
        number = int(state.round.addressable_data(0)[0])
        began = time.perf_counter()
        state, measured = self._round.local(state, batch, counts)
        jax.block_until_ready(state)
        stepped = time.perf_counter()
        state = self._round.exchange(state)
        jax.block_until_ready(state)
        changed = self._pace.add(number, counts, stepped - began, time.perf_counter() - stepped)
        if changed:
            self._note(changed)
        return state, measured


def _split(state: gasloc_jax.RoundState) -> tuple[Any, Any]:
    return state.params, state._replace(params=None)


def _telemetry(inner: Any) -> dict[str, Any]:
    """Of one device's inner state, which has an axis of workers."""
    figures = scape_jax.telemetry(jax.tree.map(lambda x: x[0], inner), AXIS_NAME)
    combine = lambda name: lax.pmax if name == "max_age" else lax.pmean  # noqa: E731
    return {name: combine(name)(x, WORKER_AXIS) for name, x in figures.items()}


def _figures(per_worker: dict, steps: Any, dropped: Any, skipped: Any) -> dict[str, Any]:
    """Of every worker, (W,) each; `dropped` is of this round, the others count over the run: dropped rounds, and steps that
    the inner optimizer skipped and took.
    """
    return per_worker | {"skipped": dropped, "skipped_steps": skipped, "updates": steps - skipped}


def _skipped(state: Any) -> jax.Array:
    """Steps that each worker's inner optimizer skipped, (W,)."""
    return optax.tree.get(state.inner, "stats").skipped


def _own(x: jax.Array) -> np.ndarray:
    """The bits of this process's part of an array (W,); the devices of an island have the same."""
    shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)]).view(np.int32)


def _sound(found: dict[str, np.ndarray]) -> np.ndarray:
    """Which workers had a round of finite numbers that counts, (W,)."""
    return np.isfinite(found["loss"]) & np.isfinite(found["grad_norm"]) & (found["dropped"] == 0)


def _over_workers(found: dict[str, np.ndarray], sound: np.ndarray) -> dict[str, Any]:
    """Scalars for the log from numbers of each worker: figures of the workers with a sound round, NaN where none has one;
    what was dropped and skipped of all.
    """
    of_sound = lambda name: found[name][sound] if sound.any() else np.full(1, np.nan, np.float32)  # noqa: E731
    return {
        **{name: of_sound(name).mean() for name in ("loss", "grad_norm", "clip_factor")},
        "loss_worker_min": of_sound("loss").min(),
        "loss_worker_max": of_sound("loss").max(),
        "skipped": found["skipped"].sum(),
        "skipped_steps": found["skipped_steps"].sum(),
        "updates": found["updates"].max(),
    }
