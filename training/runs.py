"""The folders of runs: a new one for each run, and the newest one to go on from."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from training._processes import from_first
from training.checkpoint import CHECKPOINT_FOLDER
from training.config import Config
from training.report import CONFIG_FILE

ROOT = Path("runs")
LOCK_FILE = ".lock"


def new_folder(config: Config) -> Path:
    """Makes the folder of a new run, with its config.json; a folder that holds a run already is refused."""
    if config.run.folder:
        folder = Path(config.run.folder)
        if (folder / CONFIG_FILE).exists():
            raise ValueError(
                f"run.folder must not hold another run, but {folder / CONFIG_FILE} exists. Use --resume "
                f"{folder} to go on "
                "with it, or another folder."
            )
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = _numbered(config.run.name)
    save_config(config, folder)
    return folder


def save_config(config: Config, folder: Path) -> None:
    """Writes config.json; the run's folder is where the file is, so the file does not name it."""
    dataclasses.replace(config, run=dataclasses.replace(config.run, folder="")).save(folder / CONFIG_FILE)


def _numbered(name: str) -> Path:
    number = 1
    while True:
        folder = ROOT / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)  # atomic: two runs started together get two folders
            return folder
        except FileExistsError:
            number += 1


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """No other run may write into the folder meanwhile; the system lets go of it when this process ends in whatever way.

    Raises:
      ValueError: another run holds it; all processes raise the same.
    """
    with contextlib.ExitStack() as stack:
        from_first(lambda: _lock(folder, stack))
        yield


def _lock(folder: Path, stack: contextlib.ExitStack) -> str:
    if fcntl is None:  # Windows
        return ""
    path = folder / LOCK_FILE
    if path.is_symlink():
        raise ValueError(f"{path} must be a file of its own, got a link to {path.readlink()}. Remove it.")
    file = stack.enter_context(open(path, "a+"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        who = file.read().strip() or "another process"
        raise ValueError(
            f"a run's folder must be its own, but {who} is training in {folder}. Wait for its end, end it, or start a new "
            "run."
        ) from None
    except OSError:  # a file system without locks
        return ""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return ""


def latest() -> Path:
    """The folder in runs/ whose newest checkpoint was written last."""
    found = sorted(ROOT.glob(f"*/{CHECKPOINT_FOLDER}/[0-9]*"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(
            f"--resume needs a run with a checkpoint, got none in {ROOT}/. Name its folder: --resume FOLDER."
        )
    return found[-1].parents[1]


def load_config(folder: str | Path) -> Config:
    """The settings a run was started with; its folder may have been moved since."""
    folder = Path(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"a run's folder must hold {CONFIG_FILE}, got {folder}. Give the folder printed at its start."
        )
    config = Config.load(folder / CONFIG_FILE)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, folder=str(folder)))
