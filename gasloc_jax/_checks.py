"""Checks of settings: what must hold, what was given, what to do. Traced values (inject_hyperparams) pass unseen."""

import inspect
import math
import numbers
import re
from collections.abc import Callable
from typing import Any

import jax


def path_name(path: tuple) -> str:
    """A leaf's path as text, "layers/attention/query/kernel"; flax.nnx's trailing `.value` is dropped."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return re.sub(r"[/.]value$", "", name) or "(root)"


def check_number(name: str, value: Any, must: str, holds: Callable[[Any], bool], hint: str) -> None:
    """Raises ValueError unless `value` is a plain real number for which `holds`; an array is not looked at."""
    if isinstance(value, jax.Array):
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not holds(value):
        raise ValueError(f"{name} must be {must}, got {value!r}. {hint}")


def check_whole_number(name: str, value: Any, least: int, hint: str) -> None:
    """Raises ValueError unless `value` is an int >= least."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}. {hint}")


def check_rate(name: str, value: Any, hint: str) -> None:
    """Raises ValueError unless a finite number >= 0 or a schedule."""
    if not callable(value):
        check_number(name, value, "a finite number >= 0", lambda x: 0 <= x < math.inf, hint)


def check_transformation(name: str, value: Any, example: str) -> None:
    """Raises TypeError unless an optax transformation."""
    if not (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
        given = f"{value.__qualname__}, uncalled" if inspect.isroutine(value) else repr(value)
        raise TypeError(f"{name} must be an optax transformation, got {given}. Write {name}={example}.")


def check_momentum(name: str, value: Any) -> None:
    """Raises ValueError unless in [0, 1)."""
    check_number(name, value, "in [0, 1)", lambda x: 0 <= x < 1, "Use 0 for none; typical: 0.9.")


def check_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}. Use {allowed[0]!r} if in doubt.")


def check_floating(params: Any) -> None:
    """Raises TypeError for the first leaf that is not floating-point."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        dtype = jax.dtypes.canonicalize_dtype(jax.numpy.result_type(leaf))
        if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
            raise TypeError(
                f"parameters must be floating-point, got {dtype} in {path_name(path)!r}. Leave it out of the parameters."
            )
