"""What the benches over links of a known speed share: their workers, results that are kept, and where figures come from."""

import dataclasses
import json
import os
import pathlib
import platform
import sys
import time
from typing import Any

from rich.console import Console

from training.launch import Cluster
from training.token_file import replace_atomically
from training.workers import Workers


def start(workers: int, module: str, task: Any, kind: type, console: Console, **options: Any) -> Workers:
    """The workers, which run a module of scripts with the fields of `kind` that `task` holds as their command line."""
    cluster = Cluster(workers)
    console.print(cluster.note)
    if not cluster.shaped:
        cluster.close()
        raise SystemExit("Without links of a known speed there is nothing to measure.")
    given = [(field.name, getattr(task, field.name)) for field in dataclasses.fields(kind)]
    arguments = [word for name, value in given for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", f"scripts.{module}", *arguments]
    return Workers(cluster, command, environment={"JAX_PLATFORMS": "cpu"}, **options)


def provenance(script: str) -> dict[str, Any]:
    """What stands beside every figure."""
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join([f"python scripts/{script}.py", *sys.argv[1:]]),
    }


def commands(items: list[dict[str, Any]]) -> str:
    """The distinct commands that made these results, each with its date, as Markdown."""
    made = dict.fromkeys((item["date"], item["command"]) for item in items)
    return "\n".join(f"    {command}    # {date}" for date, command in sorted(made)) + "\n"


def kept(path: pathlib.Path, settings: dict[str, Any], items: str) -> dict[str, Any]:
    """The results that the file holds, which must be of the same settings; new ones where there is none."""
    if not path.exists():
        return {"settings": settings, items: []}
    held = json.loads(path.read_text())
    if held["settings"] != settings:
        raise SystemExit(f"{path} holds {items} of other settings: {held['settings']}. Use another --out.")
    return held


def save(path: pathlib.Path, result: dict[str, Any], indent: int | None = None) -> None:
    with replace_atomically(path) as file:
        file.write((json.dumps(result, indent=indent) + "\n").encode())
