"""Devices: virtual ones are made while that is possible, and a clear error comes where it is not."""

import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

from tests.training.runs_for_tests import environment
from training.mesh import AXIS_NAME, make_mesh, prepare_devices

IN_A_FRESH_PROCESS = """
import jax
from training.mesh import make_mesh, prepare_devices
prepare_devices(3, "cpu")
assert len(jax.devices()) == 3, jax.devices()
assert make_mesh(2).devices.tolist() == jax.devices()[:2]
prepare_devices(2)
try:
    prepare_devices(5)
except ValueError as error:
    print(error)
"""


def test_virtual_devices_of_a_fresh_process():
    ended = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
    assert "mesh.data = 5 needs 5 devices, this process has 3 (cpu). JAX had already started" in ended.stdout


def test_missing_platform_is_named():
    with pytest.raises(ValueError, match=r"mesh.platform = gpu, but JAX runs on cpu. Install jax\[cuda\]"):
        prepare_devices(1, "gpu")


def test_mesh_has_auto_axes():
    mesh = make_mesh(4)
    assert mesh.axis_names == (AXIS_NAME,) and mesh.devices.tolist() == jax.devices()[:4]
    assert mesh.axis_types == (AxisType.Auto,)
    prepare_devices(8, "cpu")  # already there: nothing to do
    with pytest.raises(ValueError, match=r"mesh.data = 9 needs 9 devices, this process has 8"):
        make_mesh(9)
