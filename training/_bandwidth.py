"""Speeds and delays of links in words: what `tc` writes and what a reader expects."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_BIT_PER_SEC = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bandwidth(text: str | float) -> float:
    """Bit/s of a number or of tc's spelling of one.

    Example:
      >>> parse_bandwidth("100mbit"), parse_bandwidth("2.5gbit"), parse_bandwidth(1e6)
      (100000000.0, 2500000000.0, 1000000.0)

    Raises:
      ValueError: it is no such text, or not in 1 kbit .. 1 tbit.
    """
    bandwidth = _number(str(text), _BIT_PER_SEC)
    if not 1e3 <= bandwidth <= 1e12:
        raise ValueError(
            "a bandwidth must be a number of bit/s, alone or with kbit, mbit, gbit or tbit, from 1kbit to 1tbit, got "
            f'{text!r}. Write for example "100mbit".'
        )
    return bandwidth


def parse_latency(text: str | float) -> float:
    """Seconds of a number of seconds, or of a text with us, ms or s; ValueError for others and outside 0 .. 10 s."""
    latency_secs = _number(text, _SECS) if isinstance(text, str) else float(text)
    if not 0 <= latency_secs <= 10:
        raise ValueError(
            f"a latency must be a number with us, ms or s, from 0s to 10s, got {text!r}. "
            'Write for example "5ms".'
        )
    return latency_secs


def in_words(rate: float | None) -> str:
    """A bandwidth as in `100 Mbit/s`; None is no limit."""
    if rate is None:
        return "not limited"
    unit, shown = next(
        pair
        for pair in (("gbit", "Gbit/s"), ("mbit", "Mbit/s"), ("kbit", "kbit/s"))
        if rate >= _BIT_PER_SEC[pair[0]]
    )
    return f"{rate / _BIT_PER_SEC[unit]:g} {shown}"


def _number(text: str, units: Mapping[str, float]) -> float:
    """NaN where the text is no number with one of the units."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    return float(found[1]) * units.get(found[2], math.nan) if found else math.nan
