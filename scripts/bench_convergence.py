"""Loss against steps and against bytes: SCAPE beside dense AdamW and AdamS and top-k of the raw gradient.

    JAX_PLATFORMS=cpu python scripts/bench_convergence.py --steps 1200 --out docs/results/convergence
    JAX_PLATFORMS=cpu python scripts/bench_convergence.py --steps 40 --methods adams scape_d0.1 --out runs/quick

Every method trains the same model from the same seed on the same batches of the standard library's sources, with the
same learning rate and token budget; they differ in the optimizer alone. A method whose run is finished is not run again,
so an interrupted bench goes on where it was. Writes a table (convergence.md, .json) and a picture (.png).
"""

import dataclasses
import json
import pathlib
import platform
import sys
import time

import jax
import tyro
from rich.console import Console

from training import compare, report
from training.config import Config, OptimizerConfig
from training.mesh import prepare_devices
from training.presets import PRESETS
from training.train import build, train

LENGTH = 128
METHODS: dict[str, OptimizerConfig] = {
    "adamw": OptimizerConfig(name="adamw"),
    "adams": OptimizerConfig(name="adams"),
    **{
        f"{name}_d{density:g}": OptimizerConfig(name=name, density=density)
        for density in (0.1, 0.01)
        for name in ("topk_adamw", "topk_adams")
    },
    **{
        f"scape_d{density:g}" + ("_stale1" if power else ""): OptimizerConfig(
            name="scape", density=density, staleness_power=power
        )
        for density in (0.1, 0.01)
        for power in (0.0, 1.0)
    },
    "scape_d0.1_stale1_embed": OptimizerConfig(
        name="scape", density=0.1, staleness_power=1.0, dense=("norm", "bias", "scale", "embed")
    ),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Convergence of the methods at one token budget."""

    out: pathlib.Path
    """Folder of the table and the picture; the runs themselves go to its subfolder runs/."""
    steps: int = 1200
    """Optimizer steps of every method."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which methods to run."""
    workers: int = 4
    """Virtual workers."""
    global_batch: int = 16
    """Sequences of 128 bytes per step, all workers together."""
    learning_rate: float = 1e-3
    """Peak; warm-up over 5 % of the steps, then a cosine to a tenth of it."""
    density_warmup_fraction: float = 0.1
    """Part of the run in which SCAPE's density falls from 1 to its value."""
    n_layers: int = 2
    """Decoder layers."""
    width: int = 64
    """Width of the residual stream; heads of 32, feed-forward of 2.75 times the width."""
    seed: int = 0
    """Of the parameters and the data."""


def configuration(settings: Settings, method: str) -> Config:
    """The demo configuration with this method and budget."""
    base = PRESETS["demo"]()
    optimizer = METHODS[method]
    if optimizer.name == "scape":
        optimizer = dataclasses.replace(optimizer, density_warmup_fraction=settings.density_warmup_fraction)
    folder = settings.out / "runs" / method
    return dataclasses.replace(
        base,
        run=dataclasses.replace(
            base.run, name=method, folder=str(folder), steps=settings.steps, seed=settings.seed
        ),
        model=dataclasses.replace(
            base.model,
            n_layers=settings.n_layers,
            width=settings.width,
            n_heads=settings.width // 32,
            n_kv_heads=max(1, settings.width // 64),
            ff_width=settings.width * 11 // 4,
        ),
        data=dataclasses.replace(base.data, global_batch=settings.global_batch, length=LENGTH),
        optimizer=optimizer,
        schedule=dataclasses.replace(
            base.schedule, learning_rate=settings.learning_rate, end_learning_rate=settings.learning_rate / 10
        ),
        mesh=dataclasses.replace(base.mesh, data=settings.workers),
        eval=dataclasses.replace(base.eval, every=max(1, settings.steps // 12), batches=16, final_batches=64),
        checkpoint=dataclasses.replace(base.checkpoint, every=0),
        log=dataclasses.replace(base.log, every=max(1, settings.steps // 120), tensorboard=False),
    )


def run_method(settings: Settings, method: str, console: Console) -> None:
    config = configuration(settings, method)
    folder = pathlib.Path(config.run.folder)
    if (folder / report.SUMMARY_FILE).exists():
        console.print(f"{method}: done before")
        return
    console.rule(method)
    start = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    config.save(folder / report.CONFIG_FILE)
    outcome = train(build(config), folder)
    if outcome.summary is None:
        raise SystemExit(outcome.exit_code)
    console.print(f"{method}: {time.perf_counter() - start:.0f} s")


def write_table(settings: Settings) -> str:
    """The table as Markdown, also written beside the JSON with the figures."""
    summaries = {}
    for method in settings.methods:
        path = settings.out / "runs" / method / report.SUMMARY_FILE
        summaries[method] = json.loads(path.read_text())
    base = summaries.get("adams", {}).get("validation_loss")
    lines = [
        "| method | train loss | validation loss | to AdamS | bytes per worker and step | times fewer |",
        "|---|---|---|---|---|---|",
    ]
    for method, s in summaries.items():
        gap = "" if base is None else f"{s['validation_loss'] - base:+.3f}"
        fewer = s["dense_bytes_per_step"] / s["bytes_per_step"]
        lines.append(
            f"| {method} | {s['train_loss']:.3f} | {s['validation_loss']:.3f} | {gap} "
            f"| {s['bytes_per_step']:,} | {fewer:.1f} |"
        )
    any_summary = next(iter(summaries.values()))
    head = (
        f"{any_summary['parameters']:,} parameters, {settings.workers} workers, {settings.steps} steps of "
        f"{settings.global_batch * LENGTH:,} bytes of text, learning rate {settings.learning_rate:g} (the same for "
        f"all), seed {settings.seed}. "
        f"Losses in nats per byte; Python {platform.python_version()}, JAX {jax.__version__}.\n\n"
        f"    python scripts/bench_convergence.py {' '.join(sys.argv[1:])}\n\n"
    )
    text = head + "\n".join(lines) + "\n"
    (settings.out / "convergence.md").write_text("# Convergence\n\n" + text)
    (settings.out / "convergence.json").write_text(
        json.dumps({"settings": _plain(settings), "methods": summaries}, indent=2) + "\n"
    )
    return text


def _plain(settings: Settings) -> dict:
    return {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in dataclasses.asdict(settings).items()}


def main(settings: Settings) -> None:
    unknown = sorted(set(settings.methods) - set(METHODS))
    if unknown:
        raise SystemExit(f"methods must be among {', '.join(METHODS)}; got {', '.join(unknown)}.")
    console = Console()
    prepare_devices(settings.workers)
    settings.out.mkdir(parents=True, exist_ok=True)
    for method in settings.methods:
        run_method(settings, method, console)
    console.print(write_table(settings))
    results = [report.read_run(settings.out / "runs" / method) for method in settings.methods]
    compare.write(results, settings.out / "convergence.png")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
