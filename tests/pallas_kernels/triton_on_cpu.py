"""Triton for the tests that run its kernels by its interpreter: from the folder that `make gpu-compile` fills.

Import this before anything imports Triton, which reads TRITON_INTERPRET then, once for the whole process. Triton that is
installed goes first; the folder is appended, so that it hides nothing.
"""

import importlib
import importlib.util
import os
import sys

import pytest

from pallas_kernels import _triton
from tests.gpu_compile import deviceless

os.environ["TRITON_INTERPRET"] = "1"
if deviceless.triton_folder().is_dir():
    sys.path.append(str(deviceless.triton_folder()))

AVAILABLE = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not AVAILABLE,
    reason=f"Triton is not installed and not in {deviceless.triton_folder()}: make gpu-compile",
)


def both_kernels(op: str, function: str) -> pytest.MarkDecorator:
    """Runs a test with `kernel`: the function of an operation's pallas.py, and that of its triton.py."""
    pallas = getattr(importlib.import_module(f"pallas_kernels.{op}.pallas"), function)
    triton = pytest.param(_triton.twin(op, function), marks=needs_triton)
    return pytest.mark.parametrize("kernel", [pallas, triton], ids=["pallas", "triton"])
