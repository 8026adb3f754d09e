"""The settings of scripts/gpu_check.py and its command line; what is wrong with them ends it with 2 before it runs."""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from scripts._gpu_calls import OPS

PARAMETERS = 513_600_000
QUICK_PARAMETERS = 400_000
QUICK_REPEATS = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    seconds: float = 330.0
    parameters: int = PARAMETERS
    repeats: int = 15
    quick: bool = False
    out: Path = Path("gpu_check.json")
    ops: tuple[str, ...] = tuple(OPS)


def whole(text: str) -> int:
    """100e6 too."""
    value = _number(text)
    if not (math.isfinite(value) and value >= 1 and value == int(value)):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, as 15 or 100e6; got {text}")
    return int(value)


def seconds(text: str) -> float:
    value = _number(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, as 330; got {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def check_writable(out: Path) -> None:
    """OSError where the figures cannot go there. Keeps a file that is there, and leaves none where none was."""
    new = not out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a"):
        pass
    if new:
        out.unlink()


def parse(arguments: Sequence[str] | None, description: str | None = None) -> Settings:
    default = Settings()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--seconds",
        type=seconds,
        default=default.seconds,
        help="after which repeats are dropped (%(default)g)",
    )
    add("--parameters", type=whole, help=f"of the timed updates, at most ({PARAMETERS})")
    add("--repeats", type=whole, help=f"timed runs of each ({default.repeats}; quick: {QUICK_REPEATS})")
    add("--quick", action="store_true", help="on CPU: small shapes, interpreted kernels")
    add("--out", type=Path, default=default.out, help="where the figures go as JSON (%(default)s)")
    names = ", ".join(OPS)
    add("--ops", nargs="+", default=default.ops, choices=OPS, metavar="OP", help=f"only these: {names}")
    given = parser.parse_args(arguments)
    try:
        check_writable(given.out)
    except OSError as error:
        reason = error.strerror or error
        parser.exit(2, f"{parser.prog}: error: --out {given.out} cannot be written ({reason}); name a file\n")
    parameters = QUICK_PARAMETERS if given.quick else PARAMETERS
    repeats = QUICK_REPEATS if given.quick else default.repeats
    return Settings(
        seconds=given.seconds,
        parameters=parameters if given.parameters is None else given.parameters,
        repeats=repeats if given.repeats is None else given.repeats,
        quick=given.quick,
        out=given.out,
        ops=tuple(given.ops),
    )
