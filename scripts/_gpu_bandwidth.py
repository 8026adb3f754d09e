"""Bandwidth of single kernels beside that of a copy, for scripts/gpu_check.py.

How a kernel is timed: one program holds several calls in a row, so many that it takes about a millisecond; the host's clock
stands around the program and the wait for its end, after a run that warms up. Dispatch and launch of a call hide behind
the calls before. Runs of the kernel and of a copy take turns, and each share is a ratio of neighbours, so that a clock
that drifts changes little.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._arg_specs import Call
from scripts._gpu_calls import OPS, Op
from scripts._gpu_run import KERNELS, QUICK, REFERENCE, Limits, Row, compiled, form, key_like, not_here, told

# Entries of its first array that make a call a large one: words of a mask are the fewest.
LARGE = 1 << 19
# What one timed program moves: about a millisecond on an H200.
PROGRAM_BYTES = 4e9


def in_a_row(op: Op, call: Call, run: Callable[..., Any], times: int) -> Callable[..., Any]:
    """A program of `times` calls: (their arrays) -> (arrays that were written in place, all other outputs).

    Calls that write in place follow on each other. Any other gets a copy of the smallest array for each call, in a list in
    that array's place: of equal calls XLA would keep one, also behind an optimization barrier.
    """
    follows, varied = op.follows(call), smallest(call)

    def program(*arrays):
        arrays, outputs = list(arrays), []
        versions = arrays[varied]
        for i in range(times):
            if not follows:
                arrays[varied] = versions[i]
            out = jax.tree.leaves(run(*arrays))
            for number, output in follows.items():
                arrays[number] = out[output].reshape(arrays[number].shape)
            outputs.append([x for output, x in enumerate(out) if output not in follows.values()])
        return [arrays[number] for number in follows], outputs[-1] if follows else outputs

    return program


def smallest(call: Call) -> int:
    """Number of the array with the fewest bytes."""
    return min(range(len(call.arrays)), key=lambda i: call.arrays[i].size * call.arrays[i].dtype.itemsize)


def several(op: Op, call: Call, arrays: tuple[Any, ...], times: int) -> tuple[Any, ...]:
    """The arrays of one call as `in_a_row` takes them."""
    if op.follows(call):
        return arrays
    varied = smallest(call)
    one = arrays[varied]
    copied = [jnp.copy(one) if isinstance(one, jax.Array) else one for _ in range(times)]
    return (*arrays[:varied], copied, *arrays[varied + 1 :])


class Repeated:
    """A program of several calls, run again and again on the same arrays."""

    def __init__(self, op: Op, call: Call, implementation: str, quick: bool):
        self.bytes = op.moved(call)
        self.times = 2 if quick else max(4, min(32, math.ceil(PROGRAM_BYTES / self.bytes)))
        self.follows = tuple(op.follows(call))
        run = form(op, call, implementation, quick and implementation != REFERENCE)
        shapes = several(op, call, call.arrays, self.times)
        self.program = compiled(in_a_row(op, call, run, self.times), *shapes, donate=self.follows)
        make = compiled(functools.partial(op.inputs, call), key_like())
        self.arrays = list(several(op, call, make(jax.random.key(1)), self.times))
        self.secs()

    def secs(self) -> float:
        """Of one call."""
        start = time.perf_counter()
        replaced, _ = jax.block_until_ready(self.program(*self.arrays))
        taken = time.perf_counter() - start
        for number, array in zip(self.follows, replaced, strict=True):
            self.arrays[number] = array
        return taken / self.times


class Copy:
    """x + 1 in place on a buffer far larger than any cache: what reading and writing can reach here."""

    def __init__(self, quick: bool):
        self.x = jnp.zeros((1 << 16 if quick else 1 << 28,), jnp.float32)
        self.times = 4

        def program(x):
            for _ in range(self.times):
                x = jax.lax.optimization_barrier(x + 1.0)
            return x

        self.program = compiled(program, self.x, donate=(0,))
        self.bytes_per_sec()

    def bytes_per_sec(self) -> float:
        start = time.perf_counter()
        self.x = jax.block_until_ready(self.program(self.x))
        return self.times * 2 * self.x.nbytes / (time.perf_counter() - start)


def bandwidth(name: str, limits: Limits) -> Iterator[Row]:
    """GB/s of an operation's kernels and of its plain-JAX form on the large shapes, beside a copy's."""
    op, copy = OPS[name], Copy(limits.quick)
    for spec, call in op.calls.items():
        if spec != QUICK if limits.quick else call.arrays[0].size < LARGE:
            continue
        for implementation in (REFERENCE,) if limits.quick else (*KERNELS, REFERENCE):
            row = {"op": name, "spec": spec, "implementation": implementation, "bytes": op.moved(call)}
            if limits.over:
                yield row | {"status": "not run", "detail": "out of time"}
                continue
            try:
                yield row | _timed(Repeated(op, call, implementation, limits.quick), copy, limits)
            except NotImplementedError as error:
                yield from not_here(row, error)
            except Exception as error:
                yield row | {"status": "error", "detail": told(error)}


def _timed(run: Repeated, copy: Copy, limits: Limits) -> Row:
    secs, copies = [], []
    for i in range(limits.repeats):
        if i >= 3 and limits.over:
            break
        copies.append(copy.bytes_per_sec())
        secs.append(run.secs())
    reached = run.bytes / np.array(secs)
    share = reached / np.array(copies)
    return {
        "status": "timed",
        "median_ms": float(np.median(secs) * 1e3),
        "gb_per_sec": float(np.median(reached) / 1e9),
        "copy_gb_per_sec": float(np.median(copies) / 1e9),
        "of_copy": float(np.median(share)),
        "of_copy_min": float(share.min()),
        "of_copy_max": float(share.max()),
        "repeats": len(secs),
        "calls_in_a_row": run.times,
    }
