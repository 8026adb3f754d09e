"""Wrong settings are gathered, so that one error tells them all, one on a line."""

from __future__ import annotations

import contextlib
import contextvars
import difflib
from collections.abc import Iterator, Sequence

_gathered: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("gathered", default=None)


@contextlib.contextmanager
def gathered() -> Iterator[list[str]]:
    """Problems noted inside are raised at the end, as one ValueError; by the outermost one where it is nested."""
    outer = _gathered.get()
    if outer is not None:
        yield outer
        return
    problems: list[str] = []
    token = _gathered.set(problems)
    try:
        yield problems
    finally:
        _gathered.reset(token)
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise ValueError(f"{len(problems)} settings are wrong:\n  " + "\n  ".join(problems))


def note(problem: str) -> None:
    """Adds to what is gathered; raises where nobody gathers."""
    problems = _gathered.get()
    if problems is None:
        raise ValueError(problem)
    if problem not in problems:  # an option parser makes a section more than once
        problems.append(problem)


def require(condition: bool, problem: str) -> bool:
    """The one-line form of a range check. NaN compares false with everything, so it fails each of them."""
    if not condition:
        note(problem)
    return condition


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """ " Did you mean 'x'?" with the nearest known name, or nothing where none is near."""
    near = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
