"""Checkpoints of the whole state: parameters, every worker's buffers, masks, counts, data position, settings.

orbax writes the arrays, each under a readable path ("layers/attention/query/kernel"), and a JSON item beside
them with the settings and the shape of every leaf. A restore compares that item with the run at hand before
any array is read, so a checkpoint of another model, optimizer or worker count is refused with the differences
and loads nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from training._leaves import by_path, changed, differences, like, shapes
from training.config import Config, dotted, update

CHECKPOINT_FOLDER = "checkpoints"
_RESUME = (
    "Resume with the saved settings, or start a new run; --checkpoint.parameters_from RUN takes over the "
    "parameters alone."
)
_MAY_CHANGE = ("outer.measure", "outer.evaluate_workers")  # what is looked at, not what is done


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint held."""

    step: int
    params: Any
    opt_state: Any
    data_state: dict[str, Any]
    totals: dict[str, float]


class Checkpoints:
    """The checkpoints of one run, in FOLDER/checkpoints; the newest `keep` stay."""

    def __init__(self, folder: str | Path, *, keep: int = 2):
        self.folder = Path(folder).absolute() / CHECKPOINT_FOLDER
        self._manager = ocp.CheckpointManager(
            self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        )

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        params: Any,
        opt_state: Any,
        *,
        config: Config,
        data_state: Mapping[str, Any],
        totals: Mapping[str, float],
    ) -> None:
        """Starts writing the state after `step` steps; returns once the arrays are copied, so they may be
        donated.
        """
        if step in self._manager.all_steps():
            return  # the same state is already there: a signal right after a regular save
        arrays = {"params": by_path(params), "opt_state": by_path(opt_state)}
        meta = {
            "step": step,
            "config": dotted(config),
            "leaves": {item: shapes(leaves) for item, leaves in arrays.items()},
            "data": dict(data_state),
            "totals": dict(totals),
        }
        items = {name: ocp.args.StandardSave(leaves) for name, leaves in arrays.items()}
        self._manager.save(step, args=ocp.args.Composite(**items, meta=ocp.args.JsonSave(meta)))

    def restore(self, params: Any, opt_state: Any, config: Config, step: int | None = None) -> Restored:
        """The state after `step` steps (default: the newest), in the shape and sharding of the given trees.

        The trees may be arrays or jax.ShapeDtypeStruct with shardings; they are only read for their shapes.
        """
        step = self._step(step)
        meta = self.check(params, opt_state, config, step)
        found = self._read(step, {"params": by_path(params), "opt_state": by_path(opt_state)})
        return Restored(
            step=step,
            params=like(params, found["params"]),
            opt_state=like(opt_state, found["opt_state"]),
            data_state=meta["data"],
            totals=meta["totals"],
        )

    def check(self, params: Any, opt_state: Any, config: Config, step: int | None = None) -> dict[str, Any]:
        """Raises ValueError where the checkpoint does not fit; reads no arrays. Returns `read_meta`."""
        step = self._step(step)
        meta = self.read_meta(step)
        wanted = {"params": by_path(params), "opt_state": by_path(opt_state)}
        self._check_leaves(
            step,
            meta,
            wanted,
            config,
            ("model.", "optimizer.", "outer.", "mesh."),
            "model and optimizer",
            _RESUME,
        )
        self._check_settings(step, meta, config)
        return meta

    def restore_params(self, params: Any, config: Config, step: int | None = None) -> Any:
        """Only the parameters, for evaluation, export, or a new run with another optimizer.

        Of a run in rounds they are those of the worker config.checkpoint.parameters_worker, or the mean over all.
        """
        step = self._step(step)
        meta, wanted = self.read_meta(step), {"params": by_path(params)}
        workers, worker = _workers(meta), config.checkpoint.parameters_worker
        self._check_worker(worker, workers)
        if workers:
            wanted = {"params": {path: _each(x, workers) for path, x in wanted["params"].items()}}
        advice = "Set the model to the checkpoint's values, or start from other parameters."
        self._check_leaves(step, meta, wanted, config, ("model.",), "model", advice)
        found = self._read(step, wanted)["params"]
        if workers:
            shardings = {path: x.sharding for path, x in by_path(params).items()}
            one = _mean if worker is None else functools.partial(_pick, worker)
            found = jax.jit(one, out_shardings=shardings)(found)
        return like(params, found)

    def told_params(self, config: Config, step: int | None = None) -> str:
        """Which parameters `restore_params` takes, for the user to read."""
        step = self._step(step)
        workers, worker = _workers(self.read_meta(step)), config.checkpoint.parameters_worker
        of = f"step {step} of {self.folder.parent}"
        if not workers:
            return of
        return (
            f"the mean of {workers} workers, {of}"
            if worker is None
            else f"worker {worker} of {workers}, {of}"
        )

    def read_meta(self, step: int | None = None) -> dict[str, Any]:
        """The JSON item of a checkpoint: step, config, leaves, data, totals."""
        step = self._step(step)
        return self._readable(step, ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def wait(self) -> None:
        """Returns once everything saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _step(self, step: int | None) -> int:
        found = self._manager.all_steps()
        if not found:
            raise ValueError(
                f"a checkpoint is needed, got none in {self.folder}. Name a run that has saved one, or start "
                "anew without it."
            )
        if step is not None and step not in found:
            raise ValueError(
                f"no checkpoint of step {step} in {self.folder}, which holds {sorted(found)}. Use one."
            )
        return max(found) if step is None else step

    def _read(self, step: int, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, jax.Array]]:
        abstract = {
            name: {
                path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                for path, x in leaves.items()
            }
            for name, leaves in wanted.items()
        }
        items = {name: ocp.args.StandardRestore(leaves) for name, leaves in abstract.items()}
        found = self._readable(step, ocp.args.Composite(**items))
        return {name: found[name] for name in items}

    def _readable(self, step: int, args: Any) -> Any:
        """What orbax reads, or one clear error: its own name files deep inside a checkpoint."""
        try:
            return self._manager.restore(step, args=args)
        except Exception as error:  # whatever a damaged file makes the layers below raise
            others = sorted(set(self._manager.all_steps()) - {step})
            advice = (
                f"Move that folder away to go on from step {others[-1]}."
                if others
                else "There is no other one."
            )
            raise ValueError(
                f"the checkpoint in {self.folder / str(step)} must be whole, but it cannot be read "
                f"(nothing was loaded): {str(error).splitlines()[0][:300]}. {advice}"
            ) from error

    def _check_leaves(
        self,
        step: int,
        meta: Mapping[str, Any],
        wanted: Mapping[str, Mapping[str, Any]],
        config: Config,
        sections: tuple[str, ...],
        what: str,
        advice: str,
    ) -> None:
        lines = []
        for item, leaves in wanted.items():
            lines += differences(item, meta["leaves"][item], shapes(leaves))
        if lines:
            settings = changed(meta["config"], dotted(config), sections)
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} must hold the state of this {what}, "
                "but differs (nothing was loaded):\n  "
                + "\n  ".join(lines)
                + "\nsettings, checkpoint -> now:\n  "
                + ("\n  ".join(settings) or "no setting differs")
                + f"\n{advice}"
            )

    def _check_worker(self, worker: int | None, workers: int) -> None:
        if worker is None or worker < workers:
            return
        if not workers:
            raise ValueError(
                f"checkpoint.parameters_worker must be left out, got {worker}: {self.folder.parent} was no run in rounds, "
                "so that all its workers had the same parameters."
            )
        raise ValueError(
            f"checkpoint.parameters_worker must be in 0..{workers - 1}, got {worker}: {self.folder.parent} had {workers} "
            "workers. Leave it out for their mean."
        )

    def _check_settings(self, step: int, meta: Mapping[str, Any], config: Config) -> None:
        """Settings that give meaning to the buffers must be the saved ones even where no shape tells them
        apart.
        """
        # A setting that the checkpoint does not know had its default's behaviour when it was written.
        before = dotted(Config()) | meta["config"]
        found = changed(before, dotted(config), ("model.", "optimizer.", "outer."), _MAY_CHANGE)
        saved = update(Config(), meta["config"])
        warmups = [round(c.optimizer.density_warmup_fraction * c.run.steps) for c in (saved, config)]
        if warmups[0] != warmups[1] and step < max(warmups):
            found.append(f"steps of density warm-up: {warmups[0]} -> {warmups[1]}, not over at step {step}")
        if found:
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} was made with other settings (nothing was "
                "loaded), checkpoint -> now:\n  " + "\n  ".join(found) + f"\n{_RESUME}"
            )


def _each(leaf: Any, workers: int) -> jax.ShapeDtypeStruct:
    """A leaf of all workers, over all devices where they divide."""
    sharding, mesh = leaf.sharding, getattr(leaf.sharding, "mesh", None)
    if mesh is not None:
        spread = workers % mesh.size == 0
        sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)) if spread else PartitionSpec())
    return jax.ShapeDtypeStruct((workers, *leaf.shape), leaf.dtype, sharding=sharding)


def _workers(meta: Mapping[str, Any]) -> int:
    """Workers with parameters of their own; 0 where all had the same."""
    saved = dotted(Config()) | meta["config"]
    return saved["mesh.worker"] if saved["outer.name"] != "none" else 0


def _pick(worker: int, leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: x[worker] for path, x in leaves.items()}


def _mean(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.mean(x, axis=0, dtype=jnp.float32).astype(x.dtype) for path, x in leaves.items()}
