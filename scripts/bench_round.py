"""Time of an exchange and of a whole round of each outer optimizer, on virtual devices of one CPU, against DiLoCo.

    JAX_PLATFORMS=cpu python scripts/bench_round.py
    JAX_PLATFORMS=cpu python scripts/bench_round.py --million 1 --repeats 3 --methods diloco gasloc_1peer

Methods take turns, and each figure is a ratio of neighbouring runs, so that a machine whose speed drifts does not change
it. In one process a message is a copy and waits for all devices, so this is the time of the programs, not of a network.
Goal: a round with one peer takes no longer than one of DiLoCo.
"""

import dataclasses
import json
import pathlib
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table

import gasloc_jax
import models
from training.mesh import prepare_devices

AXIS = "worker"
NESTEROV = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
# Name -> the outer optimizer and the fragments of a round.
METHODS: dict[str, Callable[[], tuple[gasloc_jax.OuterOptimizer, int]]] = {
    "diloco": lambda: (gasloc_jax.diloco(axis_name=AXIS), 1),
    "diloco_int8": lambda: (gasloc_jax.diloco(axis_name=AXIS, payload_dtype=jnp.int8), 1),
    "gasloc_1peer": lambda: (_gasloc(gasloc_jax.random_pairs()), 1),
    "gasloc_2peer": lambda: (_gasloc(gasloc_jax.random_ring()), 1),
    "gasloc_1peer_bfloat16": lambda: (_gasloc(gasloc_jax.random_pairs(), payload_dtype=jnp.bfloat16), 1),
    "gasloc_1peer_int8": lambda: (_gasloc(gasloc_jax.random_pairs(), payload_dtype=jnp.int8), 1),
    "gasloc_1peer_fragments4": lambda: (_gasloc(gasloc_jax.random_pairs()), 4),
    "local_sgd": lambda: (gasloc_jax.local_sgd(AXIS), 1),
    "local_dadam": lambda: (gasloc_jax.local_dadam(gasloc_jax.random_pairs(), AXIS), 1),
    "noloco": lambda: (gasloc_jax.noloco(topology=gasloc_jax.random_pairs(), axis_name=AXIS), 1),
}


def _gasloc(topology: gasloc_jax.Topology, **options: Any) -> gasloc_jax.OuterOptimizer:
    return gasloc_jax.gasloc(optax.sgd(**NESTEROV), topology, AXIS, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Timing of exchanges and rounds."""

    million: float = 4.0
    """Parameters, in millions, of a byte-level Llama of 4 layers."""
    workers: int = 8
    """Virtual devices, one worker each."""
    local_steps: int = 4
    """Inner steps of a round, on one sequence of 32 bytes each."""
    repeats: int = 15
    """Timed turns; each method runs one exchange and one round in each."""
    methods: tuple[str, ...] = tuple(METHODS)
    """What to time; diloco always is."""
    out: pathlib.Path | None = None
    """Also write the figures here, as JSON."""


def model(million: float) -> models.LlamaConfig:
    width = max(64, round((million * 1e6 / (4 * 10.6)) ** 0.5 / 64) * 64)
    return models.LlamaConfig(
        vocab_size=257, max_length=32, n_layers=4, width=width, n_heads=width // 64, n_kv_heads=width // 64,
        ff_width=width * 11 // 4 // 32 * 32, tied_head=True, dtype="float32", scan_unroll=1,
    )  # fmt: skip


class Timed:
    """One method's rounds, with the seconds of each part."""

    def __init__(self, settings: Settings, name: str):
        config = model(settings.million)
        outer, fragments = METHODS[name]()
        mesh = gasloc_jax.make_mesh(settings.workers, devices=jax.devices()[: settings.workers])
        local = gasloc_jax.make_local_step(models.loss_fn(config), optax.adamw(1e-3))
        self.run = gasloc_jax.make_round(local, outer, mesh, fragments=fragments)
        params = models.init_params(config, 0)
        self.bytes = self.run.wire_bytes(params)
        rng, shape = np.random.default_rng(0), (settings.workers, settings.local_steps, 1, 33)
        self.batches = self.run.place({"tokens": rng.integers(0, 257, shape, np.int32)})
        self.steps = settings.local_steps
        self.state = self.run.init(params)
        self.round()
        self.exchange()  # compiled

    def round(self) -> float:
        start = time.perf_counter()
        self.state, _ = jax.block_until_ready(self.run(self.state, self.batches, self.steps))
        return time.perf_counter() - start

    def exchange(self) -> float:
        state, _ = jax.block_until_ready(self.run.local(self.state, self.batches, self.steps))
        start = time.perf_counter()
        self.state = jax.block_until_ready(self.run.exchange(state))
        return time.perf_counter() - start


def main(settings: Settings) -> dict[str, Any]:
    unknown = [name for name in settings.methods if name not in METHODS]
    if unknown or settings.repeats < 1 or settings.workers < 2 or settings.local_steps < 1:
        raise SystemExit(
            f"methods must be among {', '.join(METHODS)}, workers at least 2, repeats and local_steps at least 1; got "
            f"{unknown or 'known methods'}, {settings.workers}, {settings.repeats}, {settings.local_steps}."
        )
    prepare_devices(settings.workers)
    names = list(dict.fromkeys(["diloco", *settings.methods]))
    timed = {name: Timed(settings, name) for name in names}
    secs: dict[str, dict[str, list[float]]] = {name: {"exchange": [], "round": []} for name in names}
    for _ in range(settings.repeats):
        for name, one in timed.items():
            secs[name]["exchange"].append(one.exchange())
            secs[name]["round"].append(one.round())
    size = models.num_params(model(settings.million))
    result: dict[str, Any] = {
        "params": size, "workers": settings.workers, "local_steps": settings.local_steps,
        "repeats": settings.repeats, "python": platform.python_version(), "jax": jax.__version__, "methods": {},
    }  # fmt: skip
    table = Table(
        title=f"{size / 1e6:.1f} M parameters, {settings.workers} workers, {jax.devices()[0].device_kind}"
    )
    for column in ("method", "exchange ms", "to diloco", "round ms", "to diloco", "MB sent"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name in names:
        found: dict[str, Any] = {"wire_bytes": timed[name].bytes}
        for part in ("exchange", "round"):
            ratio = np.array(secs[name][part]) / np.array(secs["diloco"][part])
            found |= {
                f"{part}_ms": float(np.median(secs[name][part]) * 1e3),
                f"{part}_ratio": float(np.median(ratio)),
                f"{part}_ratio_min": float(ratio.min()),
                f"{part}_ratio_max": float(ratio.max()),
            }
        result["methods"][name] = found
        cells = [name]
        for part in ("exchange", "round"):
            least, most = found[f"{part}_ratio_min"], found[f"{part}_ratio_max"]
            cells += [
                f"{found[f'{part}_ms']:.1f}",
                f"{found[f'{part}_ratio']:.2f} ({least:.2f} .. {most:.2f})",
            ]
        table.add_row(*cells, f"{found['wire_bytes'] / 1e6:.1f}")
    Console(width=120).print(table)
    if settings.out:
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        settings.out.write_text(json.dumps(result, indent=2) + "\n")
    return result


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
