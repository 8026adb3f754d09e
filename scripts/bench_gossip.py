"""GASLoC against its alternatives: the same model, data, tokens and inner AdamW, other rules of meeting.

    JAX_PLATFORMS=cpu python scripts/bench_gossip.py --repeats 3 --out docs/results/gossip
    JAX_PLATFORMS=cpu python scripts/bench_gossip.py --steps 60 --points diloco:10 gasloc_1peer:10 --out runs/gossip

A point is METHOD:H, H local steps between two exchanges. Every point trains a byte-level Llama of 0.1 M parameters on the
standard library's sources from the same seed; row block n of a global batch is worker n's, whatever the method. Writes
gossip.md (table), gossip.json and gossip.png. What is finished is kept in gossip.json, so an interrupted bench goes on
where it was, and more points or repeats can be added. Goals: GASLoC within 0.02 nats of DiLoCo with one peer, within 0.01
with two, and ahead of Local-DAdam.
"""

import dataclasses
import json
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro
from jax import lax
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich.console import Console

import gasloc_jax
import models
from training.config import ScheduleConfig
from training.corpus import prepare_stdlib
from training.data import eval_batches, make_loader
from training.evaluate import evaluate
from training.mesh import make_mesh, prepare_devices
from training.report import log_ticks
from training.schedules import make_schedule
from training.token_file import TokenFile, open_tokens, replace_atomically

EVAL_ROWS = 32  # sequences of an evaluation batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is the same for all points of a bench or sweep."""

    steps: int = 3000
    """Inner steps of every worker; a multiple of every H."""
    global_batch: int = 16
    """Sequences of an inner step, all workers together."""
    length: int = 128
    """Bytes of a sequence."""
    learning_rate: float = 3e-3
    """Peak of the inner AdamW; warm-up over 5 % of the steps, then a cosine."""
    end_fraction: float = 0.1
    """Where the cosine ends, as a fraction of the peak."""
    weight_decay: float = 0.1
    """Of the inner AdamW, which has b1 = 0.9, b2 = 0.95 and gradients clipped at norm 1."""
    n_layers: int = 2
    """Decoder layers."""
    width: int = 64
    """Width of the residual stream, a multiple of 32; heads of 32, feed-forward of 2.75 times the width."""
    evaluations: int = 10
    """Evaluations of the mean model on the way, each at the first exchange at or after its step."""
    eval_batches: int = 4
    """Batches of 32 sequences of an evaluation on the way."""
    final_batches: int = 12
    """Batches of 32 sequences of the last evaluation, which also looks at each worker."""
    seed: int = 0
    """Of the parameters, the data and the random graphs."""
    source: str = "stdlib"
    """stdlib, or a folder with train.tokens and validation.tokens of at most 257 different ids."""

    def check_fits(self, local_steps: int, workers: int) -> None:
        if self.steps % local_steps or self.global_batch % workers:
            raise SystemExit(
                f"steps must be a multiple of H and global_batch one of the workers, got {self.steps} steps with "
                f"H = {local_steps}, {self.global_batch} sequences for {workers} workers. Change one of them."
            )

    def model(self) -> models.LlamaConfig:
        return models.LlamaConfig(
            vocab_size=257,
            max_length=self.length,
            n_layers=self.n_layers,
            width=self.width,
            n_heads=self.width // 32,
            n_kv_heads=max(1, self.width // 64),
            ff_width=self.width * 11 // 4,
            tied_head=True,
            dtype="float32",
            scan_unroll=self.n_layers,
        )

    def inner(self) -> optax.GradientTransformation:
        rate = ScheduleConfig(
            learning_rate=self.learning_rate,
            end_learning_rate=self.learning_rate * self.end_fraction,
            warmup_fraction=0.05,
        )
        adamw = optax.adamw(make_schedule(rate, self.steps), b2=0.95, weight_decay=self.weight_decay)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def tokens(self, split: Literal["train", "validation"]) -> TokenFile:
        if self.source == "stdlib":
            return getattr(prepare_stdlib(), split)
        return open_tokens(pathlib.Path(self.source) / f"{split}.tokens")


def train_point(
    task: Task,
    outer: gasloc_jax.OuterOptimizer,
    local_steps: int,
    workers: int,
    *,
    average_gradients: bool = False,
) -> dict[str, Any]:
    """Trains with one rule of meeting, one program for the whole run, and returns its figures as plain JSON.

    With `average_gradients` the workers are the devices of one island that averages its gradients in every step: plain
    data parallelism.
    """
    task.check_fits(local_steps, workers)
    start, config, inner = time.perf_counter(), task.model(), task.inner()
    mesh = gasloc_jax.make_mesh(workers, devices=jax.devices()[:workers])
    if average_gradients:
        mesh = gasloc_jax.make_mesh(1, workers, devices=jax.devices()[:workers])
        inner = optax.chain(optax.stateless(lambda grads, _: lax.pmean(grads, "data")), inner)
    round = gasloc_jax.make_round(gasloc_jax.make_local_step(models.loss_fn(config), inner), outer, mesh)
    params = models.init_params(config, task.seed)
    all_reduce_bytes = gasloc_jax.local_sgd().bytes_per_round(params, workers)
    step_bytes = all_reduce_bytes if average_gradients else round.wire_bytes(params) / local_steps
    state, validation = round.init(params), task.tokens("validation")

    def loss(params: Any, batches: int) -> float:
        # On one device, so that the sequences do not depend on the number of workers.
        held_out = eval_batches(validation, EVAL_ROWS, task.length, batches)
        found = evaluate(config, jax.device_put(params, jax.devices()[0]), held_out, make_mesh(1), "data")
        assert found is not None
        return found.loss

    curve, due = [[0, loss(params, task.eval_batches), 0.0]], task.steps / task.evaluations
    for step, batches in _rounds(task, local_steps, round.num_workers):
        state, _ = round(state, batches, local_steps)
        if step >= due or step == task.steps:
            due = (step * task.evaluations // task.steps + 1) * task.steps / task.evaluations
            mean = loss(round.mean_params(state), task.eval_batches)
            curve.append([step, mean, float(round.consensus_distance(state))])
    losses = [loss(round.worker_params(state, n), task.final_batches) for n in range(round.num_workers)]
    return {
        "loss": loss(round.mean_params(state), task.final_batches),
        "best_worker": min(losses),
        "worst_worker": max(losses),
        "consensus_distance": curve[-1][2],
        "bytes_per_step": step_bytes,
        "skipped": int(np.sum(jax.device_get(state.skipped))),
        "parameters": models.num_params(config),
        "secs": time.perf_counter() - start,
        "curve": curve,  # [step, loss of the mean model on fewer batches, consensus distance]
    }


def _rounds(task: Task, local_steps: int, workers: int) -> Iterator[tuple[int, Any]]:
    """(inner steps done after the round, batches (W, H, rows, length + 1)): the same sequences for every method."""
    given = {"global_batch": task.global_batch, "length": task.length, "seed": task.seed}
    with make_loader(task.tokens("train"), **given, vocab_size=task.model().vocab_size) as loader:
        for done in range(local_steps, task.steps + 1, local_steps):
            tokens = np.stack([next(loader)["tokens"] for _ in range(local_steps)])
            split = tokens.reshape(local_steps, workers, -1, task.length + 1)
            yield done, {"tokens": np.ascontiguousarray(np.swapaxes(split, 0, 1))}


# Method -> the outer optimizer; a seed chooses the random graphs.
METHODS: dict[str, Callable[[int], gasloc_jax.OuterOptimizer]] = {
    "ddp_adamw": lambda seed: gasloc_jax.gasloc(optax.sgd(1.0), axis_name="worker"),
    "dadam": lambda seed: gasloc_jax.dadam(gasloc_jax.random_pairs(seed), "worker"),
    "diloco": lambda seed: gasloc_jax.diloco(axis_name="worker"),
    "gasloc_1peer": lambda seed: gasloc_jax.gasloc(None, gasloc_jax.random_pairs(seed), "worker"),
    "gasloc_2peer": lambda seed: gasloc_jax.gasloc(None, gasloc_jax.random_ring(seed), "worker"),
    "local_dadam": lambda seed: gasloc_jax.local_dadam(gasloc_jax.random_pairs(seed), "worker"),
    "noloco": lambda seed: gasloc_jax.noloco(topology=gasloc_jax.random_pairs(seed), axis_name="worker"),
}
GOALS = {"gasloc_1peer": 0.02, "gasloc_2peer": 0.01}  # nats above DiLoCo
POINTS = ("ddp_adamw:1", "dadam:1") + tuple(f"{m}:{h}" for h in (10, 30, 1) for m in list(METHODS)[2:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Task):
    """Methods of meeting at one token budget."""

    out: pathlib.Path
    """Folder of gossip.md, gossip.json and gossip.png."""
    points: tuple[str, ...] = POINTS
    """What to run, METHOD:H; the table also shows what the folder holds already."""
    workers: int = 8
    """Virtual workers."""
    repeats: int = 1
    """Runs of each point, with the seeds seed, seed + 1, ..."""


def parse(point: str) -> tuple[str, int]:
    """METHOD:H as its two parts."""
    method, _, steps = point.partition(":")
    alone = method in ("ddp_adamw", "dadam")  # these exchange in every step
    if method not in METHODS or not steps.isdecimal() or int(steps) < 1 or (alone and steps != "1"):
        raise SystemExit(
            f"a point must be METHOD:H with a method among {', '.join(METHODS)} and H >= 1 (1 for ddp_adamw and "
            f"dadam), got {point!r}. For example gasloc_1peer:10."
        )
    return method, int(steps)


def finished(path: pathlib.Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The points that the folder holds, which must have been run with the same settings."""
    if not path.exists():
        return {}
    held = json.loads(path.read_text())
    other = [f"{k} was {v}, is {settings[k]}" for k, v in held["settings"].items() if v != settings[k]]
    if other:
        raise SystemExit(f"{path} holds points of another task: {'; '.join(other)}. Use another --out.")
    return held["points"]


def table(settings: Settings, points: dict[str, Any]) -> str:
    """The results as Markdown, means over seeds, and which goals they meet."""
    first = next(iter(points.values()))
    lines = [
        f"{next(iter(first.values()))['parameters']:,} parameters, {settings.workers} workers, {settings.steps} inner "
        f"steps of {settings.global_batch * settings.length:,} bytes of text, inner AdamW with peak learning rate "
        f"{settings.learning_rate:g}. Losses in nats per byte on the same held-out text, means over seeds; what follows "
        f'"to" is the mean difference of runs with the same seed and its range. Python {platform.python_version()}, '
        f"JAX {jax.__version__}.\n",
        f"    python scripts/bench_gossip.py {' '.join(sys.argv[1:])}\n",
        "| method | H | seeds | mean model | to DiLoCo | best worker | worst worker | consensus | bytes per step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    goals = []
    for point, runs in points.items():
        method, steps = parse(point)
        gaps = {}
        for other in ("diloco", "local_dadam"):
            theirs = points.get(f"{other}:{steps}", {})
            found = [r["loss"] - theirs[seed]["loss"] for seed, r in runs.items() if seed in theirs]
            if found:
                gaps[other] = np.array(found)
        mean = {
            name: np.mean([r[name] for r in runs.values()])
            for name in next(iter(runs.values()))
            if name != "curve"
        }
        lines.append(
            f"| {method} | {steps} | {len(runs)} | {mean['loss']:.4f} | {_spread(gaps.get('diloco'))} "
            f"| {mean['best_worker']:.4f} | {mean['worst_worker']:.4f} | {mean['consensus_distance']:.3f} "
            f"| {mean['bytes_per_step']:,.0f} |"
        )
        for other, gap in gaps.items() if method in GOALS else ():
            limit = GOALS[method] if other == "diloco" else 0.0
            met = "met" if gap.mean() <= limit else "not met"
            goals.append(f"- {method}:{steps}, {_spread(gap)} to {other}; goal {limit:+.2f}: {met}.")
    return "\n".join([*lines, "", *goals]) + "\n"


def _spread(values: np.ndarray | None) -> str:
    """Mean and range."""
    if values is None:
        return ""
    around = f" ({values.min():+.4f} .. {values.max():+.4f})" if len(values) > 1 else ""
    return f"{values.mean():+.4f}{around}"


def picture(points: dict[str, Any]) -> Figure:
    """Loss of the mean model over inner steps, and over the bytes that a worker sent; the first seed of each point."""
    drawing = Figure(figsize=(13, 5.6), layout="constrained")
    by_step, by_bytes = drawing.subplots(1, 2, sharey=True)
    dashes = {1: ":", 10: "-", 30: "--"}
    for point, runs in points.items():
        method, steps = parse(point)
        r = next(iter(runs.values()))
        style: dict[str, Any] = {"color": f"C{list(METHODS).index(method)}", "ls": dashes.get(steps, "-.")}
        at, loss, _ = np.array(r["curve"][1:]).T
        by_step.plot(at, loss, label=point, **style)
        by_bytes.plot(at * r["bytes_per_step"], loss, **style)
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
    by_step.set(title="validation loss of the mean model", xlabel="inner step", ylabel="nats per byte")
    by_bytes.set(title="for bytes sent by a worker", xlabel="bytes", xscale="log")
    log_ticks(by_bytes.xaxis, EngFormatter(unit="B"))  # after the scale, which brings its own
    drawing.legend(loc="outside lower center", ncols=6)
    return drawing


def main(settings: Settings) -> None:
    wanted = [parse(point) for point in settings.points]
    for _, steps in wanted:
        settings.check_fits(steps, settings.workers)
    if settings.workers < 2 or settings.repeats < 1:
        raise SystemExit(
            f"workers must be at least 2 and repeats at least 1, got {settings.workers} and {settings.repeats}. One worker "
            "meets nobody."
        )
    prepare_devices(settings.workers)
    settings.out.mkdir(parents=True, exist_ok=True)
    path, console = settings.out / "gossip.json", Console()
    given = dataclasses.asdict(settings)
    plain = {name: value for name, value in given.items() if name not in ("out", "points", "repeats")}
    points = finished(path, plain)
    for seed in range(settings.seed, settings.seed + settings.repeats):
        for point, (method, steps) in zip(settings.points, wanted, strict=True):
            if str(seed) in points.get(point, {}):
                console.print(f"{point}, seed {seed}: done before")
                continue
            task = dataclasses.replace(settings, seed=seed)
            every_step = method == "ddp_adamw"
            result = train_point(
                task, METHODS[method](seed), steps, settings.workers, average_gradients=every_step
            )
            points.setdefault(point, {})[str(seed)] = result
            points = dict(sorted(points.items(), key=lambda item: parse(item[0])[::-1]))
            with replace_atomically(path) as file:
                file.write(json.dumps({"settings": plain, "points": points}, indent=1).encode() + b"\n")
            console.print(f"{point}, seed {seed}: {result['loss']:.4f}, {result['secs']:.0f} s")
    text = table(settings, points)
    (settings.out / "gossip.md").write_text(f"# Gossip\n\n{text}")
    picture(points).savefig(settings.out / "gossip.png", dpi=110)
    console.print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
