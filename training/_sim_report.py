"""Plans, scaling curves and comparisons as tables, JSON and a picture."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from training import _sim_paper as paper
from training._sim_picture import scaling_figure
from training._sim_plan import DENSE, Plan, as_dict, curve_methods
from training.progress import amount
from training.simulate import Comparison, Prediction

COLUMNS = ("method", "step ms", "compute ms", "exposed ms", "update ms", "to dense", "sent")
MEASURED_COLUMNS = ("method", "Mbit/s", "predicted s", "measured s", "error")
PAPER = "SCAPE's published step times (arXiv 2607.01678), the sparse ones predicted from the dense ones alone"
PAPER_COLUMNS = ("figure", "published", "predicted", "error")
GOAL = 0.15  # relative error of a prediction


def plan_rows(rows: Sequence[Prediction]) -> list[tuple[str, ...]]:
    """Of `COLUMNS`; dense AdamS is among the rows."""
    dense = next(row for row in rows if row.method == DENSE.name)
    return [
        (
            row.method,
            *(_ms(secs) for secs in (row.step_secs, row.compute_secs, row.exposed_secs, row.update_secs)),
            f"{dense.step_secs / row.step_secs:.2f}x",
            amount(row.sent_bytes),
        )
        for row in rows
    ]


def curve_rows(curves: Mapping[str, Sequence[Prediction]]) -> list[tuple[str, ...]]:
    """Step times in milliseconds by workers."""
    return [(name, *(_ms(row.step_secs) for row in rows)) for name, rows in curves.items()]


def paper_rows() -> list[tuple[str, ...]]:
    """Of `PAPER_COLUMNS`."""
    found = paper.figures()
    return [(f.name, f"{f.published:.3f}", f"{f.predicted:.3f}", f"{f.error:+.0%}") for f in found]


def measured_rows(found: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """Of `MEASURED_COLUMNS`, and how many are within the goal."""
    rows = []
    for c in found:
        secs = (f"{value:.3f}" for value in (c.predicted_secs, c.measured_secs))
        rows.append((c.method, f"{c.bandwidth / 1e6:g}", *secs, f"{c.error:+.0%}"))
    near = sum(abs(c.error) <= GOAL for c in found)
    return [*rows, (f"{near} of {len(found)} within {GOAL:.0%}", "", "", "", "")]


def _ms(secs: float) -> str:
    return f"{secs * 1e3:,.0f}" if secs >= 0.1 else f"{secs * 1e3:.3g}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows)]


def write_scaling(
    folder: Path,
    plan: Plan,
    rows: Sequence[Prediction],
    text: Sequence[str],
    *,
    workers: Sequence[int],
    links: str,
    command: str,
    with_paper: bool,
) -> None:
    """Writes the plan's rows and its scaling over `workers` as scaling.md, scaling.json and scaling.png.

    Args:
      text: paragraphs that stand above the tables.
      links: the bandwidth in words, for the picture.
      with_paper: whether the paper's figures follow.
    """
    methods, columns = curve_methods(), ("method", *(f"{w}" for w in workers))
    strong, weak = (dict(plan.curve(methods, workers, strong=kind)) for kind in (True, False))
    versions = (
        f"Python {platform.python_version()}, JAX {jax.__version__}, {datetime.date.today().isoformat()}"
    )
    all_tokens, own_tokens = plan.config.tokens_per_step, plan.tokens()
    paragraphs = [
        "# Scaling",
        f"Predicted by `training/simulate.py`, not measured. {versions}.",
        f"    {command}",
        *text,
        "\n".join(markdown(COLUMNS, plan_rows(rows))),
        f"Step in ms by workers, strong scaling: {all_tokens:,} tokens a step of all together.",
        "\n".join(markdown(columns, curve_rows(strong))),
        f"Step in ms by workers, weak scaling: {own_tokens:,.0f} tokens a step of each.",
        "\n".join(markdown(columns, curve_rows(weak))),
    ]
    found: dict[str, Any] = {"command": command, "versions": versions, "plan": [as_dict(r) for r in rows]}
    for kind, curves in (("strong", strong), ("weak", weak)):
        found[kind] = {name: [as_dict(row) for row in of] for name, of in curves.items()}
    if with_paper:
        paragraphs += [PAPER, "\n".join(markdown(PAPER_COLUMNS, paper_rows())), paper.explanation()]
        found["paper"] = [dataclasses.asdict(f) | {"error": f.error} for f in paper.figures()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scaling.md").write_text("\n\n".join(paragraphs) + "\n")
    (folder / "scaling.json").write_text(json.dumps(found, indent=1) + "\n")
    title = f"{plan.config.model.preset}, {links} links (predicted)"
    scaling_figure(strong, weak, all_tokens, own_tokens, title).savefig(folder / "scaling.png", dpi=110)
