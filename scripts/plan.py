"""What a run will cost in time before it is started: its step beside the alternatives, which to take, how all of it scales.

    python scripts/plan.py --config llama1p8b --workers 64 --bandwidth 400gbit
    python scripts/plan.py --config llama1p8b --workers 64 --bandwidth 25gbit --tokens-per-sec 9000 --optimizer.density 0.01
    python scripts/plan.py --config llama500m --workers 64 --bandwidth 100gbit --latency 5us --curve --out runs/plan

Nothing is trained and no parameter allocated: bytes are the libraries' closed forms, times come from training/simulate.py.
What a worker computes is measured (--tokens-per-sec, --step-secs) or estimated from a device's data sheet. Settings of
pretrain.py may follow, such as --data.global_batch 512. --curve writes scaling.md, scaling.json and scaling.png; --paper
adds the published step times of SCAPE beside what is predicted for them from the dense ones. --measured comm.json holds
predictions against the cells that bench_comm.py measured.

Exit codes: 0 done; 2 wrong settings; 130 after Ctrl-C.
"""

# ruff: noqa: E402  the imports take seconds, in which Ctrl-C too ends with a line

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130

if __name__ == "__main__":

    def _interrupted(number: int, frame: object) -> None:
        # Not by an exception, which a module that is being imported may catch or tell in its own words.
        os.write(2, b"Interrupted.\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, _interrupted)

import argparse
import dataclasses
import json
import pathlib
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import models
from scripts.bench_round import model
from training import _sim_paper as paper
from training import _sim_plan as planning
from training import _sim_report as report
from training import config as settings
from training._bandwidth import parse_latency
from training._sim_hardware import UTILISATION, device_of
from training.launch import parse_bandwidth
from training.presets import PRESETS
from training.progress import quantity
from training.simulate import Network, compare


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the run will run on."""

    workers: int | None = None
    """Workers, one device each."""
    bandwidth: str | None = None
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
    measured: pathlib.Path | None = None
    """A comm.json of bench_comm.py: instead of a plan, how far predictions are from its cells."""
    out: pathlib.Path = pathlib.Path("runs/plan")
    """Folder for what --curve writes."""


def make_plan(config: settings.Config, given: Settings) -> tuple[planning.Plan, str]:
    """The plan, and what is assumed of compute and links, in words."""
    if given.workers is None or given.bandwidth is None:
        raise ValueError(
            "--workers and --bandwidth must be given, for example --workers 64 --bandwidth 400gbit."
        )
    if given.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {given.workers}. One worker sends nothing.")
    most = max(given.workers, *(given.curve_workers if given.curve else ()), 1)
    if most > planning.MOST_WORKERS:
        raise ValueError(
            f"--workers and --curve-workers must be at most {planning.MOST_WORKERS}, got {most}. More would take minutes."
        )
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


def measured_rows(path: pathlib.Path) -> list[tuple[str, ...]]:
    """Each cell of bench_comm.py beside its prediction, and how many are within the goal."""
    wanted = "--measured must be a comm.json of scripts/bench_comm.py"
    if not path.is_file():
        raise ValueError(f"{wanted}, got {path}, which is not there.")
    try:
        held = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:  # also bytes that are no text
        raise ValueError(f"{wanted}, got {path}, which is no JSON: {error}.") from error
    held = held if isinstance(held, dict) else {}
    cells, given = held.get("cells"), held.get("settings")
    million: Any
    workers: Any
    million, workers = (given.get(k) for k in ("million", "workers")) if isinstance(given, dict) else (0, 0)
    known = (
        isinstance(million, int | float) and 0 < million < 1e9 and isinstance(workers, int) and workers > 1
    )
    if not (known and isinstance(cells, list) and cells and all(isinstance(cell, dict) for cell in cells)):
        raise ValueError(
            f"{wanted}, got {path}, which lacks settings with million > 0 and workers >= 2, or cells. Run it first."
        )
    try:
        return report.measured_rows(compare(cells, models.abstract_params(model(million)), workers))
    except ValueError as error:
        raise ValueError(f"{wanted}, got {path}: {error}") from error


def check_folder(path: pathlib.Path) -> None:
    """Makes the folder before anything is computed for it.

    Raises:
      ValueError: it cannot be made, or nothing can be written into it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"--out must be a folder that can be made and written, got {path}: {error.strerror}. Use another."
        ) from error


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
        if given.measured is not None:
            show(
                "predicted beside measured", report.MEASURED_COLUMNS, measured_rows(given.measured), Console()
            )
            return 0
        plan, assumed = make_plan(config, given)
        if given.curve:
            check_folder(given.out)
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
    show(text[0], report.COLUMNS, report.plan_rows([own, *rows]), console)
    for line in text[1:]:
        console.print(line, highlight=False)
    if given.paper:
        show(report.PAPER, report.PAPER_COLUMNS, report.paper_rows(), console)
        console.print(paper.explanation(), highlight=False)
    if given.curve:
        report.write_scaling(
            given.out, plan, [own, *rows], text, workers=sorted(given.curve_workers), links=str(given.bandwidth),
            command=f"python scripts/plan.py {shlex.join(arguments)}", with_paper=given.paper,
        )  # fmt: skip
        console.print(f"scaling.md, scaling.json, scaling.png: {given.out}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
