"""Checksums beside a checkpoint's files: a truncated file or a flipped bit is found before anything is loaded.

A checkpoint without them is one whose run ended between writing it and summing it up, or of an earlier version: orbax had
finished it, so it is taken as whole.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from training.token_file import replace_atomically

FILE = "checksums.json"
_CHUNK_BYTES = 1 << 22


def seal(folder: Path) -> None:
    """Writes the size and the CRC-32 of each file of a finished checkpoint; raises OSError where there is none."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint in {folder}")
    found = {name: [path.stat().st_size, _crc(path)] for name, path in _files(folder).items()}
    with replace_atomically(folder / FILE) as file:
        file.write((json.dumps(found, indent=0) + "\n").encode())


def damaged(folder: Path) -> str | None:
    """The first file that is not as it was written, and how."""
    try:
        written = json.loads((folder / FILE).read_text())
        sums = {str(name): (int(size), int(crc)) for name, (size, crc) in written.items()}
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError, RecursionError, OSError) as error:
        return f"{folder / FILE} cannot be read ({error})"
    files = _files(folder)
    for name in sorted(sums):
        size, crc = sums[name]
        path = files.get(name)  # never a path from the file: that could lead anywhere
        try:
            if path is None:
                return f"{folder / name} is missing"
            if path.stat().st_size != size:
                return f"{path} has {path.stat().st_size} bytes of {size}"
            if _crc(path) != crc:
                return f"{path} has other bytes than were written"
        except OSError as error:
            return f"{path} cannot be read ({error})"
    return None


def _files(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != FILE
    }


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc
