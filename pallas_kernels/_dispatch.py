"""Which form of an operation runs: its plain-JAX reference or a GPU kernel, chosen where the program is lowered.

Lowering knows for which platform a program is made, also where that device is absent: a compilation without a GPU and
`jax.export` for CUDA get the kernel, a run on CPU gets the reference, from one and the same trace.
"""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

IMPLEMENTATIONS = ("xla", "pallas", "triton")

_logger = logging.getLogger("pallas_kernels")
_interpreted = contextvars.ContextVar("interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """What is traced inside runs its named kernels as with interpret=True. For tests of what calls an operation.

    A function that was jitted and traced outside keeps what it was traced with.
    """
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


def run(
    op: str,
    *args: jax.Array,
    reference: Callable[..., Any],
    kernels: Mapping[str, Callable[..., Any]],
    implementation: str | None = None,
    unsupported: str | None = None,
    interpret: bool = False,
) -> Any:
    """reference(*args), or a kernel's form of it.

    Args:
      op: name of the operation, for messages.
      *args: the arrays, at least one.
      reference: the plain-JAX form.
      kernels: "pallas" or "triton" -> the kernel's form, best first. Takes the arrays, and interpret=True where asked.
      implementation: None takes the first kernel where the program is lowered for CUDA and the reference elsewhere;
        "xla" always the reference; "pallas" or "triton" that kernel or an error.
      unsupported: why no kernel can do this call, None if it can. Where the kernel was left open, the reference runs
        instead and one line is logged per operation and reason, when the program is lowered for CUDA.
      interpret: run the named kernel by its language's interpreter, on CPU. Slow; for tests.

    Raises:
      ValueError: `implementation` is none of the above, or `interpret` without a named kernel.
      NotImplementedError: the named kernel is not there, not for this call, or what it is written in is not installed;
        and, when the program is lowered, the platform is not CUDA.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}.")
    if interpret and implementation in (None, "xla"):
        raise ValueError(
            f"interpret=True needs a named kernel, got implementation={implementation!r}. Use 'pallas' or 'triton'."
        )
    if implementation is None:
        unsupported = unsupported or divided_by_xla()
        if unsupported is None:
            best = next(iter(kernels.values()))
            by_kernel = lambda x, *rest: best(_note(x, op=op, reason="", before="open kernel"), *rest)  # noqa: E731
            return lax.platform_dependent(*args, cuda=by_kernel, default=reference)
        return reference(_note(args[0], op=op, reason=unsupported, before="reference"), *args[1:])
    if implementation == "xla":
        return reference(*args)
    if implementation not in kernels:
        raise NotImplementedError(f"{op} has no {implementation!r} kernel, only {', '.join(kernels)}.")
    kernel = kernels[implementation]
    if unsupported is not None:
        raise NotImplementedError(f"{op}: no {implementation!r} kernel for this call: {unsupported}.")
    if interpret or _interpreted.get():
        return kernel(*args, interpret=True)
    reason = f"the {implementation!r} kernel runs on CUDA devices only"
    return kernel(_note(args[0], op=op, reason=reason, before="named kernel"), *args[1:])


# The identity. What it says, it says where the program is lowered for a device, which no trace knows.
_note_p = Primitive("pallas_kernels_note")
_note_p.def_abstract_eval(lambda x, **_: x)
_note_p.def_impl(lambda x, **params: jax.jit(functools.partial(_note_p.bind, **params))(x))


def _note(x: jax.Array, **params: Any) -> jax.Array:
    return _note_p.bind(x, **params)


def divided_by_xla() -> str | None:
    """Why no kernel can stand here: XLA is to divide the arrays over devices by itself. None where it is not known to be."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not set(mesh.axis_names) - set(mesh.manual_axes):
        return None
    return f"XLA cannot divide a kernel over {mesh.size} devices by itself; call it inside jax.shard_map over all axes"


def _divided(ctx: Any) -> bool:
    """Whether XLA divides the arrays of the program that is being lowered, at this place."""
    where = ctx.module_context.axis_context
    mesh = getattr(where, "mesh", None)
    if mesh is None:
        return (getattr(where, "num_devices", None) or 1) > 1
    return mesh.size > 1 and not set(mesh.axis_names) <= set(where.manual_axes)


def _lower_elsewhere(ctx: Any, x: Any, *, op: str, reason: str, before: str) -> list[Any]:
    if before == "named kernel":
        platforms = ctx.platforms or ctx.module_context.platforms
        raise NotImplementedError(
            f"{op}: {reason}, and this program is lowered for {', '.join(platforms)}. "
            "Use implementation=None to take the plain-JAX form there."
        )
    return [x]


def _lower_on_cuda(ctx: Any, x: Any, *, op: str, reason: str, before: str) -> list[Any]:
    if before == "reference":
        _log_fallback(op, reason)
    elif _divided(ctx):
        raise NotImplementedError(
            f"{op}: XLA cannot divide a kernel over devices by itself: every device would gather the whole arrays. Call it "
            "inside jax.shard_map over all axes of the mesh, or use implementation='xla'."
        )
    return [x]


batching.defvectorized(_note_p)
mlir.register_lowering(_note_p, _lower_elsewhere)
mlir.register_lowering(_note_p, _lower_on_cuda, platform="cuda")


@functools.cache
def _log_fallback(op: str, reason: str) -> None:
    _logger.warning("%s: plain JAX instead of a kernel: %s.", op, reason)
