"""Table and picture of bench_comm.py; imports no JAX, so that the launching process stays small."""

from typing import Any

from matplotlib.figure import Figure

from scripts._link_bench import commands

METHODS = (
    "adamw",
    "adams",
    "adams_bf16",
    "scape_d0.1_bitmap",
    "scape_d0.1_index",
    "scape_d0.1_bf16",
    "scape_d0.01_bitmap",
    "scape_d0.01_index",
    "scape_d0.01_bf16",
    "diloco",
    "gasloc_1peer",
    "gasloc_1peer_bf16",
    "gasloc_1peer_int8",
    "gasloc_2peer",
    "gasloc_2peer_bf16",
    "gasloc_2peer_int8",
    "gasloc_1peer_fragments4",
)
DENSE = "adams"  # what the others are compared with
GOALS = {"scape_d0.01_index": 10.0, "scape_d0.1_bitmap": 5.0}  # times as fast as dense
_PARTS = {"compute_secs": "C0", "update_secs": "C2", "exposed_secs": "C3"}


def line(cell: dict[str, Any]) -> str:
    """One cell in words."""
    return (
        f"{cell['bandwidth'] / 1e6:g} Mbit/s: {cell['step_secs'] * 1e3:.0f} ms ({cell['compute_secs'] * 1e3:.0f} compute, "
        f"{cell['update_secs'] * 1e3:.0f} update, {cell['exposed_secs'] * 1e3:.0f} exposed), "
        f"{cell['step_secs'] / cell['ideal_secs']:.2f} of the ideal, bytes {counted(cell):+.1%}"
    )


def counted(cell: dict[str, Any]) -> float:
    """What the interface counted above the closed form, as a fraction; of the worker that is farthest off."""
    return max((sent / cell["bytes_per_step"] - 1 for sent in cell["sent_bytes"]), key=abs)


def speedup(cell: dict[str, Any], cells: list[dict[str, Any]]) -> float | None:
    """How many times as fast as dense AdamS an inner step is at the same speed; None where that was not run."""
    for dense in cells:
        if (dense["method"], dense["bandwidth"]) == (DENSE, cell["bandwidth"]):
            return dense["step_secs"] / (cell["step_secs"] / cell["steps"])
    return None


def markdown(result: dict[str, Any]) -> str:
    """The results as Markdown, and which goals they meet."""
    cells, settings = result["cells"], result["settings"]
    rounds = max((c["steps"] for c in cells), default=1)
    lines = [
        f"{result['parameters']:,} parameters, {settings['workers']} processes on {result['cores']} cores, "
        f"{settings['rows']} sequences of 32 bytes a worker and step; DiLoCo and GASLoC in rounds of {rounds} inner "
        f"steps. Times in ms of a step or round. {result['date']}, Linux {result['kernel']}, Python {result['python']}, "
        f"JAX {result['jax']}.\n",
        commands(cells),
        "| Mbit/s | method | time | compute | update | exposed | of the ideal | to dense | KB sent | counted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in cells:
        times = speedup(c, cells)
        lines.append(
            f"| {c['bandwidth'] / 1e6:g} | {c['method']} | {c['step_secs'] * 1e3:,.0f} | {c['compute_secs'] * 1e3:,.0f} "
            f"| {c['update_secs'] * 1e3:,.0f} | {c['exposed_secs'] * 1e3:,.0f} | {c['step_secs'] / c['ideal_secs']:.2f} "
            f"| {'' if times is None else f'{times:.1f}x'} | {c['bytes_per_step'] / 1e3:,.0f} | {counted(c):+.1%} |"
        )
    return "\n".join([*lines, "", *_verdicts(cells)]) + "\n"


def _verdicts(cells: list[dict[str, Any]]) -> list[str]:
    found = []
    for c in cells:
        if c["method"] == DENSE:
            share = 1 - (c["compute_secs"] + c["update_secs"]) / c["step_secs"]
            found.append(f"- {c['bandwidth'] / 1e6:g} Mbit/s: dense AdamS waits {share:.0%} of a step.")
            for name, goal in GOALS.items():
                for other in cells:
                    if (other["method"], other["bandwidth"]) == (name, c["bandwidth"]):
                        times = speedup(other, cells) or 0.0
                        verdict = (
                            "" if share < 0.9 or share > 0.98 else ", met" if times >= goal else ", NOT met"
                        )
                        found.append(
                            f"  {name}: {times:.1f} times as fast{f' (goal {goal:g}{verdict})' if verdict else ''}."
                        )
    over = [c for c in cells if c["step_secs"] > 1.15 * c["ideal_secs"]]
    off = [c for c in cells if abs(counted(c)) > 0.05]
    for what, missed in (("above 1.15 of their ideal", over), ("with bytes more than 5 % off", off)):
        names = ", ".join(f"{c['method']} at {c['bandwidth'] / 1e6:g}" for c in missed)
        found.append(f"- {len(missed)} of {len(cells)} cells {what}{f': {names}' if names else ''}.")
    return found


def picture(result: dict[str, Any]) -> Figure:
    """Time of an inner step of each method at each speed, split; a mark where the ideal is."""
    cells = result["cells"]
    speeds = sorted({c["bandwidth"] for c in cells}, reverse=True)
    drawing = Figure(figsize=(4.2 * max(2, len(speeds)), 6.2), layout="constrained")
    for axes, speed in zip(drawing.subplots(1, len(speeds), squeeze=False)[0], speeds, strict=True):
        shown = [c for c in cells if c["bandwidth"] == speed]
        names = [c["method"] for c in shown]
        start = [0.0] * len(shown)
        for part, color in _PARTS.items():
            secs = [max(0.0, c[part]) / c["steps"] for c in shown]
            axes.barh(names, secs, left=start, color=color, label=part.removesuffix("_secs"))
            start = [a + b for a, b in zip(start, secs, strict=True)]
        axes.scatter(
            [c["ideal_secs"] / c["steps"] for c in shown],
            names,
            marker="|",
            s=160,
            color="black",
            label="ideal",
            zorder=3,
        )
        for name, c, end in zip(names, shown, start, strict=True):
            if times := speedup(c, cells):
                axes.annotate(f" {times:.1f}x", (end, name), va="center", fontsize=8)
        axes.set(title=f"{speed / 1e6:g} Mbit/s", xlabel="seconds of an inner step")
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        if axes is not drawing.axes[0]:
            axes.set_yticklabels([])
    handles, labels = drawing.axes[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=4)
    return drawing
