"""What the loop drives: n steps at a time, whether workers exchange in every step or in rounds (rounds.py).

One loop serves both: it asks for the number of steps, has their batches read and the steps taken, and is told what was
measured and sent. `params` and `opt_state` are opaque to it; a checkpoint holds both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

import models
import scape_jax
from training.config import OptimizerConfig
from training.data import BatchLoader
from training.evaluate import place
from training.mesh import AXIS_NAME

if TYPE_CHECKING:
    from training.train import Setup


@dataclasses.dataclass(frozen=True)
class Sent:
    """What a worker sent in the steps just taken; `line` is for metrics.jsonl."""

    total_bytes: float
    dense_bytes: float  # what a dense all-reduce in each of these steps would have sent
    line: dict[str, Any]


class Method(Protocol):
    """How the workers train. Parameters that come in are one model, those in between are the method's own form."""

    unit: str
    """What an advance is called: step or round."""
    in_flight: int
    """How many advances the host may be ahead of the devices; 0 where each returns when it is done."""

    def check(self, step: int, note: Callable[[str], Any]) -> None:
        """Raises ValueError where a run cannot go on from `step`; `note` is where it tells things from now on."""

    def begin(self, params: Any) -> tuple[Any, Any]:
        """(params, opt_state) before the first step."""

    def abstract(self) -> tuple[Any, Any]:
        """Shapes and shardings of what `begin` returns; nothing is allocated."""

    def resize(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """The state of another number of workers for those of this run; traced."""

    def steps_ahead(self, step: int) -> int:
        """How many steps are taken at once after `step`."""

    def read(self, loader: BatchLoader, steps: int) -> Any:
        """The batches of these steps on the devices."""

    def before_first(self, params: Any, opt_state: Any, batch: Any, left: int) -> None:
        """Says what the first of the `left` steps waits for."""

    def advance(self, params: Any, opt_state: Any, batch: Any, steps: int) -> tuple[Any, Any, dict[str, Any]]:
        """Takes the steps; params and opt_state are donated. The last is what was measured, in the method's own form."""

    def collect(self, window: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What these advances measured as numbers of the host, at least loss and skipped. All processes call it for the
        same ones.
        """

    def sent(self, step: int, steps: int) -> Sent:
        """Of the steps up to number `step`; called once for each, since totals may be kept."""

    def sent_per_step(self, step: int) -> Sent:
        """In step number `step`; of a round its share."""

    def skipped(self, opt_state: Any) -> int:
        """Steps skipped so far, where the method counts those of all workers together; else 0."""

    def failure(self, step: int, opt_state: Any) -> str | None:
        """Why a run that ended at `step` has trained nothing, where nothing it did was finite; all processes call it."""

    def telemetry(self, opt_state: Any) -> dict[str, Any]:
        """Figures of a state for a line of metrics.jsonl."""

    def times(self) -> dict[str, Any]:
        """Seconds of the last steps for a line of metrics.jsonl; gathered, so all processes call it at the same step."""

    def model(self, params: Any, opt_state: Any) -> Any:
        """The parameters to evaluate, on every device."""

    def disagreement(
        self, params: Any, opt_state: Any, batches: Any, should_stop: Callable[[], bool]
    ) -> dict[str, float] | None:
        """At an evaluation: how far the workers are from one another; None where `should_stop` cut it short."""

    def get_state(self) -> dict[str, Any]:
        """What the host decided, as plain JSON; gathered, so all processes call it at the same step."""

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `get_state` returned."""


def resize_workers(opt_state: Any, num_workers: int, optimizer: OptimizerConfig) -> Any:
    """The state of the optimizer that the settings describe for another number of workers."""
    return scape_jax.resize_workers(
        opt_state, num_workers, block_size=optimizer.block_size, selection=optimizer.selection
    )


class DataParallel:
    """All workers hold the same parameters and exchange in every step, by scape_jax.TrainStep."""

    unit = "step"
    in_flight = 2

    def __init__(self, setup: Setup):
        self._setup = setup
        self._note: Callable[[str], Any] = print

    def check(self, step: int, note: Callable[[str], Any]) -> None:
        self._note = note

    def begin(self, params: Any) -> tuple[Any, Any]:
        return params, self._setup.step.init(params)

    def abstract(self) -> tuple[Any, Any]:
        mesh, tx, replicated = self._setup.mesh, self._setup.step.tx, PartitionSpec()

        def init(specs: Any) -> Any:
            mapped = jax.shard_map(tx.init, mesh=mesh, in_specs=replicated, out_specs=specs, check_vma=False)
            return jax.eval_shape(mapped, params)

        def with_sharding(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        params = models.abstract_params(self._setup.model)
        specs = scape_jax.state_specs(init(replicated), AXIS_NAME)  # which leaves have an axis of workers
        opt_state = jax.tree.map(with_sharding, init(specs), specs)
        return jax.tree.map(lambda leaf: with_sharding(leaf, replicated), params), opt_state

    def resize(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        mesh, optimizer = self._setup.config.mesh, self._setup.config.optimizer
        return params, resize_workers(opt_state, mesh.data, optimizer)

    def steps_ahead(self, step: int) -> int:
        return 1

    def read(self, loader: BatchLoader, steps: int) -> Any:
        return place(next(loader), self._setup.mesh, AXIS_NAME)

    def before_first(self, params: Any, opt_state: Any, batch: Any, left: int) -> None:
        """Side by side, a second program costs no pause in the middle of the run."""
        two = self._setup.step.compile_ahead(
            params,
            opt_state,
            batch,
            steps=left,
            on_wait=lambda: self._note("the density is final: waiting until its program is compiled ..."),
        )
        what = "two programs, for the first steps and for the final density" if two else "the step"
        self._note(f"compiling {what} ...")

    def advance(self, params: Any, opt_state: Any, batch: Any, steps: int) -> tuple[Any, Any, dict[str, Any]]:
        return self._setup.step(params, opt_state, batch)

    def collect(self, window: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return jax.device_get(window)

    def sent(self, step: int, steps: int) -> Sent:
        wire = self._setup.step.wire_bytes(step)
        line = {"wire_bytes": wire.total_bytes, "density": wire.density}
        return Sent(wire.total_bytes, wire.dense_total_bytes, line)

    def sent_per_step(self, step: int) -> Sent:
        return self.sent(step, 1)

    def skipped(self, opt_state: Any) -> int:
        return int(optax.tree.get(opt_state, "stats").skipped)

    def failure(self, step: int, opt_state: Any) -> str | None:
        if self.skipped(opt_state) < step:
            return None
        return (
            f"all {step} steps were skipped: no gradient was finite on all workers. Use a smaller --schedule.learning_rate, "
            "and look at the data."
        )

    def telemetry(self, opt_state: Any) -> dict[str, Any]:
        return self._setup.step.telemetry(opt_state)

    def times(self) -> dict[str, Any]:
        return {}

    def model(self, params: Any, opt_state: Any) -> Any:
        return params

    def disagreement(
        self, params: Any, opt_state: Any, batches: Any, should_stop: Callable[[], bool]
    ) -> dict[str, float] | None:
        return {}

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        pass
