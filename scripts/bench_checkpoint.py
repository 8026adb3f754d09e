"""What a checkpoint costs a run: how long it holds up a step, steps while it is written, and host memory.

    JAX_PLATFORMS=cpu python scripts/bench_checkpoint.py
    JAX_PLATFORMS=cpu python scripts/bench_checkpoint.py --config gasloc-demo --out docs/results/bench_checkpoint.json

Steps of a preset on its own data, then a save, steps while it is written, and so on in turns. Memory is the peak of the
process's resident pages (VmHWM) over a save and the steps until it is written, above that of steps without one. Linux only.
Goals: a save holds a step up for less than 10 % of its time, and takes no more memory than one copy of the state.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from scripts._link_bench import provenance
from training import config as configs
from training._leaves import by_path
from training.checkpoint import Checkpoints
from training.mesh import prepare_devices
from training.progress import amount
from training.train import State, build, save, start

_PROCESS = pathlib.Path("/proc/self")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Cost of a checkpoint."""

    config: str = "demo"
    """Preset of scripts/pretrain.py."""
    steps: int = 10
    """Steps or rounds before each save."""
    repeats: int = 5
    """Saves."""
    out: pathlib.Path | None = None
    """Also write the figures here, as JSON."""


def peak_bytes() -> int:
    """The most resident memory since the last `reset_peak`."""
    lines = (_PROCESS / "status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def reset_peak() -> None:
    (_PROCESS / "clear_refs").write_text("5")


class Timed:
    """A run whose steps are waited for."""

    def __init__(self, config: configs.Config, checkpoints: Checkpoints):
        self.setup, self._checkpoints = build(config), checkpoints
        self.state: State = start(self.setup)
        self.step()  # compiled

    def step(self) -> float:
        """Seconds of one step or round."""
        state, method = self.state, self.setup.method
        batch = method.read(state.loader, method.steps_ahead(0))
        began = time.perf_counter()
        state.params, state.opt_state, measured = method.advance(
            state.params, state.opt_state, batch, method.steps_ahead(0)
        )
        jax.block_until_ready((state.params, state.opt_state, measured))
        state.step += method.steps_ahead(0)
        return time.perf_counter() - began

    def save(self) -> float:
        """Seconds until the run could go on."""
        began = time.perf_counter()
        save(self.setup, self.state, self._checkpoints)
        return time.perf_counter() - began

    @property
    def state_bytes(self) -> int:
        """One copy of what a checkpoint holds."""
        return sum(
            x.nbytes for tree in (self.state.params, self.state.opt_state) for x in by_path(tree).values()
        )


def main(settings: Settings) -> dict[str, Any]:
    if settings.steps < 1 or settings.repeats < 1:
        raise SystemExit(
            f"steps and repeats must be at least 1, got {settings.steps} and {settings.repeats}."
        )
    config = configs.preset(settings.config)
    prepare_devices(config.mesh.data, config.mesh.platform, islands=config.mesh.worker)
    plain, writing, held, on_disk, grown = [], [], [], [], []
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        timed = Timed(config, checkpoints)
        timed.save()  # opens files and threads that stay
        checkpoints.wait()
        for _ in range(settings.repeats):
            reset_peak()
            plain += [timed.step() for _ in range(settings.steps)]
            before = peak_bytes()
            reset_peak()
            held.append(timed.save())
            began = time.perf_counter()
            while checkpoints.is_writing():
                writing.append(timed.step())
            checkpoints.wait()
            on_disk.append(time.perf_counter() - began)
            grown.append(peak_bytes() - before)
        timed.state.loader.close()
        state_bytes, unit = timed.state_bytes, timed.setup.method.unit
    step = statistics.median(plain)
    result = {
        **provenance("bench_checkpoint"),
        "config": settings.config,
        "unit": unit,
        "state_bytes": state_bytes,
        "step_secs": step,
        "held_up_secs": statistics.median(held),
        "held_up_secs_each": held,
        "held_up_of_a_step": statistics.median(held) / step,
        "step_secs_while_written": statistics.median(writing),
        "on_disk_after_secs": statistics.median(on_disk),
        "peak_growth_bytes": max(grown),
        "peak_growth_of_the_state": max(grown) / state_bytes,
    }
    table = Table("", "", title=f"A checkpoint of {settings.config}", show_header=False)
    for name, value in (
        ("state", amount(state_bytes)),
        (f"{unit}, median", f"{1e3 * step:.0f} ms"),
        ("a save holds it up", f"{1e3 * result['held_up_secs']:.0f} ms, {result['held_up_of_a_step']:.1%}"),
        (f"{unit} while it is written", f"{1e3 * result['step_secs_while_written']:.0f} ms"),
        ("on disk after at most", f"{result['on_disk_after_secs']:.1f} s"),
        (
            "peak memory grows by",
            f"{amount(max(grown))}, {result['peak_growth_of_the_state']:.2f} of the state",
        ),
    ):
        table.add_row(name, value)
    Console().print(table)
    if settings.out:
        settings.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
