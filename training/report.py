"""report.html of a run: settings, summary and plots in one file that opens without a network.

python -m training.report runs/demo-1
"""

from __future__ import annotations

import dataclasses
import html
import io
import json
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import (
    EngFormatter,
    Formatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    StrMethodFormatter,
)

from training import metrics
from training._panels import PANELS, Panel
from training.progress import amount, duration, lost, quantity, spread

CONFIG_FILE, SUMMARY_FILE, REPORT_FILE = "config.json", "summary.json", "report.html"

_MOST_INSIDE = 3  # curves; a longer legend beside the plot covers none of them

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
        outer = self.config.get("outer", {}).get("name", "none")
        details = (
            f"{optimizer['name']}{density}" if outer == "none" else f"{outer} of {optimizer['name']}{density}"
        )
        return self.folder.name if details in self.folder.name else f"{self.folder.name} ({details})"


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
    unit, workers = ("round" if "islands" in summary else "step"), f"{summary['workers']}"
    if summary.get("island_devices", 1) > 1:
        workers = f"{summary['islands']} islands of {summary['island_devices']}"
    rows = [
        ("steps", f"{summary['steps']}" + (f" ({', '.join(lost(summary))})" if lost(summary) else "")),
        ("training loss (nats per token)", f"{summary['train_loss']:.4f}"),
        ("validation loss (nats per token)", f"{summary['validation_loss']:.4f}"),
        ("validation perplexity", f"{summary['perplexity']:.3f}"),
    ]
    if summary.get("bits_per_byte") is not None:
        rows.append(("validation bits per byte", f"{summary['bits_per_byte']:.4f}"))
    if "consensus_distance" in summary:
        if "validation_loss_worker_min" in summary:
            lowest, highest = summary["validation_loss_worker_min"], summary["validation_loss_worker_max"]
            rows.append(("validation loss of single workers", f"{lowest:.4f} to {highest:.4f}"))
        rows.append(("consensus distance of the workers", f"{summary['consensus_distance']:.3g}"))
        if summary["local_steps"] != summary.get("local_steps_set", summary["local_steps"]):
            rows.append(("local steps of the last round", ", ".join(map(str, summary["local_steps"]))))
        if "exchange_secs" in summary:
            rows.append(("seconds of the last exchange", spread(summary["exchange_secs"], ".3g")))
    rows += [
        ("tokens/s", quantity(summary["tokens_per_sec"])),
        ("time", duration(summary["secs"])),
        ("parameters", f"{summary['parameters']:,}"),
        ("workers", workers),
        (f"bytes per worker and step (last {unit})", amount(sent)),
        ("dense all-reduce would send", amount(dense)),
        (f"times fewer (last {unit})", _factor(dense, sent)),
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
    """A plot for each of PANELS with its sentence; those without data are left out."""
    drawn = [
        (panel, curves)
        for panel in PANELS
        if _belongs(panel, run) and (curves := [c for c in panel.curves if _has(run, c[0])])
    ]
    rows = max(1, (len(drawn) + 1) // 2)
    figure = Figure(figsize=(11, 3.6 * rows), layout="constrained")
    for number, (panel, curves) in enumerate(drawn):
        axes = figure.add_subplot(rows, 2, number + 1)
        series, meaning = [(label, *metrics.series(run.records, key)) for key, label in curves], panel.meaning
        if panel.by_worker:
            (label, steps, lists) = series[0]
            if any(len(set(values)) > 1 for values in lists):
                _picture(axes, label, steps, lists)
                series, meaning = [], f"One row for each worker. {meaning}"
            else:
                series = [(label, steps, [values[0] for values in lists])]
        largest = 0.0
        for label, steps, values in series:
            axes.plot(steps, values, label=label, marker="o" if len(steps) < 25 else None, markersize=3)
            largest = max([largest, *(value for value in values if math.isfinite(value))])
        if series:
            _scale(axes, panel.title, largest)
        axes.set(title=panel.title, xlabel="step\n" + textwrap.fill(meaning, 72))
        axes.xaxis.label.set_fontsize("small")
        axes.grid(alpha=0.3)
        if len(curves) > _MOST_INSIDE:
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, fontsize="small")
        elif len(curves) > 1:
            axes.legend(framealpha=0.6)
    return figure


def _belongs(panel: Panel, run: RunResults) -> bool:
    return (not panel.needs or _has(run, panel.needs)) and not (panel.unless and _has(run, panel.unless))


def _has(run: RunResults, key: str) -> bool:
    return any(key in record for record in run.records)


def _picture(axes: Axes, label: str, steps: list[int], lists: list[list[float]]) -> None:
    """Workers by steps, colours from 0 up; a column ends at the step at which it was logged."""
    edges = [steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1), *steps]
    rows = np.transpose(lists)
    drawn = axes.pcolormesh(edges, np.arange(len(rows) + 1) - 0.5, rows, vmin=0, rasterized=len(steps) > 200)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("worker")
    axes.figure.colorbar(drawn, ax=axes, label=label)


def _scale(axes: Axes, title: str, largest: float) -> None:
    """Limits with room above the largest value, and ticks that do not run into each other."""
    if title == "norms" and largest > 0:
        axes.set_yscale("log")
        axes.set_ylim(top=4 * largest)  # room for the legend
        log_ticks(axes.yaxis, StrMethodFormatter("{x:g}"))
    elif title == "overlap of adjacent masks":
        axes.set_ylim(0, 1.05)
    elif title not in ("loss (nats per token)", "loss of single workers"):
        axes.set_ylim(0, 1.08 * largest or 1)
    if title == "bytes sent per worker":
        axes.yaxis.set_major_formatter(EngFormatter(unit="B"))


def log_ticks(axis: Axis, formatter: Formatter) -> None:
    """Labels at 1, 2 and 5 of each power of ten only: on a narrow range every minor tick would get one."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(formatter)
    axis.set_minor_formatter(NullFormatter())


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
