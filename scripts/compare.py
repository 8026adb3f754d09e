"""Overlays runs in one picture and prints one table.

    python scripts/compare.py runs/demo-1 runs/demo-2 --out compare.png

Writes compare.png and compare.html.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from training import compare
from training.report import read_run


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
    shown = Table(*compare.COLUMNS, title=f"{len(runs)} runs")
    for row in compare.table(runs):
        shown.add_row(*row)
    Console().print(shown)
    picture, page = compare.write(runs, options.out)
    print(f"picture: {picture}\npage: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
