"""report.html of a run: settings, summary and plots in one file that opens without a network.

python -m training.report runs/demo-1
"""

from __future__ import annotations

import dataclasses
import html
import io
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from training import metrics
from training.progress import amount, duration, quantity

CONFIG_FILE, SUMMARY_FILE, REPORT_FILE = "config.json", "summary.json", "report.html"

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222
} table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .9em .2em 0; text-align: left;
vertical-align: top } td.number { text-align: right; font-variant-numeric: tabular-nums } pre { background:
#f6f6f6; padding: 1em; overflow-x: auto; columns: 2; font-size: 12px } svg { width: 100%; height: auto }
"""


@dataclasses.dataclass(frozen=True)
class RunResults:
    """What a run left in its folder."""

    folder: Path
    config: dict[str, Any]
    records: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def label(self) -> str:
        """Name of the folder and what distinguishes the run: optimizer and density."""
        optimizer = self.config["optimizer"]
        dense = optimizer["name"] in ("adams", "adamw")
        density = "" if dense else f" d={optimizer['density']:g}"
        return f"{self.folder.name} ({optimizer['name']}{density})"


def read_run(folder: str | Path) -> RunResults:
    """Reads a run's folder; the summary is empty where the run has not ended."""
    folder = Path(folder)
    config = folder / CONFIG_FILE
    if not config.is_file():
        raise ValueError(
            f"a run's folder must hold {CONFIG_FILE}, got {folder}. Give the folder printed by pretrain.py."
        )
    summary = folder / SUMMARY_FILE
    return RunResults(
        folder=folder,
        config=json.loads(config.read_text()),
        records=metrics.read(folder),
        summary=json.loads(summary.read_text()) if summary.is_file() else {},
    )


def write_report(folder: str | Path) -> Path:
    """Writes FOLDER/report.html and returns its path."""
    run = read_run(folder)
    title = html.escape(run.label)
    text = json.dumps(run.config, indent=1)
    page = (
        "<!doctype html><html lang='en'><head><meta "
        f"charset='utf-8'><title>{title}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{title}</h1>{_table(summary_rows(run.summary))}{svg(run_figure(run))}"
        f"<h2>Settings</h2><pre>{html.escape(text)}</pre></body></html>\n"
    )
    path = run.folder / REPORT_FILE
    path.write_text(page)
    return path


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as (what, value) in the order in which one reads it."""
    if not summary:
        return [("state", "not finished: no summary yet")]
    sent, dense = summary["bytes_per_step"], summary["dense_bytes_per_step"]
    rows = [
        (
            "steps",
            f"{summary['steps']} ({summary['skipped']} skipped)"
            if summary["skipped"]
            else f"{summary['steps']}",
        ),
        ("training loss (nats per token)", f"{summary['train_loss']:.4f}"),
        ("validation loss (nats per token)", f"{summary['validation_loss']:.4f}"),
        ("validation perplexity", f"{summary['perplexity']:.3f}"),
    ]
    if summary.get("bits_per_byte") is not None:
        rows.append(("validation bits per byte", f"{summary['bits_per_byte']:.4f}"))
    rows += [
        ("tokens/s", quantity(summary["tokens_per_sec"])),
        ("time", duration(summary["secs"])),
        ("parameters", f"{summary['parameters']:,}"),
        ("workers", f"{summary['workers']}"),
        ("bytes per worker and step (last step)", amount(sent)),
        ("dense all-reduce would send", amount(dense)),
        ("times fewer (last step)", _factor(dense, sent)),
        ("bytes per worker, whole run", amount(summary["bytes_sent_total"])),
        ("times fewer, whole run", _factor(summary["dense_bytes_total"], summary["bytes_sent_total"])),
    ]
    return rows


def _factor(dense: float, sent: float) -> str:
    return f"{dense / sent:.1f}" if sent else "nothing is sent by one worker"


def _table(rows: list[tuple[str, str]]) -> str:
    cells = (f"<tr><td>{html.escape(k)}</td><td class='number'>{html.escape(v)}</td></tr>" for k, v in rows)
    return f"<table>{''.join(cells)}</table>"


def run_figure(run: RunResults) -> Figure:
    """Loss, bytes, density, mask overlap, norms and learning rate; panels without data are left out."""
    panels = [("loss (nats per token)", [("loss_mean", "training"), ("validation_loss", "validation")])]
    panels += [
        ("bytes sent per worker", [("bytes_sent_total", "sent"), ("dense_bytes_total", "dense all-reduce")])
    ]
    panels += [("density of the mask", [("density", "density")])]
    panels += [("overlap of adjacent masks", [("mask_overlap", "overlap")])]
    panels += [
        (
            "norms",
            [("residual_norm", "residual"), ("kept_norm", "kept part"), ("grad_norm", "averaged gradient")],
        )
    ]
    panels += [("learning rate", [("lr", "learning rate")])]
    panels = [
        (title, [c for c in curves if metrics.series(run.records, c[0])[0]]) for title, curves in panels
    ]
    panels = [(title, curves) for title, curves in panels if curves]
    figure = Figure(figsize=(11, 3.1 * max(1, (len(panels) + 1) // 2)), layout="constrained")
    for number, (title, curves) in enumerate(panels):
        axes = figure.add_subplot((len(panels) + 1) // 2, 2, number + 1)
        positive = False
        for key, label in curves:
            steps, values = metrics.series(run.records, key)
            axes.plot(steps, values, label=label, marker="o" if len(steps) < 25 else None, markersize=3)
            positive = positive or any(value > 0 for value in values)
        if title == "norms":
            axes.set_yscale("log" if positive else "linear")
        elif title != "loss (nats per token)":
            axes.set_ylim(bottom=0)
        if title == "bytes sent per worker":
            axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend()
    return figure


def svg(figure: Figure) -> str:
    """The figure as an <svg> element to put into a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[
        text.getvalue().index("<svg") :
    ]  # without the XML prologue, which HTML does not allow


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m training.report RUN_FOLDER")
    print(write_report(sys.argv[1]))
