"""Table and pictures of bench_straggler.py."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from scripts._link_bench import commands

BASE = "diloco"
SHOWN_ROUNDS = 8  # of the timeline


def line(run: dict[str, Any]) -> str:
    """One run in words."""
    return (
        f"{run['method']}, slow link {run['share']:g} of the others: {len(run['rounds'][0])} rounds in {run['secs']:.0f} s, "
        f"loss {run['curve'][-1][1]:.4f}, idle {', '.join(f'{x:.0%}' for x in run['idle'])}"
    )


def reached(run: dict[str, Any], loss: float) -> float | None:
    """Seconds until the loss was first as low; None if it never was."""
    return next((secs for secs, found in run["curve"] if found <= loss), None)


def to_base(run: dict[str, Any], runs: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Seconds until the last loss of DiLoCo with the same slow link, and of its time the fraction; None if never."""
    base = next((r for r in runs if (r["method"], r["share"]) == (BASE, run["share"])), None)
    secs = reached(run, base["curve"][-1][1]) if base else None
    return secs, None if base is None or secs is None else secs / base["secs"]


def has_base(run: dict[str, Any], runs: list[dict[str, Any]]) -> bool:
    """Whether DiLoCo was run with the same slow link."""
    return any((r["method"], r["share"]) == (BASE, run["share"]) for r in runs)


def fast_idle(run: dict[str, Any]) -> float:
    """Of all workers but the slow one, the last: the fraction of time that is not local steps."""
    return float(np.mean(run["idle"][:-1]))


def markdown(result: dict[str, Any]) -> str:
    """The results as Markdown, and which goals they meet."""
    settings, runs = result["settings"], result["runs"]
    workers = len(runs[0]["idle"]) if runs else 0
    lines = [
        f"{result['parameters']:,} parameters, {workers} workers on {result['cores']} cores, links of {settings['mbit']:g} "
        f"Mbit/s, that of worker {workers - 1} a share of it; up to {settings['local_steps']} local steps a round. Idle is "
        f"all time that is not local steps. {result['date']}, Linux {result['kernel']}, Python {result['python']}, JAX "
        f"{result['jax']}.\n",
        commands(runs),
        "| share | method | rounds | s | s a round | loss | s to DiLoCo's loss | of its time | idle, fast | idle, slow "
        "| steps, fast | steps, slow | KB a round |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    goals = []
    for run in runs:
        (secs, part), fast = to_base(run, runs), fast_idle(run)
        steps = float(np.mean(run["mean_steps"][:-1]))
        rounds = len(run["rounds"][0])
        at, of_base = "" if secs is None else f"{secs:.0f}", "" if part is None else f"{part:.2f}"
        lines.append(
            f"| {run['share']:g} | {run['method']} | {rounds} | {run['secs']:.0f} | {run['secs'] / rounds:.2f} "
            f"| {run['curve'][-1][1]:.4f} | {at} | {of_base} "
            f"| {fast:.0%} | {run['idle'][-1]:.0%} | {steps:.1f} | {run['mean_steps'][-1]:.1f} "
            f"| {run['bytes_per_round'] / 1e3:,.0f} |"
        )
        if run["method"].endswith("adapt") and has_base(run, runs):
            told = "never" if part is None else f"after {part:.2f} of its time"
            met = part is not None and part <= 0.5 and fast < 0.15
            goals.append(
                f"- share {run['share']:g}, {run['method']}: DiLoCo's loss {told} (goal 0.5), fast workers idle {fast:.1%} "
                f"(goal below 15 %): {'met' if met else 'NOT met'}."
            )
    return "\n".join([*lines, "", *goals]) + "\n"


def picture(result: dict[str, Any]) -> Figure:
    """Loss over time for each share, and below it, of each method, when every worker computed and when it waited."""
    runs = result["runs"]
    shares = sorted({r["share"] for r in runs})
    methods = list(dict.fromkeys(r["method"] for r in runs))
    height = 4.0 + 1.1 * len(methods)
    drawing = Figure(figsize=(7.0 * len(shares), height), layout="constrained")
    axes = drawing.subplots(
        1 + len(methods),
        len(shares),
        squeeze=False,
        gridspec_kw={"height_ratios": [4.0] + [1.0] * len(methods)},
    )
    for column, share in enumerate(shares):
        curves = axes[0][column]
        for run in (r for r in runs if r["share"] == share):
            number = methods.index(run["method"])
            secs, loss = np.array(run["curve"]).T
            curves.plot(secs, loss, color=f"C{number}", label=run["method"])
            _timeline(axes[1 + number][column], run)
        curves.set(title=f"slow link: {share:g} of the others", xlabel="s", ylabel="nats per byte")
        curves.grid(alpha=0.3)
        curves.legend(fontsize=8)
    return drawing


def _timeline(axes: Any, run: dict[str, Any]) -> None:
    """Some rounds from the middle of a run, a row for each worker."""
    middle = len(run["rounds"][0]) // 2
    begin = min(rows[middle][0] for rows in run["rounds"])
    end = max(rows[min(middle + SHOWN_ROUNDS, len(rows)) - 1][2] for rows in run["rounds"])
    for worker, rows in enumerate(run["rounds"]):
        shown = [row for row in rows if begin <= row[0] < end]
        axes.broken_barh([(a - begin, b - a) for a, b, _, _ in shown], (worker - 0.4, 0.8), color="C0")
        axes.broken_barh(
            [(b - begin, c - b) for _, b, c, _ in shown], (worker - 0.4, 0.8), color="C3", alpha=0.5
        )
    axes.set(xlim=(0, end - begin), yticks=range(len(run["rounds"])))
    axes.invert_yaxis()
    axes.set_title(f"{run['method']}: local steps (blue), exchange and waiting (red)", fontsize=8, loc="left")
    axes.tick_params(labelsize=7)
