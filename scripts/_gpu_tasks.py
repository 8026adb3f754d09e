"""What scripts/gpu_check.py runs on the device, in a process of its own: checks of kernels, times of them and of updates."""

import functools
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts._gpu_bandwidth import bandwidth
from scripts._gpu_calls import OPS
from scripts._gpu_run import KERNELS, QUICK, REFERENCE, Limits, Row, compiled, form, key_like, not_here, told
from scripts._gpu_update import time_updates

# Relative to the size of an entry and to the mean of all: a few roundings of float32, two of bfloat16.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2.0**-7}

# Exit code of a process that has found the device unusable and told all rows before.
UNUSABLE = 3


def describe_device() -> Row:
    """What runs here; of a CPU too."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "compute_capability": str(getattr(device, "compute_capability", "")),
        # JAX's own share of the device's memory, by default three quarters.
        "jax_memory_limit_gib": round(stats.get("bytes_limit", 0) / 2**30, 1),
        "devices": jax.device_count(),
    }


# Correctness -------------------------------------------------------------------------------------------------------


def bits(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


@functools.partial(jax.jit, static_argnums=2)
def compare(got: jax.Array, want: jax.Array, exact: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(number of wrong entries, place of the first, largest error relative to the entry and the mean)."""
    got, want = got.reshape(-1), want.reshape(-1)
    g, w = got.astype(jnp.float32), want.astype(jnp.float32)
    size = jnp.abs(w) + jnp.nanmean(jnp.where(jnp.isfinite(w), jnp.abs(w), jnp.nan))
    error = jnp.where((g == w) | (jnp.isnan(g) & jnp.isnan(w)), 0.0, jnp.abs(g - w) / size)
    error = jnp.where(jnp.isnan(error), jnp.inf, error)
    wrong = bits(got) != bits(want) if exact else error > TOLERANCES[want.dtype.name]
    return jnp.sum(wrong, dtype=jnp.int32), jnp.argmax(wrong), jnp.max(error, initial=0.0)


def judge(got: Any, want: Any, inexact: tuple[int, ...]) -> Row:
    """status "equal" or "wrong", and what differs."""
    errors = []
    largest = 0.0
    for i, (one, other) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            errors.append(f"output {i} is {one.dtype} {one.shape}, must be {other.dtype} {other.shape}")
            continue
        wrong, at, error = map(np.asarray, compare(one, other, i not in inexact))
        largest = max(largest, float(error)) if i in inexact else largest
        if wrong:
            a, b = (np.asarray(x.reshape(-1)[int(at)]) for x in (one, other))
            errors.append(
                f"{wrong} of {one.size} entries of output {i} differ; entry {at} is {a}, must be {b}"
            )
    return {"status": "wrong" if errors else "equal", "detail": "; ".join(errors), "max_error": largest}


def check(name: str, limits: Limits) -> Iterator[Row]:
    """Each kernel of an operation against its reference on this device, on every named shape."""
    op = OPS[name]
    chosen = {spec: call for spec, call in op.calls.items() if not limits.quick or spec == QUICK}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        programs: dict[tuple[str, str], Future[Any]] = {}
        for spec, call in chosen.items():
            programs[spec, "inputs"] = pool.submit(compiled, functools.partial(op.inputs, call), key_like())
            for implementation in (REFERENCE, *KERNELS):
                run = form(op, call, implementation, limits.quick)
                programs[spec, implementation] = pool.submit(compiled, run, *call.arrays)
        for spec in chosen:
            base = {"op": name, "spec": spec}
            try:
                inputs = programs[spec, "inputs"].result()(jax.random.key(len(spec)))
                want = jax.block_until_ready(programs[spec, REFERENCE].result()(*inputs))
            except Exception as error:  # the others must be run nevertheless
                yield base | {"implementation": REFERENCE, "status": "error", "detail": told(error)}
                continue
            for kernel in KERNELS:
                row = base | {"implementation": kernel}
                if limits.over:
                    for program in programs.values():
                        program.cancel()
                    yield row | {"status": "not run", "detail": "out of time"}
                    continue
                try:
                    got = jax.block_until_ready(programs[spec, kernel].result()(*inputs))
                    yield row | judge(got, want, op.inexact)
                except NotImplementedError as error:
                    yield from not_here(row, error)
                except Exception as error:
                    yield row | {"status": "error", "detail": told(error)}


# The process -------------------------------------------------------------------------------------------------------


def rows_of_task(task: str, limits: Limits) -> Iterator[Row]:
    """task: "device", "check OP", "bandwidth OP" or "update IMPLEMENTATION"."""
    kind, _, name = task.partition(" ")
    if kind == "device":
        yield describe_device()
    elif limits.over:
        what = {"method": name} if kind == "update" else {"op": name, "spec": "all", "implementation": "all"}
        yield what | {"status": "not run", "detail": "out of time"}
    elif kind == "update":
        yield from time_updates(name, limits.parameters, limits.repeats, lambda: limits.over, limits.quick)
    else:
        yield from {"check": check, "bandwidth": bandwidth}[kind](name, limits)


def work(tasks: list[tuple[str, Limits]], connection: Any) -> None:
    """Runs the tasks and sends (task, row) for each row, then (task, None)."""
    for task, limits in tasks:
        try:
            for row in rows_of_task(task, limits):
                connection.send((task, row))
        except Exception as error:
            connection.send((task, {"status": "error", "detail": told(error)}))
        connection.send((task, None))
        if not still_works():
            os._exit(
                UNUSABLE
            )  # after an illegal access nothing runs any more in this process, the rest does in another


def still_works() -> bool:
    try:
        return bool(jax.block_until_ready(jnp.zeros((8,)) + 1.0)[0] == 1)
    except Exception:
        return False
