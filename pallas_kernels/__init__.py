"""Hot loops of the optimizers, one folder an operation (SCAPE, arXiv 2607.01678, section 4).

An operation's `reference.py` is its plain-JAX form: it runs on every device and is what a kernel is tested against.
`pallas.py` is a GPU kernel, written in Pallas for its Triton backend; `triton.py`, of the operations in the middle of a
step, the same in Triton itself, called through jax-triton (the extra `cuda`), for the time when that backend is gone. The
operations that have one take `implementation`: None is Pallas' kernel in a program that is lowered for CUDA, where it
supports the shape and dtype, and the reference elsewhere; "xla", "pallas" and "triton" name one, which then runs or raises
NotImplementedError. Under `jax.shard_map` kernels see a worker's own arrays; XLA cannot divide one over devices by itself.
"""

from pallas_kernels._dispatch import IMPLEMENTATIONS, divided_by_xla
from pallas_kernels._rows import MAX_KERNEL_BLOCK

__all__ = ["IMPLEMENTATIONS", "MAX_KERNEL_BLOCK", "divided_by_xla"]
