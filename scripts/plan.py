"""What a run will cost in time before it is started: its step beside the alternatives, which to take, how all of it scales.

    python scripts/plan.py --config llama1p8b --workers 64 --bandwidth 400gbit
    python scripts/plan.py --config llama1p8b --workers 64 --bandwidth 25gbit --tokens-per-sec 9000 --optimizer.density 0.01
    python scripts/plan.py --config llama500m --workers 64 --bandwidth 100gbit --latency 5us --curve --out runs/plan

Nothing is trained and no parameter allocated: bytes are the libraries' closed forms, times come from training/simulate.py.
What a worker computes is measured (--tokens-per-sec, --step-secs) or estimated from a device's data sheet. Settings of
pretrain.py may follow, such as --data.global_batch 512. --curve writes scaling.md, scaling.json and scaling.png; --paper
adds the published step times of SCAPE beside what is predicted for them from the dense ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import models
from training import _sim_paper as paper
from training import _sim_plan as planning
from training import config as settings
from training._bandwidth import parse_latency
from training._sim_hardware import UTILISATION, device_of
from training._sim_picture import scaling_figure
from training.launch import parse_bandwidth
from training.presets import PRESETS
from training.progress import amount, quantity
from training.simulate import Network, Prediction

COLUMNS = ("method", "step ms", "compute ms", "exposed ms", "update ms", "to dense", "sent")
PAPER = "SCAPE's published step times (arXiv 2607.01678), the sparse ones predicted from the dense ones alone"
PAPER_COLUMNS = ("figure", "published", "predicted", "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the run will run on."""

    workers: int
    """Workers, one device each."""
    bandwidth: str
    """Of each worker's link, as for tc: 100mbit, 400gbit."""
    latency: str = "5us"
    """Of a message, such as 5us or 20ms."""
    tokens_per_sec: float | None = None
    """Of one worker alone, measured; optimizer included."""
    step_secs: float | None = None
    """Of one worker alone with its part of the global batch, measured; optimizer included."""
    device: str = "gh200"
    """Where nothing was measured: estimate from this device's data sheet."""
    utilisation: float = UTILISATION
    """Assumed share of the device's peak."""
    densities: tuple[float, ...] = (0.1, 0.01)
    """Of the SCAPE rows."""
    local_steps: int | None = None
    """Steps of a round, for DiLoCo and GASLoC; left out: those of the configuration, or 30."""
    curve: bool = False
    """Also scaling over 4 to 1024 workers, as table, JSON and picture."""
    paper: bool = False
    """Also the paper's step times beside predictions."""
    curve_workers: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    """For --curve."""
    out: pathlib.Path = pathlib.Path("runs/plan")
    """Folder for what --curve writes."""


def make_plan(config: settings.Config, given: Settings) -> tuple[planning.Plan, str]:
    """The plan, and what is assumed of compute and links, in words."""
    if given.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {given.workers}. One worker sends nothing.")
    measured = [name for name in ("tokens_per_sec", "step_secs") if getattr(given, name) is not None]
    if len(measured) > 1:
        raise ValueError("--tokens-per-sec and --step-secs say the same, got both. Give one.")
    for name in (*measured, "utilisation"):
        value = getattr(given, name)
        if not 0 < value < (1.0000001 if name == "utilisation" else float("inf")):
            upper = " and at most 1" if name == "utilisation" else ""
            raise ValueError(f"--{name.replace('_', '-')} must be above 0{upper}, got {value}.")
    local_steps = given.local_steps
    if local_steps is None:
        local_steps = 30 if config.outer.name == "none" else config.outer.steps_per_round
    if local_steps <= config.outer.delay:
        least = config.outer.delay + 1
        raise ValueError(f"--local-steps must be at least {least}, got {local_steps}. 10 to 30 are usual.")
    if given.curve and (not given.curve_workers or min(given.curve_workers) < 1):
        raise ValueError(
            f"--curve-workers must be numbers >= 1, got {given.curve_workers}. Typical: 4 64 1024."
        )
    device = None
    share = config.tokens_per_step / given.workers
    if given.tokens_per_sec is not None:
        token_secs, told = (
            1 / given.tokens_per_sec,
            f"{quantity(given.tokens_per_sec)} tokens/s of one worker",
        )
    elif given.step_secs is not None:
        token_secs, told = given.step_secs / share, f"{given.step_secs:g} s for a step of one worker"
    else:
        device = device_of(given.device)
        token_secs = planning.secs_per_token(config, device, given.utilisation)
        told = (
            f"{given.device} at {given.utilisation:.0%} of {device.flops / 1e12:.0f} TFLOP/s (assumed, not measured), "
            f"{quantity(1 / token_secs)} tokens/s of one worker; updates at 80 % of its memory's rate"
        )
    network = Network(
        upload_bits=parse_bandwidth(given.bandwidth), upload_latency_secs=parse_latency(given.latency)
    )
    plan = planning.Plan(config=config, workers=given.workers, network=network, token_secs=token_secs,
                         device=device, local_steps=local_steps)  # fmt: skip
    links = (
        f"links of {given.bandwidth} of payload both ways, {given.latency} a message, rings; the all-reduce starts after "
        "the backward pass, masks are gathered beside it"
    )
    return plan, f"{told}; {links}"


def cells(row: Prediction, dense: Prediction) -> tuple[str, ...]:
    """A line of the table."""
    secs = (row.step_secs, row.compute_secs, row.exposed_secs, row.update_secs)
    return (
        row.method,
        *(_ms(value) for value in secs),
        f"{dense.step_secs / row.step_secs:.2f}x",
        amount(row.sent_bytes),
    )


def _ms(secs: float) -> str:
    return f"{secs * 1e3:,.0f}" if secs >= 0.1 else f"{secs * 1e3:.3g}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows)]


def paper_rows() -> list[tuple[str, ...]]:
    """The published figures beside the predicted ones."""
    found = paper.figures()
    return [(f.name, f"{f.published:.3f}", f"{f.predicted:.3f}", f"{f.error:+.0%}") for f in found]


def curve_rows(curves: Mapping[str, Sequence[Prediction]], workers: Sequence[int]) -> list[list[str]]:
    """Step times in milliseconds by workers."""
    return [
        [name, *(_ms(row.step_secs) for row in rows), *[""] * (len(workers) - len(rows))]
        for name, rows in curves.items()
    ]


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], console: Console) -> None:
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1),
        pad_edge=False,
    )
    for number, name in enumerate(columns):
        table.add_column(name.replace(" ", "\n") if number else name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def write(
    given: Settings, plan: planning.Plan, text: Sequence[str], rows: Sequence[Prediction], command: str
) -> None:
    """The plan and its scaling curves as scaling.md, scaling.json and scaling.png."""
    workers = sorted(given.curve_workers)
    methods, columns = planning.curve_methods(), ("method", *(f"{w}" for w in workers))
    strong, weak = (dict(plan.curve(methods, workers, strong=kind)) for kind in (True, False))
    versions = (
        f"Python {platform.python_version()}, JAX {jax.__version__}, {datetime.date.today().isoformat()}"
    )
    lines = [
        "# Scaling",
        "",
        f"Predicted by `training/simulate.py`, not measured. {versions}.",
        "",
        f"    {command}",
    ]
    lines += ["", *text]
    lines += [*markdown(COLUMNS, [cells(row, _dense(rows)) for row in rows]), ""]
    lines += [
        f"Step in ms by workers, strong scaling: {plan.config.tokens_per_step:,} tokens a step of all together.",
        "",
    ]
    lines += [*markdown(columns, curve_rows(strong, workers)), ""]
    lines += [f"Step in ms by workers, weak scaling: {plan.tokens():,.0f} tokens a step of each.", ""]
    lines += markdown(columns, curve_rows(weak, workers))
    found: dict[str, Any] = {
        "command": command,
        "versions": versions,
        "plan": [planning.as_dict(row) for row in rows],
    }
    for kind, curves in (("strong", strong), ("weak", weak)):
        found[kind] = {name: [planning.as_dict(row) for row in of] for name, of in curves.items()}
    if given.paper:
        lines += ["", PAPER, "", *markdown(PAPER_COLUMNS, paper_rows()), "", paper.explanation()]
        found["paper"] = [dataclasses.asdict(figure) | {"error": figure.error} for figure in paper.figures()]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "scaling.md").write_text("\n".join(lines) + "\n")
    (given.out / "scaling.json").write_text(json.dumps(found, indent=1) + "\n")
    title = f"{plan.config.model.preset}, {given.bandwidth} links (predicted)"
    drawing = scaling_figure(strong, weak, plan.config.tokens_per_step, plan.tokens(), title)
    drawing.savefig(given.out / "scaling.png", dpi=110)


def _dense(rows: Sequence[Prediction]) -> Prediction:
    return next(row for row in rows if row.method == planning.DENSE.name)


def parse(arguments: Sequence[str]) -> tuple[Settings, settings.Config]:
    """What the run will run on, and its settings."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", default="llama1p8b")
    named, rest = first.parse_known_args(arguments)
    base = settings.preset(named.config)
    given, rest = tyro.cli(
        Settings, args=rest, prog="plan.py", return_unknown_args=True,
        description=f"{__doc__}\nConfigurations (--config): {', '.join(PRESETS)}.",
    )  # fmt: skip
    with settings.gathered():
        config = tyro.cli(
            settings.Config, default=base, args=rest, prog="plan.py", config=(tyro.conf.FlagConversionOff,)
        )
    return given, config


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        given, config = parse(arguments)
        plan, assumed = make_plan(config, given)
        methods = planning.alternatives(given.densities, config.model.build().n_layers)
        own, rows = plan.predict_own(), [plan.predict(method) for method in methods]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen, why = planning.advice(rows)
    parameters = models.num_params(config.model.build())
    text = (
        f"{config.model.preset}, {parameters / 1e6:,.1f} M parameters, {given.workers} workers, {config.tokens_per_step:,} "
        f"tokens a step of all workers. Of a method in rounds a step's share of a round of {plan.local_steps} steps.",
        f"Assumed: {assumed}.",
        f"Take {chosen.method}: {why}. Times say nothing of the loss: fewer entries or meetings need more steps.",
    )
    console = Console()
    show(text[0], COLUMNS, [cells(row, _dense(rows)) for row in (own, *rows)], console)
    for line in text[1:]:
        console.print(line, highlight=False)
    if given.paper:
        show(PAPER, PAPER_COLUMNS, paper_rows(), console)
        console.print(paper.explanation(), highlight=False)
    if given.curve:
        paragraphs = [part for line in text for part in (line, "")]
        write(given, plan, paragraphs, [own, *rows], f"python scripts/plan.py {shlex.join(arguments)}")
        console.print(f"scaling.md, scaling.json, scaling.png: {given.out}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
