"""Numbers of a run on disk: metrics.jsonl, one object per logged step, and the same scalars for TensorBoard.

The file is only ever appended to. When a run goes on from step n, lines after n (of steps that are about to
be done again) and a line cut short by a crash are removed first, so that each step appears once.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends records to FOLDER/metrics.jsonl and FOLDER/tensorboard."""

    def __init__(self, folder: str | Path, *, start_step: int = 0, tensorboard: bool = True):
        self.path = Path(folder) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        truncate_after(self.path, start_step)
        self._file = self.path.open("a")
        self._board = None
        if tensorboard:
            from tensorboardX import SummaryWriter  # 0.3 s of import that a run without it does not pay

            # purge_step tells TensorBoard to hide what an earlier attempt wrote from this step on
            purge = start_step + 1 if start_step else None
            self._board = SummaryWriter(str(Path(folder) / "tensorboard"), purge_step=purge)

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one record; it must hold an integer "step"."""
        step = int(record["step"])
        self._file.write(json.dumps({key: _plain(value) for key, value in record.items()}) + "\n")
        self._file.flush()  # a line is on disk before the next step starts, whatever ends the process
        if self._board is not None:
            self._check_board()
            for key, value in record.items():
                if key != "step" and not isinstance(value, list):  # numbers of each worker have no curve
                    self._board.add_scalar(key, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._check_board()
            self._board.close()

    def _check_board(self) -> None:
        """Its thread ends where it cannot write, and its queue, once full, is waited for without an end."""
        writer = getattr(getattr(self._board, "file_writer", None), "event_writer", None)
        thread = getattr(writer, "_worker", None)
        if thread is not None and not thread.is_alive():
            raise OSError(f"TensorBoard's files in {self.path.parent / 'tensorboard'} cannot be written")

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # A full disk fails here once more: the first error is the one to tell.
        with contextlib.suppress(*([OSError] if error is not None else [])):
            self.close()


class NoWriter:
    """For the processes other than the first, which write nothing."""

    def write(self, record: Mapping[str, Any]) -> None:
        pass


def _plain(value: Any) -> Any:
    """A Python number. JSON has no NaN or infinity: they are written as text, which `read` turns back."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read(folder: str | Path) -> list[dict[str, Any]]:
    """All records of a run, in order; [] where there are none."""
    path = Path(folder) / METRICS_FILE
    return [record for record, _ in _records(path)] if path.is_file() else []


def series(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[Any]]:
    """Steps and values of one key, numbers or lists of them, over the records that have it."""
    found = [(record["step"], record[key]) for record in records if key in record]
    return [step for step, _ in found], [value for _, value in found]


def truncate_after(path: Path, step: int) -> None:
    """Removes the records of steps after `step`, and a last line that is not whole."""
    if not path.is_file():
        return
    end = 0
    for record, end_of_line in _records(path):
        if record["step"] > step:
            break
        end = end_of_line
    if end < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end)


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields (record, offset of the end of its line); stops before a last line without its end."""
    offset = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        offset += len(line)
        if not line.endswith(b"\n"):
            return
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path} line {number} is not valid JSON ({error}). Remove the line to go on."
            ) from None
        yield {key: _number(value) for key, value in record.items()}, offset


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
