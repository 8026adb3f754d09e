"""What must be equal on devices is compared: a single bit on one of them is found and named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from training._guard import Guard

ISLANDS = ((2, 3), ("worker", "data"))


def mesh_of(shape, names):
    count = int(np.prod(shape))
    return jax.make_mesh(
        shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=jax.devices()[:count]
    )


def placed(mesh, spec, values):
    """A global array whose part on device number i is values(i)."""
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    parts = [jax.device_put(values(i), device) for i, device in enumerate(mesh.devices.flat)]
    shape = sharding.shard_shape
    whole = tuple(
        n * int(np.prod([mesh.shape[a] for a in ((part,) if isinstance(part, str) else part or ())]))
        for n, part in zip(parts[0].shape, (*spec, *[None] * parts[0].ndim), strict=False)
    )
    assert shape(whole) == parts[0].shape
    return jax.make_array_from_single_device_arrays(whole, sharding, parts)


def flipped(x, bit=0):
    words = np.array(x, copy=True)
    words.view(np.uint8).reshape(-1)[0] ^= 1 << bit
    return words


X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, jnp.bfloat16])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_bit_on_one_device_is_named(dtype, bit):
    mesh, x = mesh_of((4,), ("data",)), X.astype(dtype)
    same = placed(mesh, (), lambda i: x)
    other = placed(mesh, (), lambda i: flipped(x, bit) if i == 2 else x)
    guard = Guard(mesh)
    assert guard.difference({"a": same, "layers": {"w": same}}) is None
    assert guard.difference({"a": same, "layers": {"w": other}}) == "layers/w differs on data 2"
    assert guard.difference({"a": other, "layers": {"w": same}}) == "a differs on data 2"


def test_two_that_changed_places_are_found():
    mesh = mesh_of((4,), ("data",))
    tree = {"w": placed(mesh, (), lambda i: X[::-1].copy() if i == 0 else X)}
    assert Guard(mesh).difference(tree) == "w differs on data 0"


def test_each_worker_may_have_its_own_but_an_island_is_one():
    mesh = mesh_of(*ISLANDS)
    own = lambda i: X[None] + i // 3  # noqa: E731
    parts = placed(mesh, ("worker", "data"), lambda i: np.full((1, 1, 4), i, np.float32))
    assert Guard(mesh).difference([placed(mesh, ("worker",), own), parts, jnp.zeros((0, 3))]) is None
    broken = placed(mesh, ("worker",), lambda i: flipped(own(i)) if i == 4 else own(i))
    assert Guard(mesh).difference([broken, parts]) == "0 differs on worker 1 data 1"


def test_an_empty_and_a_nan_are_equal_to_themselves():
    mesh = mesh_of((2,), ("data",))
    tree = [
        placed(mesh, (), lambda i: np.full(3, np.nan, np.float32)),
        placed(mesh, (), lambda i: np.zeros((0, 2), np.float32)),
    ]
    assert Guard(mesh).difference(tree) is None
