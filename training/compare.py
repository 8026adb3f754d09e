"""Several runs in one picture and one table: what does each reach, and for how many bytes."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from training import metrics
from training.progress import amount, quantity
from training.report import RunResults, log_ticks, svg

COLUMNS = (
    "run",
    "steps",
    "train loss",
    "validation loss",
    "tokens/s",
    "bytes per worker and step",
    "times fewer",
    "fewer, whole run",
)
_STYLE = """
body { font: 15px system-ui, sans-serif; margin: 2em } td, th { padding: .2em 1.2em .2em 0; text-align: left }
svg { width: 100%; height: auto }
"""


def table(runs: Sequence[RunResults]) -> list[tuple[str, ...]]:
    """One row per run under COLUMNS, best validation loss first; unfinished runs show what they have."""
    return [_row(run) for run in sorted(runs, key=_validation_loss)]


def _validation_loss(run: RunResults) -> float:
    values = metrics.series(run.records, "validation_loss")[1]
    return run.summary.get("validation_loss", values[-1] if values else float("inf"))


def _row(run: RunResults) -> tuple[str, ...]:
    if not run.summary:
        return _unfinished(run)
    s = run.summary
    return (
        run.label,
        f"{s['steps']}",
        f"{s['train_loss']:.4f}",
        f"{s['validation_loss']:.4f}",
        quantity(s["tokens_per_sec"]),
        amount(s["bytes_per_step"]),
        _fewer(s["dense_bytes_per_step"], s["bytes_per_step"]),
        _fewer(s["dense_bytes_total"], s["bytes_sent_total"]),
    )


def _unfinished(run: RunResults) -> tuple[str, ...]:
    steps, losses = metrics.series(run.records, "loss_mean")
    last: dict[str, Any] = next(
        (record for record in reversed(run.records) if "tokens_per_sec" in record), {}
    )
    validation = _validation_loss(run)
    return (
        run.label,
        f"{steps[-1] if steps else 0} of {run.config['run']['steps']}",
        f"{losses[-1]:.4f}" if losses else "-",
        f"{validation:.4f}" if validation < float("inf") else "-",
        quantity(last.get("tokens_per_sec", 0)),
        amount(last.get("wire_bytes", 0)),
        "-",
        _fewer(last.get("dense_bytes_total", 0), last.get("bytes_sent_total", 0)),
    )


def _fewer(dense: float, sent: float) -> str:
    return f"{dense / sent:.1f}" if sent else "-"


def figure(runs: Sequence[RunResults]) -> Figure:
    """Training and validation loss over the steps, and validation loss over the bytes that a worker sent."""
    drawing = Figure(figsize=(16, 4.6), layout="constrained")
    by_step, validation, by_bytes = drawing.subplots(1, 3)
    anything_sent = False
    for number, run in enumerate(runs):
        color = f"C{number % 10}"
        by_step.plot(*metrics.series(run.records, "loss_mean"), color=color, label=run.label)
        validation.plot(
            *metrics.series(run.records, "validation_loss"), color=color, marker="o", markersize=3
        )
        # A single worker sends nothing, for which a logarithmic axis has no place.
        points = [r for r in run.records if "validation_loss" in r and r["bytes_sent_total"]]
        sent, losses = ([r[key] for r in points] for key in ("bytes_sent_total", "validation_loss"))
        by_bytes.plot(sent, losses, color=color, marker="o", markersize=3)
        anything_sent = anything_sent or bool(points)
    by_step.set(title="training loss", xlabel="step", ylabel="nats per token")
    validation.set(title="validation loss", xlabel="step")
    by_bytes.set(title="validation loss for bytes sent per worker", xlabel="bytes")
    if anything_sent:
        by_bytes.set_xscale("log")
        log_ticks(by_bytes.xaxis, EngFormatter(unit="B"))  # after the scale, which brings its own
    for axes in (by_step, validation, by_bytes):
        axes.grid(alpha=0.3)
    drawing.legend(loc="outside lower center", ncols=min(4, len(runs)))
    return drawing


def write(runs: Sequence[RunResults], picture: str | Path) -> tuple[Path, Path]:
    """Writes the picture (.png) and a page with picture and table beside it (.html); returns both paths."""
    picture = Path(picture)
    drawing = figure(runs)
    drawing.savefig(picture, format="png", dpi=110)
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table(runs))
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    page = picture.with_suffix(".html")
    page.write_text(
        "<!doctype html><html lang='en'><head><meta "
        f"charset='utf-8'><title>Runs</title><style>{_STYLE}</style>"
        f"</head><body><h1>Comparison of {len(runs)} runs</h1>{svg(drawing)}"
        f"<table><tr>{head}</tr>{body}</table></body></html>\n"
    )
    return picture, page
