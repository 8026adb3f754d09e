"""Runs `@triton.jit` kernels by Triton's own interpreter, on CPU, inside of jit and without PyTorch. For tests: slow."""

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# It keeps the number of the program and patches `triton.language` in global variables.
_one_at_a_time = threading.Lock()


def interpret(
    kernel: Any,
    programs: int,
    operands: Sequence[Any],
    old: Mapping[int, jax.Array],
    shapes: Sequence[jax.ShapeDtypeStruct],
    constants: Mapping[str, Any],
) -> Sequence[jax.Array]:
    """The outputs of kernel(*operand pointers, *output pointers, **constants).

    Args:
      kernel: a `@triton.jit` function of a process with TRITON_INTERPRET=1.
      programs: how many.
      operands: flat arrays.
      old: output number -> the flat array that it replaces.
      shapes: of the outputs.
      constants: the kernel's other arguments.
    """
    _mend()

    def run(*arrays: Any) -> list[np.ndarray]:
        arrays = [np.array(x) for x in arrays]
        replaced = dict(zip(old, arrays[len(operands) :], strict=True))
        outs = [replaced[i] if i in replaced else _unwritten(shape) for i, shape in enumerate(shapes)]
        # It computes lanes that no mask lets through, too.
        with _one_at_a_time, np.errstate(all="ignore"):
            kernel[(programs,)](*map(_Buffer, [*arrays[: len(operands)], *outs]), **constants)
        return outs

    return jax.pure_callback(run, list(shapes), *operands, *old.values())


@functools.cache
def _mend() -> None:
    """Triton 3.9's interpreter cuts a float32 to make a bfloat16 of it, where a GPU rounds to the nearest."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    cut = builder.create_fp_trunc

    def truncate(x: Any, to: Any) -> Any:
        if (x.dtype.scalar.name, to.scalar.name) == ("fp32", "bf16"):
            return interpreter.TensorHandle(x.data.astype(jnp.bfloat16).view(np.uint16), to.scalar)
        return cut(x, to)

    builder.create_fp_trunc = truncate


def _unwritten(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """An output before it is written: no zeros, which a test could take for results."""
    size, itemsize = shape.shape[0], jnp.dtype(shape.dtype).itemsize
    return np.full(size * itemsize, 1 if shape.dtype == bool else 0xA5, np.uint8).view(shape.dtype)


class _Buffer:
    """A NumPy array as the interpreter wants its tensors, with the few methods of torch's that it calls."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.shape = array.shape
        self.dtype = f"torch.{array.dtype.name}"

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_Buffer":
        return self

    def cpu(self) -> "_Buffer":
        return self

    def new_empty(self, *_: Any, **__: Any) -> "_Buffer":
        return _Buffer(self.array[:0])

    def set_(self, storage: "_Buffer", *_: Any) -> None:
        self.array, self.shape = storage.array, storage.shape

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.shape

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def copy_(self, other: "_Buffer") -> None:
        """Nothing to copy back: `cpu` gave the array itself."""
