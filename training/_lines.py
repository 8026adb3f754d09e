"""Whole lines of text from a process's output, whatever it writes: long lines, redrawn ones, bytes that are no text."""

from __future__ import annotations

import codecs
import os
import sys
import time

_LONGEST_CHARACTERS = 1 << 20
_REDRAW_SECS = 1.0
_COLOURS = (36, 33, 32, 35, 34, 31)  # of ANSI terminals


class Lines:
    """Cuts the bytes of one stream into lines of valid text without their ends.

    A line that is drawn over by "\\r", such as a progress bar, counts as it was left; while it goes on, what it shows comes
    as a line of its own at most once a second. A line longer than 2^20 characters comes in pieces of that length.

    Example:
      >>> lines = Lines()
      >>> lines.feed(b"one\\ntw"), lines.feed(b"o\\n 10 %\\r100 %\\n"), lines.end()
      (['one'], ['two', '100 %'], [])
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self._shown_secs = time.monotonic()

    def feed(self, data: bytes) -> list[str]:
        """The lines that end in `data`."""
        *whole, rest = (self._rest + self._decoder.decode(data)).split("\n")
        found = [_as_left(line) for line in whole]
        done, _, _ = rest.rstrip("\r").rpartition("\r")
        if done:
            rest = rest[len(done) + 1 :]
            if time.monotonic() - self._shown_secs > _REDRAW_SECS:
                found.append(_as_left(done))
                self._shown_secs = time.monotonic()
        while len(rest) > _LONGEST_CHARACTERS:
            found.append(rest[:_LONGEST_CHARACTERS])
            rest = rest[_LONGEST_CHARACTERS:]
        self._rest = rest
        return found

    def end(self) -> list[str]:
        """What is left when the stream ends without an end of line."""
        rest, self._rest = self._rest + self._decoder.decode(b"", final=True), ""
        return [_as_left(rest)] if rest else []


def _as_left(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def print_line(worker: int, stream: int, text: str) -> None:
    """Prints a worker's line to output (1) or errors (2) with its number before it, in colour on a terminal."""
    out = sys.stdout if stream == 1 else sys.stderr
    prefix = f"[{worker}] "
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        prefix = f"\x1b[{_COLOURS[worker % len(_COLOURS)]}m{prefix}\x1b[0m"
    encoding = out.encoding or "utf-8"
    print(prefix + text.encode(encoding, "replace").decode(encoding), file=out, flush=True)
