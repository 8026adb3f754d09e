"""What the early gather of masks hides: SCAPE as it is, and with masks that are gathered behind the gradients.

    python scripts/bench_overlap.py --out docs/results/overlap
    python scripts/bench_overlap.py --mbit 50 --repeats 3 --out runs/overlap

Starts 4 processes on this machine behind links of a known speed and runs both programs in turns. Writes overlap.json and
overlap.png: step times, and from XLA's own trace of a step when the first worker computed and when its messages were on the
way. The same for GPUs is read from the scheduled program: tests/gpu_compile/test_scape.py.
"""

import dataclasses
import json
import pathlib
import statistics
from typing import Any

import tyro
from matplotlib.figure import Figure
from rich.console import Console

from scripts import _link_bench as bench
from scripts._comm_worker import Task
from training.corpus import prepare_stdlib
from training.workers import stopped_by_hand

METHODS = {"scape_d0.1_bitmap": "at the start of the step", "scape_d0.1_late": "behind the gradients"}
_MESSAGES = ("all-gather", "all_gather", "all-reduce", "psum")
_AROUND = ("while", "call", "conditional")  # hold other operations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Task):
    """SCAPE with early and with late masks."""

    out: pathlib.Path
    """Folder of overlap.json and overlap.png."""
    mbit: float = 20.0
    """Mbit/s that a worker can send, and as much receive."""
    workers: int = 4
    """Processes."""
    repeats: int = 10
    """Turns of a few steps each."""


def kind(operation: str) -> str | None:
    """Of an HLO operation: mask, payload or compute; None where it only holds others."""
    if operation.startswith(_MESSAGES):
        return "mask" if "gather" in operation else "payload"
    return None if operation.startswith(_AROUND) else "compute"


def joined(spans: list[tuple[float, float]], gap_secs: float = 1e-3) -> list[tuple[float, float]]:
    """Spans in order, those closer than the gap as one."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= gap_secs:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def beside_secs(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """For how long both are going on; each list is of spans that do not meet."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in others)


def picture(traces: dict[str, dict[str, list[tuple[float, float]]]], mbit: float) -> Figure:
    drawing = Figure(figsize=(11, 3.6), layout="constrained")
    colors = {"compute": "C0", "mask": "C1", "payload": "C3"}
    for axes, (method, spans) in zip(
        drawing.subplots(len(traces), 1, sharex=True), traces.items(), strict=True
    ):
        for row, (name, color) in enumerate(colors.items()):
            bars = [(a * 1e3, (b - a) * 1e3) for a, b in spans.get(name, [])]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=color)
        axes.set(yticks=range(len(colors)), yticklabels=list(colors))
        axes.invert_yaxis()
        axes.set_title(f"masks gathered {METHODS[method]}", fontsize=9, loc="left")
        axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(f"ms of a step of the first worker, {mbit:g} Mbit/s")
    return drawing


def main(settings: Settings) -> dict[str, Any]:
    settings.out.mkdir(parents=True, exist_ok=True)
    prepare_stdlib()
    console = Console()
    secs: dict[str, list[float]] = {method: [] for method in METHODS}
    traces: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with bench.start(settings.workers, "_comm_worker", settings, Task, console) as workers:
        for method in METHODS:
            workers.ask(prepare=method, keep=True)
        workers.cluster.set_bandwidth(settings.mbit * 1e6)
        for turn in range(settings.repeats):
            for method in METHODS if turn % 2 else reversed(METHODS):
                workers.ask(take=method)
                workers.ask(whole=1)
                secs[method].append(workers.ask(whole=3)[0]["secs"])
                if method not in traces:
                    spans: dict[str, list[tuple[float, float]]] = {}
                    for operation, _, start, end in workers.ask(trace=True)[0]["events"]:
                        if name := kind(operation):
                            spans.setdefault(name, []).append((start, end))
                    traces[method] = {name: joined(found) for name, found in spans.items()}
        jax_version = workers.ready[0]["jax"]
    early, late = (statistics.median(found) for found in secs.values())
    result = {
        **bench.provenance("bench_overlap"),
        "jax": jax_version,
        "mbit": settings.mbit,
        "secs": secs,
        "saved_secs": late - early,
        "mask_secs": {m: sum(b - a for a, b in t.get("mask", [])) for m, t in traces.items()},
        "mask_beside_compute_secs": {
            m: beside_secs(t.get("mask", []), t.get("compute", [])) for m, t in traces.items()
        },
        "traces": traces,
    }
    (settings.out / "overlap.json").write_text(json.dumps(result, indent=1) + "\n")
    picture(traces, settings.mbit).savefig(settings.out / "overlap.png", dpi=110)
    for method, told in METHODS.items():
        gather, beside = (result[name][method] * 1e3 for name in ("mask_secs", "mask_beside_compute_secs"))
        console.print(
            f"masks gathered {told}: {statistics.median(secs[method]) * 1e3:.0f} ms a step; their gather takes "
            f"{gather:.0f} ms, {beside:.0f} of them beside compute"
        )
    console.print(f"the early gather saves {(late - early) * 1e3:.0f} ms of {late * 1e3:.0f}")
    return result


if __name__ == "__main__":
    with stopped_by_hand():
        main(tyro.cli(Settings, description=__doc__))
