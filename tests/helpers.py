"""Shared tools of the tests: one table of tolerances, closeness checks that include the dtype, CPU meshes."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


class Tolerance(NamedTuple):
    """Largest accepted |actual - desired| is atol + rtol * |desired|."""

    rtol: float
    atol: float


# Every tolerance of the suite. A new kind is a new row with its reason; loosening one needs a sentence in the
# commit.
TOLERANCES = {
    # masks, indices, permutations, byte counts, identities of the algorithm
    "exact": Tolerance(0.0, 0.0),
    # one float32 operation; `terms=n` is for a sum of n terms, which grows the error by sqrt(n)
    "f32": Tolerance(1e-6, 1e-7),
    # 20 optimizer steps in float32 against the float64 reference
    "params": Tolerance(1e-5, 1e-6),
    # losses and gradients of a whole model in float32: thousands of operations in another order
    "model": Tolerance(1e-4, 1e-5),
    # values rounded to bfloat16 (8 bits of mantissa) on the way, once
    "bf16": Tolerance(8e-3, 1e-4),
    # optimizer steps whose payload is rounded to bfloat16 in every exchange
    "bf16_payload": Tolerance(3e-2, 3e-3),
}


def assert_close(actual: Any, desired: Any, kind: str = "f32", *, terms: int = 1, dtype: Any = None) -> None:
    """Checks two pytrees: structure, shapes, dtypes, then values within `TOLERANCES[kind]`.

    `dtype` is what `actual` must have where that is not the dtype of `desired`: float32 results are compared
    with a float64 reference by `dtype=jnp.float32`. NaN equals NaN and infinities equal themselves.
    """
    rtol, atol = TOLERANCES[kind]
    scale = math.sqrt(terms)
    for path, got, want in _paired_leaves(actual, desired):
        expected_dtype = want.dtype if dtype is None else np.dtype(dtype)
        assert got.dtype == expected_dtype, f"{path}: dtype is {got.dtype}, must be {expected_dtype}"
        assert got.shape == want.shape, f"{path}: shape is {got.shape}, must be {want.shape}"
        if rtol == atol == 0.0:
            np.testing.assert_array_equal(got, want, err_msg=path)
        else:
            np.testing.assert_allclose(
                got.astype(np.float64), want.astype(np.float64), rtol * scale, atol * scale, err_msg=path
            )


def assert_bit_equal(actual: Any, desired: Any) -> None:
    """Checks that two pytrees hold the same bits, so -0.0 differs from 0.0 and a NaN from another NaN."""
    for path, got, want in _paired_leaves(actual, desired):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), (
            f"{path}: {got.dtype}{got.shape} {want.dtype}{want.shape}"
        )
        if got.tobytes() != want.tobytes():
            unequal = np.frombuffer(got.tobytes(), np.uint8) != np.frombuffer(want.tobytes(), np.uint8)
            entry = int(np.argmax(unequal)) // got.dtype.itemsize
            raise AssertionError(
                f"{path}: first unequal entry {entry}: {got.flat[entry]!r}, must be {want.flat[entry]!r}"
            )


def make_mesh(workers: int, axis_name: str = "data") -> Mesh:
    """A mesh of the first `workers` CPU devices along one axis of type Auto."""
    devices = jax.devices("cpu")
    if len(devices) < workers:
        raise ValueError(
            f"workers must be at most the {len(devices)} CPU devices of tests/conftest.py, got {workers}"
        )
    return Mesh(np.array(devices[:workers]), (axis_name,), axis_types=(AxisType.Auto,))


def _paired_leaves(actual: Any, desired: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    got, got_tree = jax.tree_util.tree_flatten_with_path(actual)
    want, want_tree = jax.tree_util.tree_flatten_with_path(desired)
    assert got_tree == want_tree, f"tree is {got_tree}, must be {want_tree}"
    return [
        (jax.tree_util.keystr(path) or "value", np.asarray(a), np.asarray(b))
        for (path, a), (_, b) in zip(got, want, strict=True)
    ]
