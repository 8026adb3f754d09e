"""Checkpoints of the whole state: parameters, every worker's buffers, masks, counts, data position, settings.

orbax writes the arrays, each under a readable path ("layers/attention/query/kernel"), and a JSON item beside
them with the settings and the shape of every leaf. A restore compares that item with the run at hand before
any array is read, so a checkpoint of another model, optimizer or worker count is refused with the differences
and loads nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from training._integrity import damaged, seal
from training._leaves import by_path, changed, differences, like, shapes
from training._processes import from_first, is_first
from training._watchdog import AFTER_ALL_SECS
from training.config import Config, dotted, update

CHECKPOINT_FOLDER, DAMAGED_FOLDER = "checkpoints", "damaged"
Resize = Callable[[Any, Any], tuple[Any, Any]]
_RESUME = (
    "Resume with the saved settings, or start a new run; --checkpoint.parameters_from RUN takes over the "
    "parameters alone."
)
_LARGE_BYTES = 1 << 24
_LOOK_SECS = 0.05
_MAY_CHANGE = ("outer.measure", "outer.evaluate_workers")  # what is looked at, not what is done


class NotWritten(OSError):
    """The run's folder cannot be written; what it held before is whole."""


def not_written(folder: Path, steps: Sequence[int], error: Exception) -> NotWritten:
    """One clear error. `steps`: of the checkpoints there."""
    if isinstance(error, NotWritten):
        return error
    last = f"The last checkpoint is that of step {steps[-1]}" if steps else "There is no checkpoint yet"
    mend = "bring it back" if isinstance(error, FileNotFoundError) else "make room"
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
    return NotWritten(
        f"the run's folder {folder} must be there and writable, with space left, got: {text}. {last}; {mend}, then go on "
        f"with --resume {folder}."
    )


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint held."""

    step: int
    params: Any
    opt_state: Any
    data_state: dict[str, Any]
    totals: dict[str, float]
    told: str = ""  # what was changed for another number of workers


class _Failed(logging.Filter):
    """Takes the errors that orbax logs in its own threads: it raises them only once every process has waited for that save,
    which one whose disk is full never ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._users = 0

    def begin(self, anew: bool) -> None:
        """From now on, once more. anew: what failed before is of another run."""
        if anew or not self._users:
            self.error = None
        logging.getLogger("absl").addFilter(self)  # at most once
        self._users += 1

    def end(self) -> None:
        """What `begin` began."""
        self._users -= 1
        if not self._users:
            logging.getLogger("absl").removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR or not record.exc_info or "orbax" not in record.pathname:
            return True
        self.error = self.error or record.exc_info[1]
        return False  # it is told once, in a line


_FAILED = _Failed()


class Checkpoints:
    """The checkpoints of one run, in FOLDER/checkpoints; the newest `keep` stay, and those of every `keep_every`-th step.

    Of several processes all call it alike. What the first one finds in the folder holds for all: another may see a file
    system's older listing.

    own: this run alone writes there; what is left of a save that did not end is removed.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, keep_every: int = 0, own: bool = False):
        self.folder = Path(folder).absolute() / CHECKPOINT_FOLDER
        _write_small_arrays_whole()
        _FAILED.begin(anew=own)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            keep_period=keep_every or None,
            create=True,
            cleanup_tmp_directories=own,
            # A process that hangs in a save, or a file system that is slow, is the watchdog's to judge.
            async_options=ocp.AsyncOptions(timeout_secs=int(AFTER_ALL_SECS)),
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        config_file = self.folder.parent / "config.json"  # of a run: without it this is another folder
        self._marker = config_file if config_file.is_file() else None
        self._over = threading.Event()
        self._sealing: list[threading.Thread] = []
        self.steps: list[int] = []
        self.look()

    def look(self) -> None:
        """Sets `steps`, those of the finished checkpoints in order. What is saved later is added, and none removed."""
        self.steps = json.loads(from_first(lambda: json.dumps(sorted(self._manager.all_steps()))))

    def newest_whole(self, note: Callable[[str], Any], before: int | None = None) -> int:
        """Step of the newest checkpoint (before step `before`) whose files are as they were written; `note` is told of newer
        ones that are not.

        The first process reads all files for that.

        Raises:
          ValueError: there is none.
        """
        step, *problems = from_first(lambda: "\n".join(self._newest_whole(before))).split("\n")
        for text in problems:
            note(f"{text}; going on from step {step} instead")
        return int(step)

    def _newest_whole(self, before: int | None) -> list[str]:
        """The step, and what is wrong with newer ones."""
        problems: list[str] = []
        for step in reversed(self.steps):
            if before is not None and step >= before:
                continue
            folder = self.folder / str(step)
            problem = damaged(folder) if (folder / "meta").is_dir() else f"{folder / 'meta'} is missing"
            if not problem:
                return [str(step), *problems]
            problems.append(f"the checkpoint of step {step} is damaged: {problem}")
        raise ValueError(
            f"a whole checkpoint is needed in {self.folder}, got {'; '.join(problems) or 'none'} (nothing was loaded). "
            "Restore these files, or start a new run."
        )

    def set_aside(self, after: int) -> None:
        """Moves checkpoints of later steps to FOLDER/damaged: a run that goes on from before them saves these steps anew."""
        later = [step for step in self.steps if step > after]
        if not later:
            return

        def move() -> str:
            for step in later:
                aside = self.folder.parent / DAMAGED_FOLDER
                aside.mkdir(exist_ok=True)
                free = next(n for n in itertools.count(1) if not os.path.lexists(aside / f"{step}-{n}"))
                (self.folder / str(step)).rename(aside / f"{step}-{free}")
            return ""

        with self._written():
            from_first(move)
        self.steps = [step for step in self.steps if step <= after]
        self._manager.reload()

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

        Raises:
          NotWritten: this or the one before cannot be written.
        """
        if step in self.steps:
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
        self._until_written()
        with self._written():
            self._manager.save(step, args=ocp.args.Composite(**items, meta=ocp.args.JsonSave(meta)))
        self.steps.append(step)
        if is_first():
            self._sealing = [thread for thread in self._sealing if thread.is_alive()]
            self._sealing.append(threading.Thread(target=self._seal, args=(step,), daemon=True))
            self._sealing[-1].start()

    def _seal(self, step: int) -> None:
        """Once orbax has finished a checkpoint, which then takes its name, sums up its files."""
        folder = self.folder / str(step)
        while not folder.is_dir():
            if self._over.wait(_LOOK_SECS) and not folder.is_dir():
                return  # it was never finished
        with contextlib.suppress(OSError):  # removed, since it was a newer one's turn; or the disk is full
            seal(folder)

    def restore(
        self,
        params: Any,
        opt_state: Any,
        config: Config,
        step: int | None = None,
        resize: Resize | None = None,
    ) -> Restored:
        """The state after `step` steps (default: the newest), in the shape and sharding of the given trees.

        The trees may be arrays or jax.ShapeDtypeStruct with shardings; they are only read for their shapes.

        resize: (params, opt_state) of the saved number of workers -> those of the given trees; called where they differ.
        """
        step = self._step(step)
        meta = self.check(params, opt_state, config, step, resize)
        wanted = (params, opt_state)
        held = self._held(meta, wanted, config) if resize else wanted
        items = dict(zip(("params", "opt_state"), held, strict=True))
        read = self._read(step, {name: by_path(tree) for name, tree in items.items()})
        found = tuple(like(tree, read[name]) for name, tree in items.items())
        if held is not wanted:
            assert resize is not None
            shardings = jax.tree.map(lambda x: x.sharding, wanted)
            found = jax.jit(resize, out_shardings=shardings)(*found)
        return Restored(
            step=step,
            params=found[0],
            opt_state=found[1],
            data_state=meta["data"],
            totals=meta["totals"],
            told="" if held is wanted else _told(meta, config),
        )

    def check(
        self,
        params: Any,
        opt_state: Any,
        config: Config,
        step: int | None = None,
        resize: Resize | None = None,
    ) -> dict[str, Any]:
        """Raises ValueError where the checkpoint does not fit; reads no arrays. Returns `read_meta`."""
        step = self._step(step)
        meta = self.read_meta(step)
        wanted = {"params": by_path(params), "opt_state": by_path(opt_state)}
        compared = meta
        held = self._held(meta, (params, opt_state), config) if resize else (params, opt_state)
        if held[0] is not params:
            assert resize is not None
            made = jax.eval_shape(resize, *held)
            leaves = {name: shapes(by_path(tree)) for name, tree in zip(wanted, made, strict=True)}
            compared = {**meta, "leaves": leaves}
        self._check_leaves(
            step,
            compared,
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
        meta = self._readable(step, ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        if not _is_meta(meta):
            raise ValueError(
                f"the checkpoint in {self.folder / str(step)} must tell its step, config, leaves, data and totals in "
                "meta/, but does not (nothing was loaded). It is none of a run, or of another version."
            )
        return meta

    def wait(self) -> None:
        """Returns once everything saved is on disk. Raises NotWritten."""
        self._until_written()
        self._end_sealing()

    def is_writing(self) -> bool:
        """Whether a save is under way, in any process."""
        return self._manager.is_saving_in_progress()

    def check_written(self) -> None:
        """Raises NotWritten where a save has failed meanwhile, or cannot end well; waits for nothing."""
        with self._written():
            if _FAILED.error is not None:
                raise _FAILED.error
            if is_first() and not (self.folder.is_dir() and (self._marker is None or self._marker.is_file())):
                raise FileNotFoundError("the folder is gone, or another one has its name")

    def _until_written(self) -> None:
        """The save before has ended. In a folder that vanished a write may never do, and orbax would wait for it."""
        while self.is_writing():
            self.check_written()
            time.sleep(_LOOK_SECS)
        self.check_written()
        with self._written():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """What orbax raises where it cannot write, as NotWritten."""
        try:
            yield
        except Exception as error:  # of any of the layers below
            gone = isinstance(error, FileNotFoundError)
            whole = [step for step in self.steps if gone or (self.folder / str(step)).is_dir()]
            raise not_written(self.folder.parent, whole, error) from error

    def _end_sealing(self) -> None:
        """What is to come of the saves begun is there."""
        self._over.set()
        for thread in self._sealing:
            thread.join()
        self._over.clear()

    def close(self) -> None:
        try:
            self._manager.wait_until_finished()
        finally:
            self._end_sealing()
            self._manager.close()
            _FAILED.end()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, NotWritten):
            self.close()
            return
        # Orbax would wait once more, and fail once more; its threads still do, and are kept from telling it.
        self._over.set()

    def _held(self, meta: Mapping[str, Any], wanted: tuple[Any, Any], config: Config) -> tuple[Any, Any]:
        """`wanted` itself where the checkpoint is of as many workers, or of other leaves; else with its shapes."""
        before, now = dotted(Config()) | meta["config"], dotted(config)
        paths = [set(by_path(tree)) for tree in wanted]
        same = all(before[key] == now[key] for key in ("mesh.worker", "mesh.data"))
        if same or paths != [set(meta["leaves"][name]) for name in ("params", "opt_state")]:
            return wanted
        held = []
        for name, tree in zip(("params", "opt_state"), wanted, strict=True):
            saved = meta["leaves"][name]
            held.append(like(tree, {path: _as_saved(x, saved[path]) for path, x in by_path(tree).items()}))
        return held[0], held[1]

    def _step(self, step: int | None) -> int:
        found = self.steps
        if not found:
            raise ValueError(
                f"a checkpoint is needed, got none in {self.folder}. Name a run that has saved one, or start "
                "anew without it."
            )
        if step is not None and step not in found:
            raise ValueError(f"no checkpoint of step {step} in {self.folder}, which holds {found}. Use one.")
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
            others = [one for one in self.steps if one != step]
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
        free = _MAY_CHANGE
        if before["mesh.worker"] != config.mesh.worker:
            free += ("outer.local_steps",)  # a list of them is of other workers
        found = changed(before, dotted(config), ("model.", "optimizer.", "outer."), free)
        saved = update(Config(), meta["config"])
        warmups = [round(c.optimizer.density_warmup_fraction * c.run.steps) for c in (saved, config)]
        if warmups[0] != warmups[1] and step < max(warmups):
            found.append(f"steps of density warm-up: {warmups[0]} -> {warmups[1]}, not over at step {step}")
        if found:
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} was made with other settings (nothing was "
                "loaded), checkpoint -> now:\n  " + "\n  ".join(found) + f"\n{_RESUME}"
            )


@functools.cache
def _write_small_arrays_whole() -> None:
    """Orbax lets each replica of an array write a part of it, which it cuts out on the device: worth its time for the large
    ones of several processes; in a single one it takes three times as long as the rest of a save.
    """
    handler = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=jax.process_count() > 1, min_slice_bytes_for_replica_parallel=_LARGE_BYTES
    )
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of what is wanted here
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    logger.setLevel(level)


def _is_meta(meta: Any) -> bool:
    """Whether a checkpoint's JSON item has all its parts; what they hold is compared with the run at hand."""
    if not isinstance(meta, Mapping) or not isinstance(meta.get("step"), int):
        return False
    parts = ("config", "leaves", "data", "totals")
    if not all(isinstance(meta.get(name), Mapping) for name in parts):
        return False
    leaves = [meta["leaves"].get(name) for name in ("params", "opt_state")]
    return all(isinstance(found, Mapping) for found in leaves) and all(
        isinstance(x, int | float) for x in meta["totals"].values()
    )


def _told(meta: Mapping[str, Any], config: Config) -> str:
    saved, mesh = dotted(Config()) | meta["config"], config.mesh
    before = f"{saved['mesh.worker']} x {saved['mesh.data']}"
    return (
        f"the checkpoint's state, of {before} workers, for {mesh.worker} x {mesh.data} (mesh.worker x mesh.data): means "
        "over workers stay as they were"
    )


def _as_saved(leaf: Any, text: str) -> jax.ShapeDtypeStruct:
    """A leaf with the type and shape that `shapes` wrote, over all devices along the first axis that they divide."""
    dtype, _, numbers = text.rstrip("]").partition("[")
    shape = tuple(int(n) for n in numbers.split(",") if n.strip())
    sharding, mesh = leaf.sharding, getattr(leaf.sharding, "mesh", None)
    if mesh is not None and shape != leaf.shape:
        axis = next((i for i, n in enumerate(shape) if n and n % mesh.size == 0), None)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, tuple(mesh.axis_names))
        sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


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
