"""The devices of a run: virtual CPU workers where there are too few real ones, and the mesh over them.

The number of CPU devices can only be chosen before JAX starts its backends; `prepare_devices` is therefore
the first thing a script calls.
"""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh

AXIS_NAME = "data"


def prepare_devices(workers: int) -> None:
    """Makes sure that `workers` devices exist, as virtual CPU devices where there is no accelerator."""
    if jax.config.jax_num_cpu_devices < workers:
        try:
            jax.config.update("jax_num_cpu_devices", workers)
        except RuntimeError:  # JAX is already running: whether that matters depends on what it found
            if len(jax.devices()) < workers:
                raise ValueError(
                    _too_few(
                        workers,
                        "JAX had already started, so no more virtual CPU devices can be "
                        "made. Set JAX_NUM_CPU_DEVICES before the process starts.",
                    )
                ) from None
    found = len(jax.devices())
    if found < workers:
        raise ValueError(
            _too_few(workers, f"Use --mesh.data {found}, or JAX_PLATFORMS=cpu for virtual workers.")
        )


def _too_few(workers: int, advice: str) -> str:
    kind, found = jax.default_backend(), len(jax.devices())
    return f"mesh.data = {workers} needs {workers} devices, this machine shows {found} ({kind}). {advice}"


def make_mesh(workers: int, axis_name: str = AXIS_NAME) -> Mesh:
    """A one-axis mesh over the first `workers` devices; axes are Auto, because the step is written with
    shard_map.
    """
    devices = jax.devices()
    if len(devices) < workers:
        raise ValueError(_too_few(workers, "Call prepare_devices before the first use of JAX."))
    return jax.make_mesh((workers,), (axis_name,), axis_types=(AxisType.Auto,), devices=devices[:workers])
