"""A program compiled in the background, beside the compilation or the run of another.

`jit` keeps what `lower(...).compile()` has made and takes it at the first call with the same types and shardings. So
only the waiting changes: a call with others, or under another JAX setting, compiles as it always did.
"""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import jax


class Ahead:
    """Starts compiling `program` for the types of `arguments`; their values are not read and may be donated."""

    def __init__(self, program: Any, arguments: Any, on_wait: Callable[[], Any] | None = None):
        self._on_wait = on_wait
        self._done: concurrent.futures.Future[None] = concurrent.futures.Future()
        like = jax.tree.map(_abstract, arguments)
        # Not a daemon: a compiler cut off by the end of the interpreter takes the process down with it (SIGABRT).
        threading.Thread(target=self._run, args=(program, like), name="compile-ahead", daemon=False).start()

    def _run(self, program: Any, like: Any) -> None:
        try:
            program.lower(*like).compile()
            self._done.set_result(None)
        except BaseException as error:  # belongs to the thread that needs the program
            self._done.set_exception(error)

    def wait(self) -> None:
        """Returns once the program is compiled; raises what its compilation raised."""
        if not self._done.done() and self._on_wait is not None:
            self._on_wait()
        self._done.result()


def _abstract(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x  # numpy: where it goes is left to the program, as in a call
    sharding = x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)
