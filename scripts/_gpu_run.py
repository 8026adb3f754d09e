"""What the parts of scripts/gpu_check.py share: limits, and how a form of an operation is made into a program."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels._arg_specs import Call
from scripts._gpu_calls import Op

KERNELS = ("pallas", "triton")
REFERENCE = "xla"
# What quick runs take: ten rows, the last one short.
QUICK = "odd_tail"

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Limits:
    """quick: small shapes on CPU, kernels by their interpreters. parameters: of the model whose update is timed.

    repeats: timed runs of each kernel. until: time.time() when a task must end; it drops repeats and shapes.
    """

    quick: bool
    parameters: int
    repeats: int
    until: float = math.inf

    @property
    def over(self) -> bool:
        return time.time() > self.until


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def compiled(function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()) -> Any:
    return jax.jit(function, donate_argnums=donate).lower(*shapes).compile()


def form(op: Op, call: Call, implementation: str, quick: bool) -> Callable[..., Any]:
    """The operation with everything static bound; kernels run by their interpreter where quick."""
    options = {"interpret": True} if quick and implementation in KERNELS else {}
    return functools.partial(op.function, **call.static, implementation=implementation, **options)


def not_here(row: Row, error: NotImplementedError) -> Iterator[Row]:
    """Nothing of a kernel that was never written; else why it cannot run here."""
    if f"has no {row['implementation']!r} kernel" not in str(error):
        yield row | {"status": "not here", "detail": str(error)}


def key_like() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))
