"""The devices of a run: virtual CPU workers where there are too few real ones, and the mesh over them.

The number of CPU devices can only be chosen before JAX starts its backends; `prepare_devices` is therefore
the first thing a script calls.
"""

from __future__ import annotations

from typing import Literal

import jax
from jax.sharding import AxisType, Mesh

AXIS_NAME = "data"
_MOST_VIRTUAL = 1024  # each has threads of its own; beyond this the process stands still before it fails


def prepare_devices(workers: int, platform: Literal["auto", "cpu", "gpu"] = "auto") -> None:
    """Makes sure that `workers` devices of the platform exist, as virtual ones on a CPU."""
    if platform == "cpu":  # "gpu" needs no word to JAX: it is what it takes where it finds one
        jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_num_cpu_devices < workers <= _MOST_VIRTUAL:
        try:
            jax.config.update("jax_num_cpu_devices", workers)
        except RuntimeError:  # JAX is already running: whether that matters depends on what it found
            if len(jax.devices()) < workers:
                advice = "JAX had already started, so no more virtual CPU devices can be made. "
                advice += "Call prepare_devices first, or set JAX_NUM_CPU_DEVICES before the process starts."
                raise ValueError(_too_few(workers, advice)) from None
    found, kind = len(jax.devices()), jax.default_backend()
    if platform != "auto" and kind != platform:
        advice = "Install jax[cuda], or use" if platform == "gpu" else "Start a new process, or use"
        raise ValueError(
            f"mesh.platform = {platform}, but JAX runs on {kind}. {advice} --mesh.platform {kind}."
        )
    if found < workers:
        advice = f"Use --mesh.data {found}, or --mesh.platform cpu for up to {_MOST_VIRTUAL} virtual workers."
        raise ValueError(_too_few(workers, advice))


def _too_few(workers: int, advice: str) -> str:
    kind, found = jax.default_backend(), len(jax.devices())
    return f"mesh.data = {workers} needs {workers} devices, this process has {found} ({kind}). {advice}"


def make_mesh(workers: int, axis_name: str = AXIS_NAME) -> Mesh:
    """A one-axis mesh over the first `workers` devices; axes are Auto, because the step is written with
    shard_map.
    """
    devices = jax.devices()
    if len(devices) < workers:
        raise ValueError(_too_few(workers, "Call prepare_devices before the first use of JAX."))
    return jax.make_mesh((workers,), (axis_name,), axis_types=(AxisType.Auto,), devices=devices[:workers])
