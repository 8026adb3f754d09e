"""Time of a step or round over links of a known speed: what is compute, what is update, and what waits for the network.

    python scripts/bench_comm.py --out docs/results/comm
    python scripts/bench_comm.py --methods adams scape_d0.01_index --speeds 100 --out runs/comm

Starts 4 processes on this machine, each behind a link of its own (training/launch.py: needs Linux with iproute2), and runs
each method over each speed. Beside a whole step it times the same program without its messages, at the same moment on the
same workers: that is compute and update; what a step takes longer is exposed communication. The ideal is compute + update +
bytes / bandwidth, with the bytes of the library's closed form; beside them stand those that the interface counted, headers
included. Writes comm.md, comm.json and comm.png; cells that comm.json holds are not run again. Goals: where dense
AdamS spends about 95 % of a step on communication, SCAPE d=.01 10 times as fast and d=.1 5 times; each cell within 1.15 of
its ideal, bytes within 5 % of the closed form.
"""

import dataclasses
import pathlib
import statistics
import time
from typing import Any

import tyro
from rich.console import Console

from scripts import _comm_report as report
from scripts import _link_bench as bench
from scripts._comm_worker import Task
from training.corpus import prepare_stdlib
from training.workers import Workers, stopped_by_hand


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Task):
    """Methods over links of several speeds."""

    out: pathlib.Path
    """Folder of comm.md, comm.json and comm.png."""
    methods: tuple[str, ...] = report.METHODS
    """What to run; the table also shows what the folder holds already."""
    speeds: tuple[float, ...] = (1000, 100, 50, 10)
    """Mbit/s that a worker can send, and as much receive."""
    workers: int = 4
    """Processes."""
    cell_secs: float = 15.0
    """About how long each method is timed at each speed; at least twice."""


def measure(
    workers: Workers, settings: Settings, method: str, mbit: float, made: dict[str, Any]
) -> dict[str, Any]:
    """One cell of the table; every figure in seconds or bytes of one step or round."""
    bandwidth = mbit * 1e6
    workers.cluster.set_bandwidth(bandwidth)
    ideal_wire_secs = made["bytes"] * 8 / bandwidth
    alone = workers.ask(alone=5 if made["steps"] == 1 else 3)
    # A step begins for all at once and ends for all at once, so the slowest worker counts.
    slowest = {
        name: statistics.median(map(max, zip(*(found[name] for found in alone), strict=True)))
        for name in ("alone", "compute")
    }
    expected_secs = slowest["alone"] + ideal_wire_secs
    if expected_secs < settings.cell_secs / 3:
        workers.ask(whole=1)  # the transport learns the speed
    repeats = min(30, max(2, round(settings.cell_secs / expected_secs)))
    found = workers.ask(whole=repeats)
    secs = statistics.fmean(one["secs"] for one in found)
    return {
        "method": method,
        "bandwidth": bandwidth,
        "steps": made["steps"],
        "repeats": repeats,
        "step_secs": secs,
        "compute_secs": slowest["compute"],
        "update_secs": slowest["alone"] - slowest["compute"],
        "exposed_secs": secs - slowest["alone"],
        "ideal_secs": expected_secs,
        "bytes_per_step": made["bytes"],
        "sent_bytes": [one["sent_bytes"] for one in found],
    }


def main(settings: Settings) -> dict[str, Any]:
    unknown = [name for name in settings.methods if name not in report.METHODS]
    if unknown or settings.workers < 2 or not settings.speeds or min(settings.speeds) <= 0:
        raise SystemExit(
            f"methods must be among {', '.join(report.METHODS)}, workers at least 2 and speeds positive; got "
            f"{unknown or 'known methods'}, {settings.workers} and {settings.speeds}."
        )
    settings.out.mkdir(parents=True, exist_ok=True)
    path, console = settings.out / "comm.json", Console()
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(Task)}
    del given["cache"]
    result = bench.kept(path, given | {"workers": settings.workers}, "cells")
    prepare_stdlib()
    wanted = [
        (method, mbit)
        for method in settings.methods
        for mbit in settings.speeds
        if not any((c["method"], c["bandwidth"]) == (method, mbit * 1e6) for c in result["cells"])
    ]
    with bench.start(settings.workers, "_comm_worker", settings, Task, console) as workers:
        made_by = bench.provenance("bench_comm")
        result |= workers.ready[0] | made_by
        for method in dict.fromkeys(method for method, _ in wanted):
            workers.cluster.set_bandwidth(None)
            start = time.perf_counter()
            made = workers.ask(prepare=method)[0]
            console.print(f"{method}: ready after {time.perf_counter() - start:.0f} s")
            for mbit in (speed for name, speed in wanted if name == method):
                cell = measure(workers, settings, method, mbit, made)
                cell |= {name: made_by[name] for name in ("date", "command")}
                result["cells"].append(cell)
                bench.save(path, result, indent=1)
                console.print(f"  {report.line(cell)}")
    result["cells"].sort(key=lambda c: (-c["bandwidth"], report.METHODS.index(c["method"])))
    bench.save(path, result, indent=1)
    text = report.markdown(result)
    (settings.out / "comm.md").write_text(text)
    report.picture(result).savefig(settings.out / "comm.png", dpi=110)
    console.print(text, soft_wrap=True)
    return result


if __name__ == "__main__":
    with stopped_by_hand():
        main(tyro.cli(Settings, description=__doc__))
