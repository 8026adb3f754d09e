"""Checkpoints of the whole state: parameters, every worker's buffers, masks, counts, data position, settings.

orbax writes the arrays, each under a readable path ("layers/attention/query/kernel"), and a JSON item beside
them with the settings and the shape of every leaf. A restore compares that item with the run at hand before
any array is read, so a checkpoint of another model, optimizer or worker count is refused with the differences
and loads nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from training.config import Config, dotted, update

CHECKPOINT_FOLDER = "checkpoints"
_RESUME = (
    "Resume with the saved settings, or start a new run; --checkpoint.parameters_from RUN takes over the "
    "parameters alone."
)
_MAY_CHANGE = ("outer.measure", "outer.evaluate_workers")  # what is looked at, not what is done
_SHOWN = 4  # leaves and settings listed per kind of difference


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
            "leaves": {item: _shapes(leaves) for item, leaves in arrays.items()},
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

        Of a run in rounds it is the mean over its workers.
        """
        step = self._step(step)
        meta, wanted = self.read_meta(step), {"params": by_path(params)}
        saved = dotted(Config()) | meta["config"]
        workers = saved["mesh.worker"] if saved["outer.name"] != "none" else 0
        if workers:
            wanted = {"params": {path: _each(x, workers) for path, x in wanted["params"].items()}}
        advice = "Set the model to the checkpoint's values, or start from other parameters."
        self._check_leaves(step, meta, wanted, config, ("model.",), "model", advice)
        found = self._read(step, wanted)["params"]
        if workers:
            shardings = {path: x.sharding for path, x in by_path(params).items()}
            found = jax.jit(_mean, out_shardings=shardings)(found)
        return like(params, found)

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
            lines += _differences(item, meta["leaves"][item], _shapes(leaves))
        if lines:
            settings = _changed(meta["config"], dotted(config), sections)
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} must hold the state of this {what}, "
                "but differs (nothing was loaded):\n  "
                + "\n  ".join(lines)
                + "\nsettings, checkpoint -> now:\n  "
                + ("\n  ".join(settings) or "no setting differs")
                + f"\n{advice}"
            )

    def _check_settings(self, step: int, meta: Mapping[str, Any], config: Config) -> None:
        """Settings that give meaning to the buffers must be the saved ones even where no shape tells them
        apart.
        """
        # A setting that the checkpoint does not know had its default's behaviour when it was written.
        before = dotted(Config()) | meta["config"]
        changed = _changed(before, dotted(config), ("model.", "optimizer.", "outer."), _MAY_CHANGE)
        saved = update(Config(), meta["config"])
        warmups = [round(c.optimizer.density_warmup_fraction * c.run.steps) for c in (saved, config)]
        if warmups[0] != warmups[1] and step < max(warmups):
            changed.append(f"steps of density warm-up: {warmups[0]} -> {warmups[1]}, not over at step {step}")
        if changed:
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} was made with other settings (nothing was "
                "loaded), checkpoint -> now:\n  " + "\n  ".join(changed) + f"\n{_RESUME}"
            )


def _each(leaf: Any, workers: int) -> jax.ShapeDtypeStruct:
    """A leaf of all workers, over all devices where they divide."""
    sharding, mesh = leaf.sharding, getattr(leaf.sharding, "mesh", None)
    if mesh is not None:
        spread = workers % mesh.size == 0
        sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)) if spread else PartitionSpec())
    return jax.ShapeDtypeStruct((workers, *leaf.shape), leaf.dtype, sharding=sharding)


def _mean(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.mean(x, axis=0, dtype=jnp.float32).astype(x.dtype) for path, x in leaves.items()}


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree under paths of names joined by slashes."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(map(_name, path)): leaf for path, leaf in leaves}


def like(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The tree with its leaves replaced by those of the same path."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    return jax.tree.unflatten(structure, [leaves["/".join(map(_name, path))] for path, _ in paths])


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _shapes(leaves: Mapping[str, Any]) -> dict[str, str]:
    return {path: f"{x.dtype}{list(x.shape)}" for path, x in leaves.items()}


def _differences(item: str, saved: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    kinds = {
        "missing from the checkpoint": [f"{p} {wanted[p]}" for p in wanted if p not in saved],
        "only in the checkpoint": [f"{p} {saved[p]}" for p in saved if p not in wanted],
        "of another shape": [
            f"{p} {saved[p]}, must be {wanted[p]}" for p in wanted if p in saved and saved[p] != wanted[p]
        ],
    }
    lines = []
    for kind, found in kinds.items():
        if found:
            rest = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            lines.append(f"{item}, {kind}: {'; '.join(found[:_SHOWN])}{rest}")
    return lines


def _changed(
    saved: Mapping[str, Any], now: Mapping[str, Any], sections: tuple[str, ...], free: tuple[str, ...] = ()
) -> list[str]:
    """Settings of the sections that differ, as lines; JSON has turned tuples into lists."""
    lines = []
    for key in sorted(set(saved) | set(now)):
        old, new = saved.get(key), now.get(key)
        old, new = (list(value) if isinstance(value, tuple) else value for value in (old, new))
        if key.startswith(sections) and key not in free and old != new:
            lines.append(f"{key}: {old!r} -> {new!r}")
    return lines
