"""A grid over GASLoC's settings: local steps, outer learning rate, momentum, topology and number of workers.

    JAX_PLATFORMS=cpu python scripts/sweep.py --out runs/sweep
    JAX_PLATFORMS=cpu python scripts/sweep.py --steps 60 --local-steps 10 --momenta 0.9 --topologies random_pairs \
        --outer-learning-rates 0.4 0.7 1.0 --rows outer_learning_rate --columns momentum --out runs/small-sweep

Every point trains the model of scripts/bench_gossip.py with the same data and tokens; the outer step is optax's Nesterov
(complete is DiLoCo). A finished point is one line of sweep.jsonl and is not run again, also where the grid has grown.
Writes a table of all points, best first (sweep.md), and heat-maps (sweep.png), one for each topology: the lowest loss over
all other settings.
"""

import dataclasses
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import optax
import tyro
from matplotlib.figure import Figure
from rich.console import Console

import gasloc_jax
from scripts.bench_gossip import Task, train_point
from training.mesh import prepare_devices

TOPOLOGIES: dict[str, Callable[[int], gasloc_jax.Topology]] = {
    "random_pairs": gasloc_jax.random_pairs,
    "random_ring": gasloc_jax.random_ring,
    "ring": lambda seed: gasloc_jax.ring(),
    "exponential": lambda seed: gasloc_jax.exponential(),
    "complete": lambda seed: gasloc_jax.complete(),
}
Topology = Literal["random_pairs", "random_ring", "ring", "exponential", "complete"]
Axis = Literal["topology", "local_steps", "outer_learning_rate", "momentum", "workers"]


@dataclasses.dataclass(frozen=True)
class Point:
    """One combination; its fields are the axes of the grid."""

    workers: int
    topology: Topology
    local_steps: int
    outer_learning_rate: float
    momentum: float

    def outer(self, seed: int) -> gasloc_jax.OuterOptimizer:
        chain = optax.sgd(
            self.outer_learning_rate, momentum=self.momentum or None, nesterov=self.momentum > 0
        )
        return gasloc_jax.gasloc(chain, TOPOLOGIES[self.topology](seed), "worker")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Task):
    """Every combination of the lists below."""

    out: pathlib.Path
    """Folder of sweep.jsonl, sweep.md and sweep.png."""
    local_steps: tuple[int, ...] = (10, 30)
    """H."""
    outer_learning_rates: tuple[float, ...] = (0.4, 0.7, 1.0)
    """Of the outer Nesterov step."""
    momenta: tuple[float, ...] = (0.5, 0.9)
    """Of the outer Nesterov step; 0: plain averaging."""
    topologies: tuple[Topology, ...] = ("random_pairs", "random_ring", "complete")
    """Who meets in a round."""
    workers: tuple[int, ...] = (8,)
    """Virtual workers; they share the same global batch."""
    rows: Axis = "momentum"
    """Down a heat-map."""
    columns: Axis = "outer_learning_rate"
    """Across a heat-map."""
    panels: Axis = "topology"
    """One heat-map for each value of this; rows and columns come first."""

    def grid(self) -> list[Point]:
        lists = (
            self.workers,
            self.topologies,
            self.local_steps,
            self.outer_learning_rates,
            self.momenta,
        )
        return [Point(*values) for values in dict.fromkeys(itertools.product(*lists))]

    def check(self) -> None:
        """Everything that a later point would stumble over, before the first one is trained."""
        for name, wrong, right in (
            ("local_steps", [h for h in self.local_steps if h < 1 or self.steps % h], "divisors of steps"),
            ("workers", [w for w in self.workers if w < 1 or self.global_batch % w], "divisors of global_batch"),
            ("outer_learning_rates", [x for x in self.outer_learning_rates if not 0 < x < math.inf], "above 0"),
            ("momenta", [x for x in self.momenta if not 0 <= x < 1], "in [0, 1)"),
            ("topologies", [], "known"),
        ):  # fmt: skip
            if wrong or not getattr(self, name):
                raise SystemExit(f"{name} must be {right}, at least one of them; got {wrong or 'none'}.")
        if self.rows == self.columns:
            raise SystemExit(f"rows and columns must be two settings, got {self.rows} for both.")


def finished(path: pathlib.Path, task: dict[str, Any]) -> dict[Point, dict[str, Any]]:
    """The points of this task in the file; a last line that was cut short is removed."""
    if not path.exists():
        return {}
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    lines = [json.loads(line) for line in whole.splitlines()]
    return {Point(**line["point"]): line for line in lines if line["task"] == task}


def table(settings: Settings, results: dict[Point, dict[str, Any]]) -> str:
    """Markdown, best point first; a loss that is not finite comes last."""
    names = [field.name for field in dataclasses.fields(Point)]
    columns = [*names, "mean model", "best worker", "worst worker", "consensus distance", "bytes per step"]
    lines = [
        f"{len(results)} points of {settings.steps} inner steps, {settings.global_batch * settings.length:,} bytes of "
        f"text each, inner learning rate {settings.learning_rate:g}, seed {settings.seed}; losses in nats per byte.\n",
        f"    python scripts/sweep.py {' '.join(sys.argv[1:])}\n",
        f"| {' | '.join(name.replace('_', ' ') for name in columns)} |",
        "|---" * len(columns) + "|",
    ]
    for point, r in sorted(results.items(), key=lambda item: _ranked(item[1]["loss"])):
        cells = [str(value) for value in dataclasses.astuple(point)]
        cells += [f"{r[name]:.4f}" for name in ("loss", "best_worker", "worst_worker")]
        lines.append(f"| {' | '.join(cells)} | {r['consensus_distance']:.3f} | {r['bytes_per_step']:,.0f} |")
    return "\n".join(lines) + "\n"


def _ranked(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def heat(
    results: dict[Point, dict[str, Any]], rows: Axis, columns: Axis
) -> tuple[list[Any], list[Any], np.ndarray]:
    """(values of rows, values of columns, lowest loss for each pair over all other settings; NaN where there is none)."""
    down, across = (list(dict.fromkeys(getattr(p, axis) for p in results)) for axis in (rows, columns))
    lowest = np.full((len(down), len(across)), np.inf)
    for point, r in results.items():
        at = down.index(getattr(point, rows)), across.index(getattr(point, columns))
        lowest[at] = min(lowest[at], _ranked(r["loss"]))
    return down, across, np.where(np.isfinite(lowest), lowest, np.nan)


def picture(results: dict[Point, dict[str, Any]], rows: Axis, columns: Axis, panels: Axis) -> Figure:
    """A heat-map for each value of `panels`, with one scale of colours and a number in each field."""
    split = panels not in (rows, columns)
    values = list(dict.fromkeys(getattr(p, panels) for p in results)) if split else [None]
    parts = [{p: r for p, r in results.items() if not split or getattr(p, panels) == v} for v in values]
    maps = [heat(part, rows, columns) for part in parts]
    losses = np.concatenate([lowest.ravel() for _, _, lowest in maps])
    losses = losses[np.isfinite(losses)] if np.isfinite(losses).any() else np.zeros(1)
    width, height = max(len(across) for _, across, _ in maps), max(len(down) for down, _, _ in maps)
    drawing = Figure(figsize=(2.5 + len(maps) * (0.6 + 1.1 * width), 2 + 0.7 * height), layout="constrained")
    all_axes = drawing.subplots(1, len(maps), squeeze=False)[0]
    for axes, value, (down, across, lowest) in zip(all_axes, values, maps, strict=True):
        image = axes.imshow(
            np.ma.masked_invalid(lowest),
            cmap="viridis_r",
            aspect="auto",
            vmin=losses.min(),
            vmax=losses.max(),
        )
        for i, j in np.ndindex(*lowest.shape):
            color = "white" if lowest[i, j] > (losses.min() + losses.max()) / 2 else "black"
            text = f"{lowest[i, j]:.3f}" if np.isfinite(lowest[i, j]) else "-"
            axes.text(j, i, text, ha="center", va="center", color=color)
        axes.set_xticks(range(len(across)), [str(x) for x in across])
        axes.set_yticks(range(len(down)), [str(x) for x in down])
        title = f"{panels.replace('_', ' ')}: {value}" if split else None
        axes.set(xlabel=columns.replace("_", " "), ylabel=rows.replace("_", " "), title=title)
    drawing.colorbar(image, ax=all_axes, label="lowest validation loss, nats per byte")
    return drawing


def main(settings: Settings) -> None:
    settings.check()
    prepare_devices(max(settings.workers))
    settings.out.mkdir(parents=True, exist_ok=True)
    path, console = settings.out / "sweep.jsonl", Console()
    task = {field.name: getattr(settings, field.name) for field in dataclasses.fields(Task)}
    done, grid = finished(path, task), settings.grid()
    for number, point in enumerate(grid, 1):
        name = ", ".join(f"{k} {v}" for k, v in dataclasses.asdict(point).items())
        if point in done:
            console.print(f"{number} of {len(grid)}, {name}: done before")
            continue
        result = train_point(task=settings, outer=point.outer(settings.seed), local_steps=point.local_steps,
                             workers=point.workers)  # fmt: skip
        done[point] = {"point": dataclasses.asdict(point), "task": task, **result}
        with path.open("a") as file:
            file.write(json.dumps(done[point]) + "\n")
        console.print(f"{number} of {len(grid)}, {name}: {result['loss']:.4f}, {result['secs']:.0f} s")
    results = {point: done[point] for point in grid}
    text = table(settings, results)
    (settings.out / "sweep.md").write_text(f"# Sweep\n\n{text}")
    picture(results, settings.rows, settings.columns, settings.panels).savefig(
        settings.out / "sweep.png", dpi=110
    )
    console.print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
