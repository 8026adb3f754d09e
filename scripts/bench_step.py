"""Time of one optimizer update against optax.adamw on the same arrays, in one process, on one device.

    JAX_PLATFORMS=cpu python scripts/bench_step.py
    JAX_PLATFORMS=cpu python scripts/bench_step.py --million 25 --repeats 5

The update is what ONE worker of `--workers` does: it selects in its own share of the rows, and the collectives are
replaced by local copies of the size they deliver, so that nothing but the update is timed. Methods take turns, and each
figure is a ratio of neighbouring runs, so that a machine whose speed drifts does not change it. Goals: at most 1.0 times
adamw at density 0.01 and 1.5 times at 0.1.
"""

import contextlib
import dataclasses
import json
import pathlib
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table

import scape_jax
from scape_jax import _exchange as exchange


@dataclasses.dataclass(frozen=True)
class Settings:
    """Timing of one optimizer update."""

    million: float = 50.0
    """Parameters, in millions, in leaves shaped like a Llama's stacked layers."""
    workers: int = 8
    """The worker's share of selection is that of one among this many."""
    repeats: int = 15
    """Timed rounds; each method runs once a round."""
    out: pathlib.Path | None = None
    """Also write the figures here, as JSON."""


def llama_like(million: float) -> dict[str, jax.Array]:
    """Float32 leaves in a Llama's proportions: stacked layers, embedding, head, norms."""
    width, layers, vocab = 512, 6, 8192
    unit = {
        "embed": (vocab, width),
        "query": (layers, width, width),
        "key": (layers, width, width // 2),
        "value": (layers, width, width // 2),
        "out": (layers, width, width),
        "gate": (layers, width, width * 8 // 3 // 32 * 32),
        "up": (layers, width, width * 8 // 3 // 32 * 32),
        "down": (layers, width * 8 // 3 // 32 * 32, width),
        "norm": (2 * layers + 1, width),
        "head": (width, vocab),
    }
    size = sum(int(np.prod(s)) for s in unit.values())
    times = max(1, round(million * 1e6 / size))
    key = jax.random.key(0)
    shapes = {n: (s[0] * times, *s[1:]) if n not in ("norm",) else s for n, s in unit.items()}
    return {
        n: 0.02 * jax.random.normal(jax.random.fold_in(key, i), s, jnp.float32)
        for i, (n, s) in enumerate(shapes.items())
    }


@contextlib.contextmanager
def one_worker_of(num_workers: int) -> Iterator[None]:
    """Inside, scape_jax computes what worker 0 of `num_workers` does; collectives become local copies."""

    with (
        mock.patch.object(exchange, "axis_size", lambda axis_name: num_workers),
        mock.patch.object(exchange, "check_local", lambda *args: None),
        mock.patch.object(exchange, "worker_index", lambda *args: jnp.zeros((), jnp.int32)),
        mock.patch.object(exchange, "all_gather", lambda x, axis_name, w: jnp.broadcast_to(x, (w, *x.shape))),
        mock.patch.object(exchange, "all_sum", lambda tree, axis_name, w: tree),
    ):
        yield


def updater(
    tx: Any, params: Any, grads: list[Any], num_workers: int, warm: int, fused: bool = False, **extra: Any
) -> Callable[[], float]:
    """A function that runs one update + apply_updates and returns its seconds; state and params are donated."""
    with one_worker_of(num_workers):
        state = jax.jit(tx.init)(params)
        run = jax.jit(lambda p, s, g: one_update(tx, p, s, g, fused, {}), donate_argnums=(0, 1))
        params = jax.tree.map(jnp.array, params)
        for i in range(warm):
            params, state = run(params, state, grads[i % len(grads)])
        if extra:
            run = jax.jit(lambda p, s, g: one_update(tx, p, s, g, fused, extra), donate_argnums=(0, 1))
            params, state = run(params, state, grads[0])
    held = {"params": params, "state": state, "n": 0}

    def once() -> float:
        start = time.perf_counter()
        held["params"], held["state"] = jax.block_until_ready(
            run(held["params"], held["state"], grads[held["n"] % len(grads)])
        )
        held["n"] += 1
        return time.perf_counter() - start

    return once


def one_update(
    tx: Any, params: Any, state: Any, grads: Any, fused: bool, extra: dict[str, Any]
) -> tuple[Any, Any]:
    if fused:
        return tx.apply(grads, state, params, **extra)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def main(settings: Settings) -> dict[str, Any]:
    if settings.million < 25 or settings.repeats < 1 or settings.workers < 1:
        raise SystemExit(
            "million must be at least 25, repeats and workers at least 1; got "
            f"{settings.million:g}, {settings.repeats}, {settings.workers}."
        )
    params = llama_like(settings.million)
    size = sum(p.size for p in params.values())
    key = jax.random.key(1)
    grads = [
        {
            n: 1e-3 * jax.random.normal(jax.random.fold_in(key, i * 100 + j), p.shape)
            for j, (n, p) in enumerate(params.items())
        }
        for i in range(3)
    ]
    options: dict[str, Any] = {"weight_decay": 0.1, "clip_norm": 1.0}
    methods: dict[str, Callable[[], float]] = {
        "optax.adamw": updater(optax.adamw(1e-3, weight_decay=0.1), params, grads, 1, 1),
        "optax.clip + adamw": updater(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1)),
            params,
            grads,
            1,
            1,
        ),
        "adams": updater(scape_jax.adams(1e-3, **options), params, grads, 1, 1),
    }
    for density in (0.1, 0.01):
        tx = scape_jax.scape(1e-3, density, **options)
        for fused in (True, False):
            name = f"scape d={density}" + ("" if fused else ", optax form")
            methods[name] = updater(tx, params, grads, settings.workers, 3, fused, level=tx.final_level)
    copy = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    buffer = jnp.zeros((size,), jnp.float32)
    rows: dict[str, list[float]] = {name: [] for name in methods}
    copies = []
    for _ in range(settings.repeats):
        start = time.perf_counter()
        buffer = jax.block_until_ready(copy(buffer))
        copies.append(time.perf_counter() - start)
        for name, once in methods.items():
            rows[name].append(once())
    bandwidth = 8 * size / float(np.median(copies))
    # Bytes that must move per parameter: adamw g, m, v, p read and m, v, p written; scape g, h, p read and h, p written.
    floor_bytes = {"optax.adamw": 28, "optax.clip + adamw": 32, "adams": 24}
    result: dict[str, Any] = {
        "params": size,
        "workers": settings.workers,
        "repeats": settings.repeats,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": str(jax.devices()[0].device_kind),
        "bandwidth_gb_per_sec": bandwidth / 1e9,
        "methods": {},
    }
    table = Table(
        title=f"{size / 1e6:.1f} M parameters, one worker of {settings.workers}, {jax.devices()[0].device_kind}"
    )
    for column in ("method", "ms (median)", "ratio to adamw", "min .. max", "floor bytes/param", "floor ms"):
        table.add_column(column, justify="left" if column == "method" else "right")
    base = np.array(rows["optax.adamw"])
    for name, times in rows.items():
        ratio = np.array(times) / base
        moved = floor_bytes.get(name, 20)
        floor_ms = moved * size / bandwidth * 1e3
        result["methods"][name] = {
            "median_ms": float(np.median(times) * 1e3),
            "ratio_median": float(np.median(ratio)),
            "ratio_min": float(ratio.min()),
            "ratio_max": float(ratio.max()),
            "floor_bytes_per_param": moved,
            "floor_ms": floor_ms,
        }
        table.add_row(
            name,
            f"{np.median(times) * 1e3:.1f}",
            f"{np.median(ratio):.2f}",
            f"{ratio.min():.2f} .. {ratio.max():.2f}",
            str(moved),
            f"{floor_ms:.1f}",
        )
    console = Console()
    console.print(table)
    console.print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s (x + 1 in place, median)")
    if settings.out:
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        settings.out.write_text(json.dumps(result, indent=2) + "\n")
    return result


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
