"""Overlays runs in one picture and prints one table.

    python scripts/compare.py runs/demo-1 runs/demo-2 --out compare.png

Writes compare.png and compare.html.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from training import compare
from training.report import read_run


def console_table(rows: Sequence[tuple[str, ...]], title: str) -> Table:
    """As narrow as the longest word of each column; only the run's name may be folded."""
    shown = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for number, name in enumerate(compare.COLUMNS):
        words = name.split() + [part for row in rows for part in row[number].split(" of ")]
        if number == 0:
            shown.add_column(name, overflow="fold")
        else:
            shown.add_column(name, justify="right", width=max(map(len, words)))
    for row in rows:
        shown.add_row(*row)
    return shown


def main(arguments: list[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", default="compare.png", help="the picture; a page of the same name is put beside it"
    )
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(folder) for folder in options.runs]
        if not options.out.endswith(".png"):
            raise ValueError(
                f"--out must end in .png, got {options.out}. Name a picture such as compare.png."
            )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console().print(console_table(compare.table(runs), f"{len(runs)} runs"))
    picture, page = compare.write(runs, options.out)
    print(f"picture: {picture}\npage: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
