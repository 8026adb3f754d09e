"""Scaling curves drawn: tokens a second with a fixed global batch, and what is left of a worker's time with a fixed part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator, PercentFormatter, StrMethodFormatter

from training.simulate import Prediction


def scaling_figure(
    strong: Mapping[str, Sequence[Prediction]],
    weak: Mapping[str, Sequence[Prediction]],
    tokens_per_step: int,
    worker_tokens: float,
    title: str,
) -> Figure:
    """Both kinds of scaling for each method; of `strong` the tokens of all are fixed, of `weak` those of a worker."""
    drawing = Figure(figsize=(12, 5.4), layout="constrained")
    left, right = drawing.subplots(1, 2)
    first = next(iter(strong.values()))
    counts = [row.workers for row in first]
    alone = [tokens_per_step / (row.compute_secs + row.update_secs) for row in first]
    left.plot(counts, alone, color="0.6", ls=":", label="without communication")
    for number, (name, rows) in enumerate(strong.items()):
        style = {"color": f"C{number}", "marker": "o", "ms": 3}
        at = [row.workers for row in rows]
        left.plot(at, [tokens_per_step / row.step_secs for row in rows], label=name, **style)
        right.plot(
            [row.workers for row in weak[name]],
            [(row.compute_secs + row.update_secs) / row.step_secs for row in weak[name]],
            **style,
        )
    left.set(xscale="log", yscale="log", xlabel="workers", ylabel="tokens/s, all workers")
    left.set_title(f"strong scaling: {tokens_per_step:,} tokens a step of all")
    left.yaxis.set_major_formatter(EngFormatter())
    right.set(xscale="log", xlabel="workers", ylabel="time not spent communicating", ylim=(0, 1.03))
    right.set_title(f"weak scaling: {worker_tokens:,.0f} tokens a worker and step")
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(FixedLocator(counts))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    drawing.suptitle(title)
    drawing.legend(loc="outside lower center", ncols=4)
    return drawing
