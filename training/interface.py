"""Bytes that this process's network interface has sent, by the kernel's own count, headers included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

LINK = "net0"  # what the local launcher calls a worker's own interface
_TABLE = Path("/proc/net/dev")


def interfaces() -> dict[str, int]:
    """Bytes sent on each interface of this network namespace since it came up; {} where the kernel does not tell."""
    if not _TABLE.exists():
        return {}
    rows = (line.split(":", 1) for line in _TABLE.read_text().splitlines() if ":" in line)
    return {name.strip(): int(counts.split()[8]) for name, counts in rows}


def sent_bytes(interface: str = LINK) -> Callable[[], int]:
    """A function that reads the count of this interface.

    Raises:
      ValueError: there is no such interface here.
    """
    if interface not in interfaces():
        raise ValueError(
            f"bytes are counted on {interface}, got {', '.join(interfaces()) or 'no interface'}. Start with "
            "scripts/launch_local.py on Linux, which gives each worker one."
        )
    return lambda: interfaces()[interface]
