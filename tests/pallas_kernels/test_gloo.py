"""What stands for lax.ppermute and lax.all_to_all on CPUs: the same results to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import gloo


def over_workers(function, num_workers, *args):
    mesh = jax.make_mesh(
        (num_workers,), ("w",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_workers]
    )
    one = lambda *given: jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], given)))  # noqa: E731
    mapped = jax.shard_map(one, mesh=mesh, in_specs=P("w"), out_specs=P("w"), check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*args))


def values(num_workers, *shape, dtype="float32"):
    """With bits that arithmetic would change: NaN with a payload, a negative zero, a denormal number."""
    x = np.random.default_rng(0).integers(
        0, 2**8, (num_workers, int(np.prod(shape)) * np.dtype(dtype).itemsize), np.uint8
    )
    x = x.view(dtype).reshape(num_workers, *shape)
    if dtype == "float32":
        x.reshape(num_workers, -1)[:, :3] = np.array([0x7FC12345, 0x80000000, 1], np.uint32).view(np.float32)
    return x


def assert_same_bits(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("num_workers", [2, 4, 6, 8])
@pytest.mark.parametrize(("dtype", "shape"), [("uint16", (5,)), ("float32", (3, 2)), ("int8", (7,))])
def test_all_to_all(num_workers, dtype, shape):
    x = values(num_workers, num_workers, *shape, dtype=dtype)
    found = over_workers(lambda x: gloo.all_to_all(x, "w", num_workers), num_workers, x)
    assert_same_bits(found, over_workers(lambda x: lax.all_to_all(x, "w", 0, 0), num_workers, x))
    assert_same_bits(found, np.swapaxes(x, 0, 1))


@pytest.mark.parametrize("num_workers", [2, 4, 6, 10, 64])
def test_a_tournament_lets_everyone_meet_once(num_workers):
    rounds = gloo.tournament(num_workers)
    assert len(rounds) == num_workers - 1
    assert all(sorted(sum(pairs, ())) == list(range(num_workers)) for pairs in rounds)
    assert len({pair for pairs in rounds for pair in pairs}) == num_workers * (num_workers - 1) // 2


@pytest.mark.parametrize(
    "messages",
    [
        (((0, 1), (1, 2), (2, 0)), ((0, 2), (2, 1), (1, 0))),  # both neighbours of a ring
        (((0, 1), (1, 0)),),  # the third has none
        (((2, 0),), ((0, 2), (1, 0), (2, 1)), ((0, 1),)),
    ],
)
def test_permutations_in_turn(messages):
    tree = {"a": values(3, 2, 3), "b": (values(3, 5, dtype="int8"), values(3, 1, dtype="uint16"))}
    found = over_workers(lambda tree: gloo.permute_in_turn(tree, "w", messages), 3, tree)
    plain = lambda tree: tuple(  # noqa: E731
        jax.tree.map(lambda x, m=m: lax.ppermute(x, "w", m), tree) for m in messages
    )
    assert_same_bits(found, over_workers(plain, 3, tree))


def test_swaps_in_turn():
    """A ring of four: both neighbours at once, each by the matching that holds the pair."""
    tree, ring = (values(4, 3), values(4, 5, dtype="int8")), [(0, 2), (2, 1), (1, 3), (3, 0)]
    messages = (tuple(ring), tuple((b, a) for a, b in ring))
    matchings, brought = (((0, 2), (1, 3)), ((1, 2), (0, 3))), np.array([[1, 1, 0, 0], [0, 0, 1, 1]])
    found = over_workers(lambda tree: gloo.swap_in_turn(tree, "w", matchings, brought), 4, tree)
    assert_same_bits(found, over_workers(lambda tree: gloo.permute_in_turn(tree, "w", messages), 4, tree))


def test_a_message_waits_for_the_last_one():
    """Both at a time are what gloo is slow at; XLA must not see through the dependence."""
    mesh = jax.make_mesh((3,), ("w",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    ring = (((0, 1), (1, 2), (2, 0)), ((0, 2), (2, 1), (1, 0)))
    program = jax.jit(
        jax.shard_map(
            lambda x: gloo.permute_in_turn(x, "w", ring),
            mesh=mesh,
            in_specs=P("w"),
            out_specs=P("w"),
            check_vma=False,
        )
    )
    text = program.lower(jax.ShapeDtypeStruct((30,), jnp.float32)).compile().as_text()
    lines = {line.split(" = ")[0].strip(): line for line in text.splitlines() if " = " in line}
    permutes = [name for name, line in lines.items() if "collective-permute(" in line]
    assert len(permutes) == 2
    first, second = permutes

    def needs(name, seen):
        if name in seen:
            return
        seen.add(name)
        for word in (
            lines.get(name, " = ")
            .split(" = ", 1)[1]
            .replace("(", " ")
            .replace(")", " ")
            .replace(",", " ")
            .split()
        ):
            needs(word, seen)

    found: set[str] = set()
    needs(second, found)
    other: set[str] = set()
    needs(first, other)
    assert (first in found) != (second in other)


@pytest.mark.parametrize("size", [0, 1, 5, 8])
@pytest.mark.parametrize("dtype", ["float32", "uint16", "int8"])
def test_bits_survive_as_words(size, dtype):
    x = np.random.default_rng(size).integers(-128, 127, size).astype(dtype)
    words = gloo.as_words(jnp.asarray(x))
    assert words.dtype == jnp.uint32 and words.size == -(-x.nbytes // 4)
    found = gloo.from_words(words, x)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, x)
