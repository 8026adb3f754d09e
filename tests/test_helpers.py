"""The checks of tests/helpers.py can fail: on a value, a dtype, a shape, a structure and a bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.helpers import TOLERANCES, assert_bit_equal, assert_close, make_mesh


def test_eight_cpu_devices_and_strict_promotion():
    assert jax.device_count("cpu") == 8
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones(3) + jnp.ones((4, 3))


def test_assert_close_accepts_what_is_inside_the_tolerance():
    assert_close({"w": jnp.full((2,), 1.0 + 5e-7)}, {"w": np.ones((2,), np.float32)})
    assert_close(jnp.float32(1.0), np.float64(1.0), dtype=jnp.float32)
    assert_close(jnp.array([jnp.nan, jnp.inf]), jnp.array([jnp.nan, jnp.inf]))


def test_terms_widen_by_the_square_root():
    assert_close(jnp.float32(1 + 5e-6), jnp.float32(1.0), terms=100)
    with pytest.raises(AssertionError):
        assert_close(jnp.float32(1 + 5e-6), jnp.float32(1.0), terms=4)


@pytest.mark.parametrize(
    ("actual", "desired", "what"),
    [
        (np.float32(1.001), np.float32(1.0), "Not equal"),
        (np.float64(1.0), np.float32(1.0), "dtype is float64, must be float32"),
        (np.ones((1, 2)), np.ones((2,)), "shape is"),
        ({"a": np.ones(1)}, {"b": np.ones(1)}, "tree is"),
        (np.float32(np.nan), np.float32(1.0), "nan location mismatch"),
    ],
)
def test_assert_close_rejects(actual, desired, what):
    with pytest.raises(AssertionError, match=what):
        assert_close(actual, desired)


def test_exact_rejects_the_last_bit():
    one, next_up = np.float32(1.0), np.nextafter(np.float32(1.0), np.float32(2.0))
    assert_close(one, one, "exact")
    with pytest.raises(AssertionError):
        assert_close(next_up, one, "exact")


def test_bit_equal_tells_zeros_apart_and_names_the_leaf():
    zeros = {"layer": {"bias": jnp.array([1.0, 0.0])}}
    assert_bit_equal(zeros, {"layer": {"bias": np.array([1.0, 0.0], np.float32)}})
    with pytest.raises(AssertionError, match=r"\['layer'\]\['bias'\]: first unequal entry 1"):
        assert_bit_equal(zeros, {"layer": {"bias": jnp.array([1.0, -0.0])}})


def test_mesh_is_auto_and_of_the_asked_size():
    mesh = make_mesh(3, "worker")
    assert mesh.shape == {"worker": 3}
    assert mesh.axis_types == (AxisType.Auto,)
    with pytest.raises(ValueError, match="at most the 8 CPU devices"):
        make_mesh(9)


def test_only_exact_is_without_tolerance():
    assert [kind for kind, (rtol, atol) in TOLERANCES.items() if rtol == atol == 0.0] == ["exact"]
