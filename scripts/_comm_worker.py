"""One worker of bench_comm.py: makes a method's programs and times them when it is told to, by lines of JSON on stdin.

{"prepare": METHOD}    -> {"bytes": ..., "steps": ...}; frees the last one, unless that came with "keep": true
{"take": METHOD}       -> {}; goes on with one that was kept
{"alone": REPEATS}     -> {"alone": [seconds], "compute": [seconds]}, of this worker, all starting together
{"whole": REPEATS}     -> {"secs": seconds of one, "sent_bytes": of one, by the interface's own counter}
{"trace": true}        -> {"events": [[HLO operation, thread, start, end]], in seconds of one step}
"""

import dataclasses
import pathlib
import tempfile
import time
from typing import Any

import jax
import tyro
from jax.sharding import AxisType

import models
from scripts import _comm_methods as methods
from scripts.bench_round import model
from training.corpus import prepare_stdlib
from training.data import make_loader
from training.distributed import join
from training.interface import sent_bytes
from training.programs import compile_once
from training.workers import answer, commands


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is the same for all methods and workers."""

    million: float = 5.0
    """Parameters, in millions, of a byte-level Llama of 4 layers."""
    rows: int = 4
    """Sequences of 32 bytes that a worker computes on in a step."""
    local_steps: int = 10
    """Inner steps of a round (DiLoCo, GASLoC)."""
    cache: pathlib.Path = pathlib.Path("runs/compiled")
    """Folder of compiled programs: one worker compiles for all, and another bench need not."""


def main(task: Task) -> None:
    join()
    compile_once(task.cache)
    config, workers = model(task.million), jax.process_count()
    mesh = jax.make_mesh((workers,), ("all",), axis_types=(AxisType.Auto,))
    loader = make_loader(
        prepare_stdlib().train,
        global_batch=task.rows * workers,
        length=config.max_length,
        seed=0,
        num_workers=workers,
        process_index=jax.process_index(),
        process_count=workers,
        vocab_size=config.vocab_size,
    )
    answer(parameters=models.num_params(config), jax=jax.__version__)
    kept: dict[str, methods.Measured] = {}
    running: methods.Measured | None = None
    for command in commands():
        if "prepare" in command:
            running = None
            running = methods.make(command["prepare"], config, mesh, lambda: next(loader), task.local_steps)
            if command.get("keep"):
                kept[command["prepare"]] = running
            answer(bytes=running.bytes, steps=running.steps)
        if "take" in command:
            running = kept[command["take"]]
            answer()
        assert running is not None
        if "alone" in command:
            found: dict[str, list[float]] = {"alone": [], "compute": []}
            for _ in range(command["alone"]):
                for name in found:
                    methods.together()
                    found[name].append(timed(getattr(running, name)))
            answer(**found)
        if "whole" in command:
            repeats, counter = command["whole"], sent_bytes()
            methods.together()
            before, start = counter(), time.perf_counter()
            for _ in range(repeats):
                running.whole()
            secs = (time.perf_counter() - start) / repeats
            answer(secs=secs, sent_bytes=(counter() - before) / repeats)
        if "trace" in command:
            methods.together()
            answer(events=traced(running.whole))
    loader.close()


def traced(function: Any) -> list[list[Any]]:
    """(HLO operation, number of the thread, start, end) of all that XLA ran meanwhile, in seconds from the first."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            function()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    lines = [line for plane in data.planes for line in plane.lines]
    found = [
        [event.name, number, event.start_ns * 1e-9, event.end_ns * 1e-9]
        for number, line in enumerate(lines)
        for event in line.events
        if any(name == "hlo_op" for name, _ in event.stats)
    ]
    first = min(start for _, _, start, _ in found)
    return sorted(([op, n, a - first, b - first] for op, n, a, b in found), key=lambda event: event[2])


def timed(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(tyro.cli(Task, description=__doc__))
