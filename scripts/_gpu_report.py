"""Tables and goals from what scripts/gpu_check.py found, in plain text: rich need not be there."""

from collections.abc import Sequence
from typing import Any

from scripts._gpu_calls import OPS
from scripts._gpu_run import Row
from scripts._gpu_update import BASE

PASS_GOAL, UPDATE_GOAL = 0.8, 1.0
# A working set of this size may be served by a cache, which a copy of a large buffer is not.
CACHED_BYTES = 128e6


def anything_checked(result: Row) -> bool:
    return any(row["status"] in ("equal", "wrong") for row in result["checks"])


def failed(result: Row) -> bool:
    """Something was wrong or ended with an error, or no kernel was compared at all."""
    rows = [result["device"] or {}, *result["checks"], *result["update"], *result["bandwidth"]]
    broken = any(row.get("status") in ("wrong", "error") for row in rows)
    return bool(result["errors"]) or broken or not anything_checked(result)


def lowest_share(rows: Sequence[Row], op: str, kernel: str) -> tuple[float | None, bool]:
    """(lowest share of the copy's bandwidth on a large shape, whether each of them was timed)."""
    large = [
        row
        for row in rows
        if (row["op"], row["implementation"]) == (op, kernel) and row.get("bytes", 0) >= CACHED_BYTES
    ]
    shares = [row["of_copy"] for row in large if row["status"] == "timed"]
    return min(shares, default=None), len(shares) == len(large) > 0


def goals(result: Row) -> list[Row]:
    """Each with what was reached, and whether it is met; None where it was not measured.

    Those of the passes are Pallas', which the optimizer takes by itself; what Triton reaches stands beside it.
    """
    found = []
    for op in (name for name, op in OPS.items() if op.is_pass):
        reached, complete = lowest_share(result["bandwidth"], op, "pallas")
        met = None
        if reached is not None and (complete or reached < PASS_GOAL):
            met = reached >= PASS_GOAL
        goal = f"{op} by Pallas reaches {PASS_GOAL:.0%} of the copy's bandwidth on every large shape"
        triton, _ = lowest_share(result["bandwidth"], op, "triton")
        found.append({"goal": goal, "reached": reached, "met": met, "triton": triton})
    for row in result["update"]:
        if row["method"].startswith("scape") and "," not in row["method"]:
            ratio = row.get("ratio_median")
            met = None if ratio is None else ratio <= UPDATE_GOAL
            goal = f"update by {row['method']} takes at most {UPDATE_GOAL:g} of {BASE}'s time"
            found.append({"goal": goal, "reached": ratio, "met": met})
    return found


def table(title: str, columns: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Plain text; the first column to the left."""
    cells = [[str(x) for x in line] for line in [columns, *lines]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ["  ".join([x[0].ljust(widths[0]), *map(str.rjust, x[1:], widths[1:])]) for x in cells]
    return "\n".join(["", title, rows[0], "-" * len(rows[0]), *rows[1:]])


def checks_text(rows: Sequence[Row]) -> str:
    lines = []
    for op, kernel in dict.fromkeys((row["op"], row["implementation"]) for row in rows):
        own = [row for row in rows if (row["op"], row["implementation"]) == (op, kernel)]
        count = {s: sum(row["status"] == s for row in own) for s in dict.fromkeys(r["status"] for r in own)}
        largest = max(row.get("max_error", 0.0) for row in own)
        said = ", ".join(f"{n} {status}" for status, n in count.items())
        lines.append([f"{op}, {kernel}", said, f"{largest:.1e}" if largest else ""])
    text = table("Against the plain-JAX reference, on named shapes", ("kernel", "shapes", "error"), lines)
    details = dict.fromkeys(
        f"{row['op']} {row['spec']}, {row['implementation']}: {row['status']}: {row['detail']}"
        for row in rows
        if row["status"] in ("wrong", "error")
    )
    details |= dict.fromkeys(f"Not here: {row['detail']}" for row in rows if row["status"] == "not here")
    return "\n".join([text, *details])


def bandwidth_text(rows: Sequence[Row]) -> str:
    timed = [
        (
            f"{row['op']}, {row['spec']}, {row['implementation']}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['median_ms']:.3f}",
            f"{row['gb_per_sec']:.0f}",
            f"{row['of_copy']:.2f} ({row['of_copy_min']:.2f} .. {row['of_copy_max']:.2f})",
            "in cache" if row["bytes"] < CACHED_BYTES else "",
        )
        for row in rows
        if row["status"] == "timed"
    ]
    text = table("Bandwidth", ("kernel", "MB", "ms", "GB/s", "of a copy's", ""), timed)
    failed = [
        f"{r['op']} {r['spec']}: {r['detail']}" for r in rows if r["status"] not in ("timed", "not here")
    ]
    return "\n".join([text, *failed])


def update_text(rows: Sequence[Row]) -> str:
    timed = [
        (
            row["method"],
            f"{row['median_ms']:.2f}",
            "" if row["ratio_median"] is None else
            f"{row['ratio_median']:.2f} ({row['ratio_min']:.2f} .. {row['ratio_max']:.2f})",
            row["floor_bytes_per_param"],
            f"{row['floor_gb_per_sec']:.0f}",
        )
        for row in rows
        if row["status"] == "timed"
    ]  # fmt: skip
    size = max((row.get("params", 0) for row in rows), default=0)
    columns = ("method", "ms", f"of {BASE}'s", "floor bytes/param", "GB/s at the floor")
    text = table(f"Update of {size:,} parameters, one device", columns, timed)
    return "\n".join([text, *(f"{r['method']}: {r['detail']}" for r in rows if r["status"] != "timed")])


def goals_text(rows: Sequence[Row]) -> str:
    words = {True: "met", False: "missed", None: "not measured"}
    figure = lambda x: "" if x is None else f"{x:.2f}"  # noqa: E731
    lines = [
        (row["goal"], figure(row["reached"]), words[row["met"]], figure(row.get("triton"))) for row in rows
    ]
    return table("Goals", ("goal", "reached", "", "Triton reaches"), lines)
