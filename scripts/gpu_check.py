"""What the kernels do on a GPU: whether they are right, how near they come to the speed of memory, what an update costs.

    python scripts/gpu_check.py
    python scripts/gpu_check.py --seconds 120 --parameters 100e6 --out runs/gpu_check.json
    python scripts/gpu_check.py --quick

Needs a CUDA GPU, JAX with optax, and this folder; nothing need be installed from it. Triton and jax-triton add the Triton
kernels. Every kernel is compared with its plain-JAX reference on the same device, bit for bit where the operation is exact;
its bandwidth with a copy's; a SCAPE update of 513.6 M parameters with optax.adamw's, both jitted and with donated arguments.
Goals: each pass by Pallas reaches 80 % of the copy's bandwidth, and the update takes no longer than adamw's.

`--quick` runs all of it on a CPU in a minute or two: small shapes, kernels by their interpreters. Its times mean nothing.

Work is done in a process of its own: after a kernel that ends or blocks it, a new one goes on with the next operation. The
JSON is written after each of them. Exits with
  0    where everything that ran was right, also where the time was over before the rest (those rows say "not run") or
       Triton is not installed ("not here"); whether goals are met changes nothing,
  1    where a kernel was wrong, a check, an update or a bandwidth failed, nothing was checked at all, or the JSON could
       not be written in the end,
  2    where there is no GPU, or an argument is wrong: nothing was run,
  130  after Ctrl-C: what was finished until then is told and written.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import _gpu_report, _gpu_tasks  # noqa: E402
from scripts._gpu_calls import OPS  # noqa: E402
from scripts._gpu_run import Limits, Row  # noqa: E402
from scripts._gpu_settings import Settings, parse  # noqa: E402

INTERRUPTED = 130
# Part of the time after which a kind of task gets no more of it; what one leaves is the next one's.
SHARES = {"device": 0.2, "check": 0.4, "update": 0.7, "bandwidth": 1.0}
# A task that is silent for so long hangs; compiling is what takes longest.
SILENT_SECS, QUICK_SILENT_SECS = 90.0, 300.0
# How long the last task may go on after its time before its process is ended.
GRACE_SECS = 15.0


def tasks_of(settings: Settings) -> list[tuple[str, Limits]]:
    """In order of what is wanted most: right results, the whole update, single kernels."""
    names = [f"check {op}" for op in settings.ops]
    names += ["update default"] + ([] if settings.quick else ["update xla"])
    # The passes of a step first: they have a goal.
    names += [f"bandwidth {op}" for op in sorted(settings.ops, key=lambda op: not OPS[op].is_pass)]
    began = time.time()
    limits = Limits(settings.quick, settings.parameters, settings.repeats)
    return [
        (name, dataclasses.replace(limits, until=began + settings.seconds * SHARES[name.split()[0]]))
        for name in ["device", *names]
    ]


def in_another_process(
    tasks: list[tuple[str, Limits]],
    took: Callable[[str, Row | None], bool],
    silent: float,
    until: float = math.inf,
) -> None:
    """Gives took(task, row) every row, and took(task, None) at each task's end; ends early where it returns False.

    A process that ends or says nothing costs its task, not the next ones.
    """
    context = multiprocessing.get_context("spawn")
    while tasks:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_gpu_tasks.work, args=(tasks, there), daemon=True)
        # Ctrl-C reaches both; inherited, it is ignored there from the first import on.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        there.close()
        try:
            while tasks:
                patience = min(silent, max(until - time.time(), 0) + GRACE_SECS)
                if not here.poll(patience):
                    raise TimeoutError(f"no answer for {patience:.0f} s")
                task, row = here.recv()
                if row is None:
                    tasks = tasks[1:]
                if not took(task, row):
                    return
        except (EOFError, OSError) as error:  # TimeoutError is an OSError
            process.join(5)
            ended = (
                f"the process ended with {process.exitcode}" if isinstance(error, EOFError) else str(error)
            )
            # Nothing was lost where it ended between two tasks, having found the device unusable.
            if process.exitcode != _gpu_tasks.UNUSABLE:
                task, tasks = tasks[0][0], tasks[1:]
                took(task, {"status": "error", "detail": ended})
                took(task, None)
        finally:
            process.kill()
            process.join()


def in_this_process(
    tasks: list[tuple[str, Limits]], took: Callable[[str, Row | None], bool], *_: float
) -> None:
    """For tests: nothing that a kernel does to its process is caught."""
    for task, limits in tasks:
        for row in [*_gpu_tasks.rows_of_task(task, limits), None]:
            if not took(task, row):
                return


# What is told ------------------------------------------------------------------------------------------------------


def output_of(*command: str) -> str | None:
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def surroundings() -> Row:
    versions: dict[str, str | None] = {}
    for name in (
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
        "jax-triton",
        "triton",
        "optax",
        "numpy",
    ):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    commit, changed = output_of("git", "rev-parse", "HEAD"), output_of("git", "status", "--porcelain", "-uno")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit and commit.strip(),
        "changed_files": changed and len(changed.splitlines()),
        "driver": driver and driver.splitlines()[0].strip(),
        "python": platform.python_version(),
        "versions": versions,
    }


def main(settings: Settings, run: Callable[..., None] = in_another_process) -> tuple[int, Row]:
    """(exit code, everything that was found)."""
    began = time.time()
    result: Row = {
        **surroundings(),
        "settings": {**dataclasses.asdict(settings), "out": str(settings.out)},
        "device": None,
        "checks": [],
        "update": [],
        "bandwidth": [],
        "goals": [],
        "errors": [],
        "interrupted": False,
    }
    texts = {
        "check": _gpu_report.checks_text,
        "update": _gpu_report.update_text,
        "bandwidth": _gpu_report.bandwidth_text,
    }

    def write() -> OSError | None:
        result["secs"] = round(time.time() - began, 1)
        result["goals"] = _gpu_report.goals(result)
        try:
            settings.out.parent.mkdir(parents=True, exist_ok=True)
            settings.out.write_text(json.dumps(result, indent=2) + "\n")
        except OSError as error:  # a later one may succeed, and the tables are printed all the same
            return error
        return None

    def took(task: str, row: Row | None) -> bool:
        kind = task.split()[0]
        if row is None:
            print(f"{time.time() - began:6.1f} s  {task}", flush=True)
            if kind != "device":
                write()
        elif kind == "device":
            result["device"] = row
            return settings.quick or row.get("platform") == "gpu"
        elif row["status"] == "compiled":
            print(
                f"{time.time() - began:6.1f} s  {task}: {row['method']} compiled in {row['secs']} s",
                flush=True,
            )
        elif row["status"] == "error" and not {"spec", "method"} & row.keys():  # of the whole task
            result["errors"].append({"task": task, **row})
        else:
            result[{"check": "checks"}.get(kind, kind)].append(row)
        return True

    until = math.inf if settings.quick else began + settings.seconds
    try:
        run(tasks_of(settings), took, QUICK_SILENT_SECS if settings.quick else SILENT_SECS, until)
    except KeyboardInterrupt:
        result["interrupted"] = True
        print(f"Interrupted after {time.time() - began:.0f} s.", file=sys.stderr)
        if result["device"] is None:  # nothing was begun
            return INTERRUPTED, result
    device = result["device"] or {"status": "error", "detail": "no answer"}
    if not settings.quick and device.get("platform") != "gpu":
        found = device.get("detail") or f"JAX runs on {device.get('platform')} ({device.get('device')})"
        print(
            f"gpu_check needs a CUDA GPU and a JAX with CUDA (pip install 'jax[cuda13]'): {found}. "
            "Use --quick to run every check on a CPU.",
            file=sys.stderr,
        )
        return 2, result
    unwritten = write()
    print(
        f"{device.get('device')}, driver {result['driver']}, JAX {result['versions']['jax']}, commit {result['commit']}"
    )
    for kind, text in texts.items():
        print(text(result[{"check": "checks"}.get(kind, kind)]))
    for error in result["errors"]:
        print(f"{error['task']}: {error['detail']}")
    print(_gpu_report.goals_text(result["goals"]))
    if settings.quick:
        print("Quick: kernels were interpreted on a CPU. None of these times and goals mean anything.")
    if not _gpu_report.anything_checked(result):
        print("No kernel was checked.")
    if unwritten is None:
        print(f"{settings.out} written after {result['secs']:.0f} s")
    else:
        print(f"{settings.out} could not be written: {unwritten}", file=sys.stderr)
    if result["interrupted"]:
        return INTERRUPTED, result
    return int(_gpu_report.failed(result) or unwritten is not None), result


if __name__ == "__main__":
    given = parse(None, __doc__)
    # Of the process that is started; Triton decides at its import.
    os.environ["TRITON_INTERPRET"] = str(int(given.quick))
    if given.quick:
        os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        sys.exit(main(given)[0])
    except KeyboardInterrupt:  # before the first task, or once more while the tables are printed
        print("Interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
