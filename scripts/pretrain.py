"""Trains a language model with little communication between its workers.

    python scripts/pretrain.py --config demo
    python scripts/pretrain.py --config demo --optimizer.density 0.01 --mesh.data 4 --run.steps 100
    python scripts/pretrain.py --config llama500m --optimizer.density 0.01 --mesh.data 32
    python scripts/pretrain.py --config gasloc-demo --outer.local_steps 30 --outer.topology random_ring
    python scripts/pretrain.py --config demo --outer.name gasloc --mesh.worker 2 --mesh.data 4
    python scripts/pretrain.py --resume runs/demo-1

A configuration (--config) is a set of defaults; --config-file FILE.json (or .yaml) changes some, and every
setting can be set by its dotted name on top; --config demo --help lists them. Results go to a new folder in
runs/: config.json, metrics.jsonl, tensorboard/, checkpoints/, summary.json, report.html. --resume [FOLDER]
goes on with a run (without FOLDER: the newest) from its newest checkpoint and takes its settings from there.

Several processes train as one where the same command is started once for each of them in a working folder that all see:
by srun, mpirun or a local launcher, with the environment variables JAX_COORDINATOR_ADDRESS (host:port of process 0),
JAX_NUM_PROCESSES and JAX_PROCESS_ID, or with --coordinator HOST:PORT --processes N --process I. Each brings an equal share
of the workers; process 0 alone prints and writes. All of them name a process that does not come within --start-timeout SECS
(300), or that differs in settings, code or versions.

Ctrl-C or SIGTERM ends after the current step or round with a checkpoint (of several processes, to any of them: all after
the same step); again: at once. While the first step is compiled it ends at once, since nothing is lost by that.
Exit codes: 0 done; 1 nothing was finite, or too many steps in a row were skipped; 2 wrong settings, or memory or data are
missing; 74 the run's folder cannot be written; 75 a process was lost or stood still, --resume goes on; 130 after Ctrl-C;
143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path


def _leave(number: int, frame: object) -> None:
    """Ends the process at once, and those that train with it: outside the training loop there is nothing to save."""
    print("\nstopped outside the training loop; nothing more was saved", file=sys.stderr, flush=True)
    joined = getattr(sys.modules.get("training.distributed"), "peers", None)  # it may be half imported
    lines = None if joined is None else joined()
    if lines is not None:
        lines.stopped(number)
    os._exit(128 + number)


if __name__ == "__main__":
    # Before the imports, which take seconds; an exception there, or inside JAX's start, would end in a traceback.
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, _leave)

import tyro
from rich.console import Console
from rich.table import Table

from training import config as settings
from training import runs
from training._peers import EXIT_CODE
from training._processes import from_first, is_first, require_same
from training.distributed import join, peers, require_same_devices, take_flags
from training.mesh import prepare_devices
from training.presets import PRESETS
from training.report import REPORT_FILE, summary_rows
from training.train import NOT_WRITTEN, Outcome, build, train

_NEWEST = "newest"
_LOST_SECS = 5.0


def parse(arguments: list[str]) -> tuple[settings.Config, Path | None]:
    """The settings, and the folder of the run to go on with."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--config-file")
    first.add_argument("--resume", nargs="?", const=_NEWEST)
    given, rest = first.parse_known_args(arguments)
    folder = None
    if given.resume is not None:
        if given.config:
            raise ValueError("--resume takes the settings from the run's folder; leave --config out.")
        folder = runs.latest() if given.resume == _NEWEST else Path(given.resume)
        base = runs.load_config(folder)
    else:
        base = settings.preset(given.config or "demo")
    if given.config_file:
        base = settings.update(base, settings.read_values(given.config_file))
    assert __doc__
    with settings.gathered():  # all that is wrong on the command line, in one error
        config = tyro.cli(
            settings.Config,
            default=base,
            args=rest,
            prog="pretrain.py",
            description=f"{__doc__}\nConfigurations: {', '.join(PRESETS)}.",
            config=(tyro.conf.FlagConversionOff,),  # flags are spelled --model.remat True or False
            use_underscores=True,
        )
    return config, folder


def show_summary(outcome: Outcome, console: Console) -> None:
    assert outcome.summary is not None
    table = Table("", "", title="Summary", show_header=False)
    table.columns[1].justify = "right"
    for row in summary_rows(outcome.summary):
        table.add_row(*row)
    console.print(table)
    console.print(f"report: {outcome.folder / REPORT_FILE}", soft_wrap=True, highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    os.umask(os.umask(0) | 0o002)  # what a run leaves is not for everyone to change
    try:
        flags, start_secs, rest = take_flags(sys.argv[1:] if arguments is None else arguments)
        config, resumed = parse(rest)
        mesh = config.mesh
        processes = join(flags=flags, settings=settings.dotted(config), timeout_secs=start_secs)
        prepare_devices(mesh.data, mesh.platform, islands=mesh.worker, processes=processes)
        require_same_devices()
        setup = build(config)
        require_same(
            "the token files", f"{setup.data.train.header.checksum} {setup.data.validation.header.checksum}"
        )
        folder = resumed or Path(from_first(lambda: str(runs.new_folder(config))))
        outcome = train(setup, folder, resume=resumed is not None)
    except (ValueError, OSError) as error:
        if os.environ.get("SCAPE_TRACEBACK"):
            raise
        _say(f"error: {error}")
        return 2
    if outcome.exit_code == NOT_WRITTEN:
        _let_a_loss_be_told()
    if outcome.failure and (is_first() or outcome.exit_code == NOT_WRITTEN):
        _say(f"error: {outcome.failure}")
    if outcome.summary is not None:
        show_summary(outcome, Console())
    return outcome.exit_code


def _say(text: str) -> None:
    """On standard error, which may be a file on a disk that is full: that must not keep this process from its end."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _let_a_loss_be_told() -> None:
    """An exchange or a save may have failed because a process was lost: then that is told, and ends this one."""
    lines = peers()
    if lines is not None and lines.lost.wait(_LOST_SECS):
        time.sleep(_LOST_SECS)


def _main_of_a_group() -> int:
    """Leaves at once after an error: at a regular exit JAX would wait for the other processes, which wait for this one."""
    code, why = 2, "its settings, data or memory, as it printed"
    try:
        code = of_others = main()
        if code == NOT_WRITTEN:
            why = "the run's folder cannot be written, as it printed"
    except Exception as error:
        if peers() is None:
            raise
        _let_a_loss_be_told()
        _say(traceback.format_exc())
        why, of_others = f"{type(error).__name__}: {str(error)[:300]}", EXIT_CODE
    lines = peers()
    if code in (2, NOT_WRITTEN) and lines is not None:
        lines.fail(why, of_others)
        os._exit(code)
    if code == NOT_WRITTEN:
        os._exit(code)  # threads may wait for ever for what they write
    return code


if __name__ == "__main__":
    sys.exit(_main_of_a_group())
