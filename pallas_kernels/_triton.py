"""What the Triton twins share: the call of a `@triton.jit` kernel, through jax-triton or by Triton's interpreter.

Triton and jax-triton come with the extra `cuda`, and neither is imported before a Triton kernel is asked for. What the
two supported lines of JAX and jax-triton need besides stands here, what its interpreter needs in _triton_interpreter.py.
"""

import functools
import importlib
import inspect
import linecache
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from pallas_kernels._triton_interpreter import interpret as interpret_kernel

# jax-triton 0.3.1 goes with JAX 0.10, 0.4.1 with JAX 0.12.
_OLD_LINE = jax.__version_info__ < (0, 11)
_OPTIONS = {
    # Triton writes the version of the ptxas that it brings along, which an older ptxas, such as CUDA 13.0's, refuses. It
    # uses nothing that is newer than this one.
    "ptx_version": 90,
    # No product is fused with a sum and denormals count, as in the Pallas kernels; in both quotients and roots are
    # approximate.
    "enable_fp_fusion": False,
    "enable_reflect_ftz": False,
}
_SM_90 = 90


def twin(op: str, function: str) -> Callable[..., Any]:
    """`function` of `<op>/triton.py`, which is imported at the first call.

    That call raises NotImplementedError where Triton is not installed.
    """

    def run(*args: Any, **options: Any) -> Any:
        _imported("triton")
        return getattr(importlib.import_module(f"pallas_kernels.{op}.triton"), function)(*args, **options)

    return run


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    # jax-triton 0.3.1 raises ImportError itself where JAX has no CUDA plugin.
    except ImportError as error:
        raise NotImplementedError(
            f"implementation='triton' needs {module.partition('.')[0].replace('_', '-')}, which cannot be imported here "
            f"({error}). Install the extra: pip install 'scape-gasloc[cuda]'."
        ) from error


def call(
    kernel: Any,
    name: str,
    programs: int,
    operands: Sequence[jax.Array | None],
    outputs: Sequence[tuple[int, jnp.dtype]],
    *,
    constants: Mapping[str, Any],
    into: Mapping[int, jax.Array] | None = None,
    after: Sequence[jax.Array] = (),
    num_warps: int,
    registers: int = 128,
    interpret: bool = False,
) -> list[jax.Array]:
    """Runs kernel(*operand pointers, *output pointers, **constants) in `programs` programs.

    Args:
      kernel: a `@triton.jit` function; `tl.program_id(0)` is its number.
      name: of the kernel, as it stands in the compiled program.
      programs: how many, at least one.
      operands: arrays of any shape, given to the kernel flat. None for a pointer that it does not use in this call.
      outputs: (entries, dtype) of each output. What no program writes is undefined.
      constants: the kernel's `tl.constexpr` arguments by name, and None for each of the last output pointers that this
        call has no output for.
      into: output number -> an array that it replaces, of at least as many entries: in place where XLA need not keep
        the old one, and what no program writes stays. The kernel gets no pointer to the old one.
      after: arrays that are computed before; the kernel gets no pointer to them.
      num_warps: of each program.
      registers: that a thread may have. ptxas left to itself aims at so many programs on a multiprocessor that it spills
        a register or two.
      interpret: run by Triton's interpreter, on CPU. Triton has to be imported with TRITON_INTERPRET=1 set.

    Returns:
      The outputs, flat; one of `into` with that array's entries.
    """
    into = dict(sorted((into or {}).items()))
    flat = [np.zeros(1, np.int32) if x is None else jnp.ravel(x) for x in operands]
    old = {i: jnp.ravel(x) for i, x in into.items()}
    shapes = [
        jax.ShapeDtypeStruct((old[i].size if i in old else size,), dtype)
        for i, (size, dtype) in enumerate(outputs)
    ]
    _check_process(kernel, name, interpret)
    with jax.named_scope(name):
        if interpret:
            outs = interpret_kernel(kernel, programs, flat, old, shapes, constants)
        else:
            first = [jnp.ravel(x) for x in after]
            options = {"grid": (programs,), "name": name, "num_warps": num_warps, "num_stages": 1}
            outs = _compile(kernel, first, flat, old, shapes, {**options, **constants}, registers)
    return _as_varying_as([*flat, *old.values()], outs)


def _check_process(kernel: Any, name: str, interpret: bool) -> None:
    if interpret == hasattr(kernel, "params"):
        raise RuntimeError(
            f"{name}: interpret={interpret}, but Triton was imported {'without' if interpret else 'with'} "
            "TRITON_INTERPRET=1 in the environment, which decides for the whole process. Set or unset it before."
        )


def _as_varying_as(inputs: Sequence[Any], outputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Under shard_map's check_vma: a kernel's outputs come back as if every device had the same."""
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in inputs))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return [cast(x) for x in outputs]


def _compile(
    kernel: Any,
    unused: Sequence[jax.Array],
    operands: Sequence[Any],
    old: Mapping[int, jax.Array],
    shapes: Sequence[jax.ShapeDtypeStruct],
    arguments: Mapping[str, Any],
    registers: int,
) -> Sequence[jax.Array]:
    jax_triton = _jax_triton()
    if _OLD_LINE:
        # It hands a kernel the replaced arrays besides the outputs that take their places.
        unused = [*unused, *old.values()]
    kernel = _with_unused(kernel, len(operands), len(unused))
    operands = [*operands, *unused]
    if _OLD_LINE:
        return jax_triton.triton_call(
            *operands,
            kernel=kernel,
            out_shape=list(shapes),
            input_output_aliases={len(operands) - len(old) + j: i for j, i in enumerate(old)},
            maxnreg=registers,  # `_lower` takes it out again
            **arguments,
        )
    names = [p.name for p in kernel.params if not p.is_constexpr][len(operands) :]
    with warnings.catch_warnings():
        # Its successor, jax.new_ref, is not there in the older line.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return jax_triton.triton_call(
            *operands,
            kernel=kernel,
            out_type=list(shapes),
            input_output_aliases={len(operands) + j: i for j, i in enumerate(old)},
            backend_options={**_OPTIONS, "maxnreg": registers},
            **{names[i]: x for i, x in old.items()},
            **arguments,
        )


@functools.cache
def _jax_triton() -> Any:
    jax_triton = _imported("jax_triton")
    library = _imported("jax_triton.triton_lib")
    primitive = library.triton_kernel_call_p
    if _OLD_LINE:
        # In the place of jax-triton's rule, and the same for everybody else's kernels.
        mlir.register_lowering(primitive, functools.partial(_lower, library), platform="cuda")
    else:
        _mend_dead_code_rule(primitive)
    return jax_triton


def _mend_dead_code_rule(primitive: Any) -> None:
    """jax-triton 0.4.1 registers a rule of two arguments, and JAX 0.12 calls it with three."""
    from jax._src.interpreters import partial_eval

    rules: Any = partial_eval.dce_rules
    if len(inspect.signature(rules[primitive]).parameters) == 2:
        rules[primitive] = lambda used, _, eqn: ([True] * len(eqn.invars), eqn)


def _lower(library: Any, ctx: Any, *args: Any, **params: Any) -> Any:
    """jax-triton 0.3.1's rule, for our kernels with options that it has no argument for, and also where there is no GPU."""
    lower, registers = library.triton_kernel_call_lowering, params.pop("maxnreg", None)
    if registers is None:
        return lower(library.get_cuda_backend, ctx, *args, **params)
    if params["compute_capability"] is None:
        try:
            params["compute_capability"] = library.triton_kernel_call_lib.get_compute_capability(0)
        except RuntimeError:  # it asks a driver that is not there; Pallas takes the same
            params["compute_capability"] = _SM_90

    class Backend(library.cb.CUDABackend):
        def parse_options(self, opts: dict[str, Any]) -> Any:
            return super().parse_options({**opts, **_OPTIONS, "maxnreg": registers})

    backend = lambda _, capability: Backend(library.cb.GPUTarget("cuda", capability, 32))  # noqa: E731
    return lower(backend, ctx, *args, **params)


@functools.cache
def _with_unused(kernel: Any, place: int, count: int) -> Any:
    """The kernel with `count` more pointers before parameter `place`: each operand of a call has one, used or not."""
    if count == 0:
        return kernel
    names = "".join(f"unused_{i}, " for i in range(count))
    # A kernel's source begins with its parameters.
    first = kernel.params[place].name
    source = re.sub(rf"\b{first}\b", f"{names}{first}", inspect.getsource(kernel.fn), count=1)
    # Triton reads the source of what it compiles; linecache is where Python looks for that of a file that is none.
    file = f"<{kernel.__module__}.{kernel.__name__}, {count} unused before {first}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    found: dict[str, Any] = {}
    exec(compile(source, file, "exec"), kernel.fn.__globals__, found)
    return found[kernel.__name__]
