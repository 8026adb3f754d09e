"""Checks of settings: what must hold, what was given, what to do. Traced values (inject_hyperparams) pass unseen."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PAYLOAD_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


def check_number(name: str, value: Any, must: str, holds: Callable[[Any], bool], hint: str) -> None:
    """Raises ValueError unless `value` is a plain real number for which `holds`; an array is not looked at."""
    if isinstance(value, jax.Array):
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not holds(value):
        raise ValueError(f"{name} must be {must}, got {value!r}. {hint}")


def check_static_number(name: str, value: Any) -> None:
    """Raises TypeError for an array: these numbers fix shapes, so they cannot be traced."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} fixes the shapes of the exchange and must be a plain Python number, got {value!r}. "
            "With optax.inject_hyperparams pass static_args=scape_jax.STATIC_ARGS."
        )


def check_density(density: Any) -> None:
    """Raises ValueError outside (0, 1]."""
    check_static_number("density", density)
    check_number("density", density, "in (0, 1]", lambda d: 0 < d <= 1, "Use 1.0 for a dense exchange.")


def check_whole_number(name: str, value: Any, least: int, hint: str) -> None:
    """Raises ValueError unless `value` is an int >= least."""
    check_static_number(name, value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}. {hint}")


def check_clip_norm(clip_norm: Any) -> None:
    """Raises ValueError unless None or a finite number > 0."""
    if clip_norm is not None:
        positive = lambda x: 0 < x < math.inf  # noqa: E731
        check_number("clip_norm", clip_norm, "a finite number > 0", positive, "Use None for no clipping.")


def check_skip_spike(skip_spike: Any) -> None:
    """Raises ValueError unless None or a finite number of nats > 0."""
    if skip_spike is not None:
        positive = lambda x: 0 < x < math.inf  # noqa: E731
        check_number("skip_spike", skip_spike, "a finite number > 0", positive, "Use None to skip none.")


def check_payload_dtype(dtype: Any) -> None:
    """Raises ValueError unless float32 or bfloat16."""
    try:
        given = jnp.dtype(dtype)
    except TypeError:
        given = dtype
    if given not in PAYLOAD_DTYPES:
        raise ValueError(
            f"payload_dtype must be jnp.float32 or jnp.bfloat16, got {given!r}. Use one of these."
        )


def check_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}. Use {allowed[0]!r} if in doubt.")


def check_hyperparameters(b1: Any, b2: Any, eps: Any) -> None:
    """Raises ValueError for constants of AdamS or AdamW outside their range."""
    for name, value in (("b1", b1), ("b2", b2)):
        check_number(name, value, "in [0, 1)", lambda b: 0 <= b < 1, "Typical: b1=0.9, b2=0.95.")
    check_number("eps", eps, "a finite number >= 0", lambda e: 0 <= e < math.inf, "Typical: 1e-8.")


def check_rates(learning_rate: Any, weight_decay: Any) -> None:
    """Raises ValueError where one is a plain number that is not finite or below 0; schedules pass."""
    for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
        if not callable(value) or name == "weight_decay":
            hint = "Use a number, or for the learning rate a schedule of the step count."
            check_number(name, value, "a finite number >= 0", lambda r: 0 <= r < math.inf, hint)
