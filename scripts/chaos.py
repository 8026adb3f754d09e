"""Trains under faults that come at random moments, and compares the end with a run that nothing disturbed.

    python scripts/chaos.py --faults 10 --out runs/chaos
    python scripts/chaos.py --faults 200 --minutes 60 --out docs/results/chaos

A small run in rounds (or of SCAPE, --method scape) on several processes of this machine. Again and again one fault strikes:
a process is killed, all are, one is stopped, one gets SIGTERM, the disk is full for one (a limit on the size of its files),
the run's folder is gone, the newest checkpoint is cut short or one of its bits flips. Each time all processes must end by
themselves within --end-secs, and the run goes on by --resume from the last whole checkpoint. At its end the losses of all
steps must be those of the undisturbed run, bit for bit. Writes chaos.md and chaos.json: kind, step, exit codes, seconds to
the end, steps done again: at most the checkpoint interval, one more whose checkpoint was under way, and one more where the
newest was damaged. The same seed draws the same faults. Programs are compiled once, and then found in a cache, so that most
of the time goes into faults.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import tyro
from rich.console import Console

from scripts._link_bench import provenance
from training import _integrity, metrics
from training.token_file import replace_atomically

ROOT = pathlib.Path(__file__).resolve().parents[1]
SIGNALS = {"kill one": signal.SIGKILL, "stop one": signal.SIGSTOP, "terminate one": signal.SIGTERM}
ON_FILES = ("cut a file", "flip a bit")
ON_FOLDERS = ("fill the disk", "take the folder")
KINDS = ("kill one", "kill all", "stop one", "terminate one", *ON_FOLDERS, *ON_FILES)
_FILE_BYTES = 1 << 16  # less than a checkpoint's arrays, more than what a start prints
_TAKEN = "taken"
_POLL_SECS = 0.05
_MANY = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Faults in a run."""

    out: pathlib.Path
    """Folder of chaos.md and chaos.json; the runs' folders are made below it, and removed at the end."""
    faults: int = 10
    """How many strike, one after the other."""
    minutes: float = math.inf
    """After so many no further one strikes."""
    method: Literal["rounds", "scape"] = "rounds"
    """Rounds over random pairs, or SCAPE at density 0.1."""
    processes: int = 4
    """Of one worker each."""
    kinds: tuple[str, ...] = KINDS
    """What may strike."""
    steps_between: int = 10
    """About how many steps are done between two faults."""
    checkpoint_every: int = 4
    """Steps between checkpoints."""
    seed: int = 0
    """Of the faults and of the run."""
    end_secs: float = 120.0
    """Within which all processes must have ended after a fault; what hangs waits for 20 of its longest recent steps."""
    start_secs: float = 300.0
    """Within which a run must have started and come to the step of its fault."""
    arguments: tuple[str, ...] = ()
    """More of scripts/pretrain.py's own."""


class Group:
    """Processes that train as one, in a working folder; a context manager, which kills those that are left.

    Args:
      folder: where they work, and where their output goes, a file each.
      arguments: of scripts/pretrain.py.
      count: processes.
      environment: of the processes.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        arguments: tuple[str, ...],
        count: int,
        environment: Mapping[str, str] = os.environ,
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.files = [folder / f"process-{index}.txt" for index in range(count)]
        self.processes: list[subprocess.Popen] = []
        for index, path in enumerate(self.files):
            own = {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
            }
            with path.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(ROOT / "scripts" / "pretrain.py"), *arguments],
                        cwd=folder,
                        env={**environment, **own},
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    def told(self, index: int) -> str:
        """What a process has printed."""
        return self.files[index].read_text(errors="replace")

    def signal(self, index: int, number: int) -> None:
        if self.processes[index].poll() is None:
            self.processes[index].send_signal(number)

    def wait_until(self, condition: Callable[[], bool], secs: float) -> None:
        """Raises RuntimeError where a process ends first, TimeoutError where it does not come true."""
        deadline = time.monotonic() + secs
        while not condition():
            ended = [i for i, process in enumerate(self.processes) if process.poll() is not None]
            if ended and not condition():
                raise RuntimeError(f"process {ended[0]} ended:\n{self.told(ended[0])[-2000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {secs:g} s:\n{self.told(0)[-2000:]}")
            time.sleep(_POLL_SECS)

    def codes(self, secs: float) -> list[int | None]:
        """Exit codes once all have ended; None of one that has not within `secs`."""
        deadline = time.monotonic() + secs
        found: list[int | None] = []
        for process in self.processes:
            try:
                found.append(process.wait(max(0.01, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                found.append(None)
        return found

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *unused: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def losses(folder: pathlib.Path) -> dict[int, float]:
    """Step -> the loss that was logged for it."""
    return {r["step"]: r["loss"] for r in metrics.read(folder) if "loss" in r}


def last_step(folder: pathlib.Path) -> int:
    """Of the last line that was logged."""
    path = folder / metrics.METRICS_FILE
    return max(losses(folder), default=0) if path.exists() else 0


def sealed(folder: pathlib.Path) -> list[int]:
    """Steps of the checkpoints whose files are summed up."""
    return [
        step
        for step in checkpoints(folder)
        if (folder / "checkpoints" / str(step) / _integrity.FILE).exists()
    ]


def _is_ready(group: Group, folder: pathlib.Path, step: int, two_checkpoints: bool) -> bool:
    """Whether this start has come to the step of its fault, and where one is to be damaged, has two checkpoints."""
    if "first step after" not in group.told(0) or last_step(folder) < step:
        return False
    return not two_checkpoints or len(sealed(folder)) > 1


def checkpoints(folder: pathlib.Path) -> list[int]:
    """Steps of the finished ones."""
    found = (folder / "checkpoints").glob("*")
    return sorted(int(path.name) for path in found if path.name.isdecimal())


def arguments_of(settings: Settings, steps: int) -> tuple[str, ...]:
    """Of the run."""
    own = {
        "run.folder": "run",
        "run.steps": str(steps),
        "run.seed": str(settings.seed),
        "run.hang_secs": "5",
        "schedule.name": "constant",  # whatever the length of the run, which is not known before its end
        "schedule.warmup_fraction": "0",
        "optimizer.density_warmup_fraction": "0",
        "eval.every": "0",
        "log.every": "1" if settings.method == "scape" else "2",
        "log.tensorboard": "False",
        "checkpoint.every": str(settings.checkpoint_every),
        "checkpoint.keep": "3",
    }
    if settings.method == "scape":
        own |= {"mesh.data": str(settings.processes), "mesh.worker": "1", "optimizer.block_size": "256"}
    else:
        own |= {
            "outer.name": "gasloc",
            "outer.local_steps": "2",
            "mesh.worker": str(settings.processes),
            "mesh.data": "1",
            "optimizer.name": "adams",
        }
    return ("--config", "tiny", *(f"--{k}={v}" for k, v in own.items()), *settings.arguments)


def environment_of(settings: Settings) -> dict[str, str]:
    """Of the processes."""
    cache = str((settings.out / "work" / "compiled").absolute())
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def strike(kind: str, group: Group, folder: pathlib.Path, rng: random.Random) -> str:
    """Does it; returns what was hit."""
    one = rng.randrange(len(group.processes))
    if kind in SIGNALS:
        group.signal(one, SIGNALS[kind])
        return f"process {one}"
    if kind == "fill the disk":
        resource.prlimit(group.processes[one].pid, resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
        return f"process {one}"
    if kind == "take the folder":
        folder.rename(folder.with_name(_TAKEN))
        return "the run's folder"
    for index in range(len(group.processes)):
        group.signal(index, signal.SIGKILL)
    if kind == "kill all":
        return "all processes"
    group.codes(10.0)
    step = sealed(folder)[-1]
    for later in [
        s for s in checkpoints(folder) if s > step
    ]:  # finished and not summed up yet: as if it had not finished
        shutil.rmtree(folder / "checkpoints" / str(later))
    newest = folder / "checkpoints" / str(step)
    files = (
        p for p in newest.rglob("*") if p.is_file() and p.stat().st_size > 0 and p.name != _integrity.FILE
    )
    path = rng.choice(sorted(files))
    content = bytearray(path.read_bytes())
    if kind == "cut a file":
        content = content[: rng.randrange(len(content))]
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return path.relative_to(folder).as_posix()


def expected_codes(kind: str, hit: str, codes: list[int | None]) -> bool:
    """Whether all ended as documented."""
    if kind == "terminate one":
        return set(codes) == {143}
    if kind in ("kill one", "stop one"):
        one = int(hit.split()[1])
        return all(code == 75 for index, code in enumerate(codes) if index != one)
    if kind in ON_FOLDERS:
        return set(codes) == {74}
    return None not in codes


def most_lost(kind: str, settings: Settings) -> int:
    """Steps that may have to be done again: an interval between checkpoints, one more whose checkpoint was under way, one
    more where the newest is damaged, and those of a line.
    """
    return (3 if kind in ON_FILES else 2) * settings.checkpoint_every + 2


def note_resumed(struck: list[dict[str, Any]], group: Group) -> None:
    """Whether the start after the last fault went on from the step that was expected."""
    if struck:
        told = re.search(r"going on from step (\d+)", group.told(0))
        step = int(told[1]) if told else 0
        struck[-1]["as_documented"] &= step == struck[-1]["going_on_from"]


def give_back(folder: pathlib.Path) -> None:
    """The folder that was taken."""
    taken = folder.with_name(_TAKEN)
    if taken.exists():
        shutil.rmtree(folder, ignore_errors=True)  # made anew by what was under way
        taken.rename(folder)


def disturbed(settings: Settings, folder: pathlib.Path, console: Console) -> tuple[list[dict[str, Any]], int]:
    """The run under faults, to its end; and its number of steps."""
    rng, environment = random.Random(settings.seed), environment_of(settings)
    run = folder / "run"
    struck: list[dict[str, Any]] = []
    left: list[str] = []
    begin, until = arguments_of(settings, _MANY), time.monotonic() + 60 * settings.minutes
    for number in range(settings.faults):
        if time.monotonic() > until:
            break
        left = left or rng.sample(settings.kinds, len(settings.kinds))  # each as often as the others
        kind = left.pop()
        done = last_step(run)
        at = done + rng.randint(1, 2 * settings.steps_between)
        if kind == "stop one":
            at = max(at, done + 24)  # the deadline of a step follows from the steps of this start
        resumed = bool(checkpoints(run))
        if not resumed and run.exists():
            shutil.rmtree(run)
        arguments = ("--resume", "run") if resumed else begin
        with Group(folder, arguments, settings.processes, environment) as group:
            ready = functools.partial(_is_ready, group, run, at, kind in ON_FILES)
            group.wait_until(ready, settings.start_secs)
            time.sleep(rng.random() * 0.3)
            reached = last_step(run)
            note_resumed(struck, group)
            hit, began = strike(kind, group, run, rng), time.monotonic()
            if kind == "stop one":
                # The others must end by themselves; the one that is stopped cannot.
                deadline, one = began + settings.end_secs, int(hit.split()[1])
                while any(p.poll() is None for i, p in enumerate(group.processes) if i != one):
                    if time.monotonic() > deadline:
                        break
                    time.sleep(_POLL_SECS)
                group.signal(one, signal.SIGCONT)
            codes = group.codes(max(1.0, settings.end_secs - (time.monotonic() - began)))
            secs = time.monotonic() - began
            told = "\n".join(f"process {i}: {group.told(i)[-2000:]}" for i in range(settings.processes))
        give_back(run)
        whole = checkpoints(run)
        going_on = whole[-1] if whole else 0
        if kind in ON_FILES:
            going_on = whole[-2]
        fault = {
            "number": number,
            "kind": kind,
            "hit": hit,
            "step": reached,
            "codes": codes,
            "secs": round(secs, 2),
            "going_on_from": going_on,  # as the folder says; the next start has to say the same
            "lost_steps": max(0, reached - going_on),
            "as_documented": expected_codes(kind, hit, codes)
            and reached - going_on <= most_lost(kind, settings),
        }
        struck.append(fault)
        console.print(
            f"{number + 1}/{settings.faults} {kind} ({hit}) at step {reached}: ended after {secs:.1f} s with {codes}, "
            f"goes on from {going_on}"
        )
        if not fault["as_documented"]:
            console.print(told, markup=False)
    steps = (last_step(run) + settings.checkpoint_every) // 2 * 2
    with Group(
        folder, ("--resume", "run", "--run.steps", str(steps)), settings.processes, environment
    ) as group:
        codes = group.codes(settings.start_secs + steps)
        if codes != [0] * settings.processes:
            raise RuntimeError(f"the run must end with 0, got {codes}:\n{group.told(0)[-3000:]}")
        note_resumed(struck, group)
    return struck, steps


def undisturbed(settings: Settings, folder: pathlib.Path, steps: int) -> dict[int, float]:
    """Losses of the same run without faults."""
    arguments = arguments_of(settings, steps)
    with Group(folder, arguments, settings.processes, environment_of(settings)) as group:
        codes = group.codes(settings.start_secs + steps)
        if codes != [0] * settings.processes:
            raise RuntimeError(f"the undisturbed run must end with 0, got {codes}:\n{group.told(0)[-3000:]}")
    return losses(folder / "run")


def markdown(result: dict[str, Any]) -> str:
    faults = result["faults"]
    lines = [
        f"{len(faults)} faults in a run of {result['steps']} steps ({result['method']}) on {result['processes']} processes, "
        f"a checkpoint every {result['checkpoint_every']} steps. {result['date']}, Linux {result['kernel']}, Python "
        f"{result['python']}.\n",
        f"    {result['command']}\n",
        f"- Losses of all {result['compared']} logged steps as in the undisturbed run, bit for bit: "
        f"{'yes' if not result['different'] else 'NO, first at step ' + str(result['different'][0])}.",
        f"- Ended as documented within {result['end_secs']:g} s: "
        f"{sum(f['as_documented'] for f in faults)} of {len(faults)}.",
        f"- Most steps done again: {max((f['lost_steps'] for f in faults), default=0)}.\n",
        "| kind | times | as documented | seconds to the end, most | steps done again, mean | most |",
        "|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(f["kind"] for f in faults):
        of = [f for f in faults if f["kind"] == kind]
        lost = [f["lost_steps"] for f in of]
        lines.append(
            f"| {kind} | {len(of)} | {sum(f['as_documented'] for f in of)} | {max(f['secs'] for f in of):.1f} "
            f"| {sum(lost) / len(lost):.1f} | {max(lost)} |"
        )
    lines += [
        "",
        "| | kind | hit | at step | exit codes | s to the end | went on from |",
        "|---|---|---|---|---|---|---|",
    ]
    for f in faults:
        lines.append(
            f"| {f['number'] + 1} | {f['kind']} | {f['hit']} | {f['step']} | {', '.join(map(str, f['codes']))} "
            f"| {f['secs']:.1f} | {f['going_on_from']} |"
        )
    return "\n".join(lines) + "\n"


def main(settings: Settings) -> dict[str, Any]:
    unknown = [kind for kind in settings.kinds if kind not in KINDS]
    if unknown or settings.faults < 1 or settings.processes < 2 or settings.steps_between < 1:
        raise SystemExit(
            f"kinds must be among {', '.join(KINDS)}, faults and steps-between at least 1, processes at least 2; got "
            f"{unknown or 'known kinds'}, {settings.faults}, {settings.steps_between} and {settings.processes}."
        )
    settings.out.mkdir(parents=True, exist_ok=True)
    console, work = Console(), settings.out / "work"
    shutil.rmtree(work, ignore_errors=True)
    for name in ("disturbed", "undisturbed"):
        (work / name).mkdir(parents=True)
    faults, steps = disturbed(settings, work / "disturbed", console)
    expected = undisturbed(settings, work / "undisturbed", steps)
    found = losses(work / "disturbed" / "run")
    different = sorted(
        step for step in expected.keys() | found.keys() if expected.get(step) != found.get(step)
    )
    result = {
        **provenance("chaos"),
        "steps": steps,
        **{
            name: getattr(settings, name)
            for name in ("method", "processes", "checkpoint_every", "end_secs", "seed")
        },
        "compared": len(expected),
        "different": different,
        "faults": faults,
    }
    with replace_atomically(settings.out / "chaos.json") as file:
        file.write((json.dumps(result, indent=1) + "\n").encode())
    (settings.out / "chaos.md").write_text(markdown(result))
    shutil.rmtree(work)
    console.print(markdown(result).split("| | kind")[0], soft_wrap=True)
    return result


if __name__ == "__main__":
    found = main(tyro.cli(Settings, description=__doc__))
    sys.exit(1 if found["different"] or not all(f["as_documented"] for f in found["faults"]) else 0)
