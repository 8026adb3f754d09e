"""The devices of a run: virtual CPU workers where there are too few real ones, and the mesh over them.

The number of CPU devices can only be chosen before JAX starts its backends; `prepare_devices` is therefore
the first thing a script calls.
"""

from __future__ import annotations

from typing import Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXIS_NAME = "data"  # inside an island
WORKER_AXIS = "worker"  # between islands
_MOST_VIRTUAL = 1024  # each has threads of its own; beyond this the process stands still before it fails


def prepare_devices(
    workers: int,
    platform: Literal["auto", "cpu", "gpu"] = "auto",
    *,
    islands: int = 1,
    processes: int = 1,
) -> None:
    """Makes sure that devices of the platform exist for `workers` in each island, as virtual ones on a CPU.

    Several processes bring equal shares, of whole islands where there are several. ValueError: there are too few.
    """
    devices = workers * islands
    parts, name = (workers, "mesh.data") if islands == 1 else (islands, "mesh.worker")
    if parts % processes:
        raise ValueError(
            f"{name} must be divisible by the processes, {processes}, got {parts}. Use "
            f"{-(-parts // processes) * processes}, or another number of processes."
        )
    own = devices // processes
    if platform == "cpu":  # "gpu" needs no word to JAX: it is what it takes where it finds one
        jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_num_cpu_devices < own <= _MOST_VIRTUAL:
        try:
            jax.config.update("jax_num_cpu_devices", own)
        except RuntimeError:  # JAX is already running: whether that matters depends on what it found
            if len(jax.devices()) < devices:
                advice = "JAX had already started, so no more virtual CPU devices can be made. "
                advice += "Call prepare_devices first, or set JAX_NUM_CPU_DEVICES before the process starts."
                raise ValueError(_too_few(workers, islands, advice)) from None
    found, kind = len(jax.devices()), jax.default_backend()
    if platform != "auto" and kind != platform:
        advice = "Install jax[cuda], or use" if platform == "gpu" else "Start a new process, or use"
        raise ValueError(
            f"mesh.platform = {platform}, but JAX runs on {kind}. {advice} --mesh.platform {kind}."
        )
    if found < devices:
        fitting = f"--mesh.data {found}" if islands == 1 else f"fewer islands (--mesh.worker) for {found}"
        advice = f"Use {fitting}, or --mesh.platform cpu for up to {_MOST_VIRTUAL} virtual workers."
        raise ValueError(_too_few(workers, islands, advice))


def _too_few(workers: int, islands: int, advice: str) -> str:
    kind, found = jax.default_backend(), len(jax.devices())
    wanted = f"mesh.data = {workers}" if islands == 1 else f"mesh.worker x mesh.data = {islands} x {workers}"
    who = "this process has" if jax.process_count() == 1 else f"the {jax.process_count()} processes have"
    return f"{wanted} needs {workers * islands} devices, {who} {found} ({kind}). {advice}"


def make_mesh(workers: int, axis_name: str = AXIS_NAME, *, islands: int | None = None) -> Mesh:
    """A mesh over the first devices of each process, of one axis, or of WORKER_AXIS and that one where there are islands;
    axes are Auto, because the step is written with shard_map. Neighbours in the list of devices share an island.
    """
    needed, processes = workers * (islands or 1), jax.process_count()
    of_each = [[d for d in jax.devices() if d.process_index == p] for p in range(processes)]
    if needed > processes * min(map(len, of_each)):
        raise ValueError(_too_few(workers, islands or 1, "Call prepare_devices before the first use of JAX."))
    devices = [d for found in of_each for d in found[: -(-needed // processes)]][:needed]
    if islands is None:
        return jax.make_mesh((workers,), (axis_name,), axis_types=(AxisType.Auto,), devices=devices)
    grid = np.array(devices).reshape(islands, workers)  # as listed: make_mesh may reorder two axes
    return Mesh(grid, (WORKER_AXIS, axis_name), axis_types=(AxisType.Auto, AxisType.Auto))
