"""The line that shows where a run stands: live in a terminal, one plain line per logged step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table


class Progress:
    """Shows step, mean loss since the last line, tokens/s, bytes sent against dense, time left and skipped steps."""

    def __init__(self, total_steps: int, *, start_step: int = 0, file: TextIO | None = None):
        self.console = Console(file=file or sys.stdout, highlight=False)
        self.total_steps, self.start_step = total_steps, start_step
        self._live: Live | None = None
        self._clock: tuple[float, int] | None = None
        self._secs_per_step = 0.0
        # Of workers that differ, as last evaluated: to measure it for each line would send the whole model each time.
        self.consensus_distance: float | None = None
        self.local_steps: list[int] | None = None  # of a run in rounds, as set

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """Prints a line of its own; in a terminal it appears above the live line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def update(self, record: Mapping[str, Any]) -> None:
        """Shows one record of metrics.jsonl."""
        line = self.line(record)
        if self._live is None:
            self.note(line)
            return
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(self.total_steps, record["step"], width=20), line)
        self._live.update(row)

    def line(self, record: Mapping[str, Any]) -> str:
        """The text of the line."""
        step = record["step"]
        parts = [
            f"step {step}/{self.total_steps}",
            f"mean loss {record.get('loss_mean', record['loss']):.3f}",
        ]
        parts.append(f"{quantity(record['tokens_per_sec'])} tokens/s")
        sent, dense = record["bytes_sent_total"], record["dense_bytes_total"]
        if dense:
            parts.append(f"sent {amount(sent)} of {amount(dense)} dense ({dense / max(sent, 1):.1f}x fewer)")
        if record.get("local_steps", self.local_steps) != self.local_steps:
            parts.append(f"{spread(record['local_steps'])} local steps")
        if "exchange_secs" in record:
            parts.append(f"exchange {spread(record['exchange_secs'], '.2g')} s")
        if self.consensus_distance is not None:
            parts.append(f"consensus {self.consensus_distance:.2g}")
        parts.append(f"{duration(self._secs_left(step))} left")
        parts += lost(record)
        return "  ".join(parts)

    def _secs_left(self, step: int) -> float:
        """From the time per step since the last line, smoothed; the first line carries the compilation."""
        now = time.perf_counter()
        if self._clock is not None and step > self._clock[1]:
            latest = (now - self._clock[0]) / (step - self._clock[1])
            self._secs_per_step = 0.7 * self._secs_per_step + 0.3 * latest if self._secs_per_step else latest
        self._clock = (now, step)
        return self._secs_per_step * (self.total_steps - step) if self._secs_per_step else float("nan")


def quantity(value: float) -> str:
    """1234567 -> 1.23M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def amount(value_bytes: float) -> str:
    """1234567 -> 1.23 MB."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value_bytes) >= size:
            return f"{value_bytes / size:.3g} {unit}"
    return f"{value_bytes:.0f} B"


def spread(values: Sequence[float], format: str = "") -> str:
    """Of numbers of several workers "least to most", or the one that all have: [10, 7, 10] -> 7 to 10."""
    least, most = f"{min(values):{format}}", f"{max(values):{format}}"
    return least if least == most else f"{least} to {most}"


def lost(record: Mapping[str, Any]) -> list[str]:
    """What was not taken because of non-finite numbers: steps, and in rounds what single workers lost."""
    if "skipped_steps" not in record:
        return [f"{record['skipped']} skipped"] if record.get("skipped") else []
    names = {"skipped": "rounds x workers dropped", "skipped_steps": "steps x workers skipped"}
    return [f"{record[key]} {name}" for key, name in names.items() if record[key]]


def duration(secs: float) -> str:
    """3725 -> 1h02m; unknown before two lines were timed."""
    if secs != secs:
        return "?"
    secs = int(secs)
    if secs >= 3600:
        return f"{secs // 3600}h{secs % 3600 // 60:02d}m"
    return f"{secs // 60}m{secs % 60:02d}s" if secs >= 60 else f"{secs}s"
