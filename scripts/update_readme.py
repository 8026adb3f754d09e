"""Writes the tables of README.md that come from committed measurements, between their marks.

    python scripts/update_readme.py
    python scripts/update_readme.py --check

A table stands between `<!-- table NAME -->` and `<!-- end NAME -->`; --check changes nothing and ends with 1 where one is
not what docs/results says.
"""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

from scripts import _comm_report as comm
from scripts import _straggler_report as straggler

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


def comm_table(result: dict[str, Any]) -> str:
    """Time of an inner step at each speed, with how many times as fast as dense AdamS it is and what of the ideal."""
    cells = {(c["method"], c["bandwidth"]): c for c in result["cells"]}
    speeds = sorted({speed for _, speed in cells}, reverse=True)
    lines = [
        "| ms of an inner step (times dense AdamS; of the ideal) | "
        + " | ".join(f"{s / 1e6:g} Mbit/s" for s in speeds)
        + " |",
        "|---|" + "---|" * len(speeds),
    ]
    for method in comm.METHODS:
        row = []
        for speed in speeds:
            cell = cells.get((method, speed))
            if cell is None:
                row.append("")
                continue
            times = comm.speedup(cell, result["cells"])
            shown = "" if times is None else f"{times:.1f}x; "
            row.append(
                f"{cell['step_secs'] / cell['steps'] * 1e3:,.0f} ({shown}{cell['step_secs'] / cell['ideal_secs']:.2f})"
            )
        if any(row):
            lines.append(f"| {method} | {' | '.join(row)} |")
    return "\n".join(lines)


def straggler_table(result: dict[str, Any]) -> str:
    """Seconds to DiLoCo's last loss with one slow link, and how much of their time the fast workers wait."""
    lines = [
        "| slow link | method | s a round | loss at the end | DiLoCo's loss after | fast workers idle | KB a round |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        secs, part = straggler.to_base(run, result["runs"])
        shown = (
            ("never" if straggler.has_base(run, result["runs"]) else "")
            if secs is None
            else f"{secs:.0f} s ({part:.2f} of its time)"
        )
        lines.append(
            f"| {run['share']:.0%} | {run['method']} | {run['secs'] / len(run['rounds'][0]):.2f} "
            f"| {run['curve'][-1][1]:.3f} | {shown} | {straggler.fast_idle(run):.1%} "
            f"| {run['bytes_per_round'] / 1e3:,.0f} |"
        )
    return "\n".join(lines)


TABLES: dict[str, tuple[pathlib.Path, Callable[[dict[str, Any]], str]]] = {
    "comm": (RESULTS / "comm" / "comm.json", comm_table),
    "straggler": (RESULTS / "straggler" / "straggler.json", straggler_table),
}


def filled(text: str) -> str:
    """The text with every table made anew.

    Raises:
      ValueError: a table has no place in the text.
    """
    for name, (path, make) in TABLES.items():
        place = re.compile(rf"(<!-- table {name} -->\n).*?(\n<!-- end {name} -->)", re.DOTALL)
        table = make(json.loads(path.read_text())).replace("\\", r"\\")
        text, count = place.subn(rf"\1{table}\2", text)
        if count != 1:
            raise ValueError(f"README.md must have one place for the table {name}, got {count}. Mark it.")
    return text


def main(arguments: list[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 where a table is old"
    )
    check = parser.parse_args(arguments).check
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = filled(old)
    if check:
        if new != old:
            print(
                "error: README.md does not show docs/results. Run python scripts/update_readme.py.",
                file=sys.stderr,
            )
        return int(new != old)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
