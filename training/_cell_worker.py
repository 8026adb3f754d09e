"""A process that runs cells of a notebook, for training/notebook.py: `python -m training._cell_worker`.

It joins the launcher's group, then takes lines of JSON on its standard input: {"number": n, "run": source} runs a cell in
one lasting namespace, {"number": n, "fetch": expression} gives a value back. Each is answered by {"number": n, "error": text
or null, "value": what `encode` made}; all other lines are what the cell printed.
"""

from __future__ import annotations

import ast
import base64
import io
import linecache
import os
import signal
import sys
import traceback
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from training.distributed import join
from training.workers import answer, commands


def encode(value: Any) -> Any:
    """Plain JSON of numbers, strings, None, arrays, and lists, tuples and dicts of them; of a global array the own part.

    Raises:
      TypeError: it holds something else.
    """
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = value.addressable_data(0)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind == "V":  # bfloat16 and narrower, which files of NumPy do not know
            array = array.astype(np.float32)
        file = io.BytesIO()
        np.save(file, array, allow_pickle=False)
        return {"npy": base64.b64encode(file.getvalue()).decode()}
    if isinstance(value, dict):
        return {"dict": {str(key): encode(one) for key, one in value.items()}}
    if isinstance(value, list | tuple):
        return [encode(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a value must be made of arrays, numbers and strings, got {type(value).__name__}. Fetch a part of it."
    )


def decode(value: Any) -> Any:
    """What `encode` was given; tuples come as lists, arrays of JAX as NumPy's."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "npy" in value:
        return np.load(io.BytesIO(base64.b64decode(value["npy"])), allow_pickle=False)
    return {key: decode(one) for key, one in value["dict"].items()}


class _Cells:
    """Runs cells one after the other; an interrupt ends the cell, never the process."""

    def __init__(self) -> None:
        self._running = False
        module = types.ModuleType("cells")  # what is defined in a cell has a module, as dataclasses want it
        sys.modules["cells"] = module
        self.names = vars(module)
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: Any) -> None:
        if self._running:
            raise KeyboardInterrupt

    def do(self, command: dict[str, Any]) -> tuple[str | None, Any]:
        """(traceback or None, value)."""
        try:
            self._running = True
            if "fetch" in command:
                return None, encode(eval(command["fetch"], self.names))
            self._run(command["run"], f"<%%workers cell {command['number']}>")
            return None, None
        except BaseException as error:  # SystemExit too: the others may be waiting for this process
            self._running = False
            return self._text(error), None
        finally:
            self._running = False

    def _run(self, source: str, name: str) -> None:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self.names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), self.names)
            if value is not None:
                print(repr(value))

    def _text(self, error: BaseException) -> str:
        """The traceback from the cell on."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def main() -> None:
    sys.stderr.flush()
    os.dup2(1, 2)  # one stream, so that all lines come in order
    join(timeout_secs=60.0)
    cells = _Cells()
    cells.names |= {"jax": jax, "jnp": jnp, "np": np}
    cells.names |= {"worker": jax.process_index(), "workers": jax.process_count()}
    multihost_utils.sync_global_devices("the first cell")  # the transport greets its peers now
    answer(number=0, error=None, value=None)
    for command in commands():
        error, value = cells.do(command)
        answer(number=command["number"], error=error, value=value)


if __name__ == "__main__":
    main()
