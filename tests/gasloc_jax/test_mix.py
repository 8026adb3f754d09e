"""The exchange on real devices against its matrix; compressed payloads keep the mean and forget nothing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gasloc_jax as gj
from gasloc_jax import _mix
from gasloc_jax._mix import Mixer
from gasloc_jax._worker_round import with_axis, without_axis
from tests.gasloc_jax.side_by_side import make_mesh, mesh_of
from tests.helpers import assert_close
from tests.quick_compile import quickest_compile  # noqa: F401

ASYMMETRIC = np.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]])
TOPOLOGIES = {
    "random_pairs": gj.random_pairs(seed=1),
    "random_ring": gj.random_ring(seed=1, pool=5),
    "ring": gj.ring(),
    "exponential": gj.exponential(),
    "complete": gj.complete(),
    "mixing_matrix": gj.mixing_matrix(ASYMMETRIC),
}
PAYLOADS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8}


@pytest.fixture(autouse=True)
def _two_large_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tree below, "a" and "c" travel by themselves; all other files test trees that travel as one piece."""
    monkeypatch.setattr(_mix, "SMALL", 32)


def pieces(tree: dict[str, Any]) -> list[np.ndarray]:
    """What a worker's tree travels as."""
    flat = {k: np.asarray(x).reshape(-1) for k, x in tree.items()}
    return [flat["a"], flat["c"], np.concatenate([flat["b"], flat["none"]])]


def make_tree(num_workers: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Leaves (W, ...) that do not fill a block, one empty."""
    rng = np.random.default_rng(seed)
    shapes = {"a": (5, 7), "b": (), "none": (0, 4), "c": (300,)}
    return {k: rng.standard_normal((num_workers, *s)).astype(np.float32) for k, s in shapes.items()}


class Mixing:
    """A mixer under shard_map with global arrays: (tree, residual, round) -> (tree, residual), and the mean."""

    def __init__(self, topology: Any, num_workers: int, payload: str = "float32", island: int = 1):
        mesh = make_mesh(num_workers, island)
        self.mixer = Mixer(
            topology, "worker", gj.make_payload(PAYLOADS[payload], 32), "data" if island > 1 else None
        )
        own, devices = P("worker"), P("worker", "data") if island > 1 else P("worker")
        mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

        def local(fn):
            def call(tree, residual, *round):
                # The residual has an axis for the workers in front of its own.
                tree, residual = jax.tree.map(lambda x: x[0], (tree, residual))
                out, residual = fn(tree, residual, *round)
                return jax.tree.map(lambda x: x[None], (out, residual))

            return call

        specs = (own, devices)
        self.init = jax.jit(
            mapped(
                lambda tree: jax.tree.map(
                    lambda x: x[None], self.mixer.init(jax.tree.map(lambda x: x[0], tree))
                ),
                in_specs=(own,),
                out_specs=devices,
            )
        )
        self.mix = jax.jit(mapped(local(self.mixer.mix), in_specs=(*specs, P()), out_specs=specs))
        self.mean = jax.jit(mapped(local(self.mixer.mean), in_specs=specs, out_specs=specs))


def by_matrix(matrix: np.ndarray, tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k: np.tensordot(matrix, x.astype(np.float64), 1) for k, x in tree.items()}


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [(n, w) for n in TOPOLOGIES if n != "mixing_matrix" for w in (1, 2, 3, 8)] + [("mixing_matrix", 3)],
)
def test_mixing_is_the_matrix_of_the_round(name, num_workers):
    mixing, pool = Mixing(TOPOLOGIES[name], num_workers), TOPOLOGIES[name].build(num_workers)
    tree = make_tree(num_workers)
    for t in range(4):
        mixed, residual = mixing.mix(tree, None, jnp.int32(t))
        assert residual is None
        assert_close(mixed, by_matrix(pool.matrix(t), tree), "f32", terms=num_workers, dtype=jnp.float32)


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize(
    ("name", "num_workers"), [("random_pairs", 3), ("random_pairs", 4), ("random_ring", 5)]
)
def test_mixing_keeps_the_mean(name, num_workers, payload):
    """Also compressed, to the rounding of float32: an error of one part in 127 would show at once."""
    mixing, tree = Mixing(TOPOLOGIES[name], num_workers, payload), make_tree(num_workers)
    residual = mixing.init(tree)
    for t in range(5):
        mixed, residual = mixing.mix(tree, residual, jnp.int32(t))
        mixed = jax.tree.map(np.asarray, mixed)
        if payload != "float32":
            exact = by_matrix(TOPOLOGIES[name].build(num_workers).matrix(t), tree)
            assert any((np.abs(exact[k] - mixed[k]) > 1e-4).any() for k in exact), "nothing was compressed"
        for k, x in tree.items():
            np.testing.assert_allclose(mixed[k].sum(0), x.sum(0), atol=3e-6)
        tree = mixed


def test_idle_worker_keeps_its_value():
    """Case 10: three workers with 0, 3, 6; a missing message arrives as zeros and must not count."""
    values = {"x": np.array([0.0, 3.0, 6.0], np.float32)}
    pool = gj.random_pairs(seed=1).build(3)
    for payload in PAYLOADS:
        mixing = Mixing(gj.random_pairs(seed=1), 3, payload)
        for t in range(6):
            mixed, residual = mixing.mix(values, mixing.init(values), jnp.int32(t))
            idle = int(np.argmax(pool.graph(t).self_weights))
            got = np.asarray(mixed["x"])
            if payload == "float32":
                pair = [n for n in range(3) if n != idle]
                assert got[pair].tolist() == [values["x"][pair].mean()] * 2
            assert got[idle] == values["x"][idle]
            assert got.sum() == pytest.approx(9.0)
            if residual is not None:
                assert not any(np.asarray(e)[idle].any() for e in residual), "the idle worker owes nothing"


@pytest.mark.parametrize("payload", ["bfloat16", "int8"])
def test_what_is_lost_is_said_later(payload):
    """Error feedback: what a peer heard of a constant value over many rounds averages to the value itself."""
    mixing, tree = Mixing(gj.ring(), 3, payload), make_tree(3)
    residual, exact = mixing.init(tree), by_matrix(gj.ring().build(3).matrix(0), tree)
    once, mean = None, {k: np.zeros(x.shape) for k, x in tree.items()}
    for t in range(64):
        mixed, residual = mixing.mix(tree, residual, jnp.int32(t))
        once = jax.tree.map(np.asarray, mixed) if once is None else once
        mean = {k: mean[k] + np.asarray(mixed[k]) / 64 for k in mean}
    error = lambda x: max(np.abs(x[k] - exact[k]).max() for k in ("a", "b", "c"))  # noqa: E731
    assert error(mean) < 0.1 * error(once)


@pytest.mark.parametrize("payload", ["bfloat16", "int8"])
def test_compressed_mean_forgets_nothing(payload):
    """The sum of the means plus what all still owe is the sum of what was given: both roundings feed back."""
    workers, rounds = 3, 20
    mixing = Mixing(gj.complete(), workers, payload)
    given = {k: np.zeros(x.shape[1:]) for k, x in make_tree(workers).items()}
    told, residual = {k: x.copy() for k, x in given.items()}, mixing.init(make_tree(workers))
    for t in range(rounds):
        tree = make_tree(workers, seed=t)
        mean, residual = mixing.mean(tree, residual)
        for k in given:
            rows = np.asarray(mean[k])
            assert {rows[n].tobytes() for n in range(workers)} == {rows[0].tobytes()}
            given[k] += tree[k].mean(0)
            told[k] += rows[0]
    assert len(residual) == 3
    for told_piece, given_piece, e in zip(pieces(told), pieces(given), residual, strict=True):
        owed = np.asarray(e).reshape(workers, -1).mean(axis=0)
        np.testing.assert_allclose(told_piece + owed[: told_piece.size], given_piece, atol=2e-5)
        assert not owed[told_piece.size :].any()
    assert np.abs(np.asarray(residual[1])).max() > 1e-4, "nothing was owed: this would test float32"


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("name", ["random_pairs", "complete"])
def test_devices_of_an_island_send_a_part_each(name, payload):
    """Two devices a worker: the same mix as one, and the message over the worker axis has half the entries."""
    whole, parts = Mixing(TOPOLOGIES[name], 3, payload), Mixing(TOPOLOGIES[name], 3, payload, island=2)
    tree = make_tree(3)
    results = []
    for mixing in (whole, parts):
        residual = mixing.init(tree)
        for t in range(3):
            if name == "complete":
                mixed, residual = mixing.mean(tree, residual)
            else:
                mixed, residual = mixing.mix(tree, residual, jnp.int32(t))
        results.append(mixed)
    if payload == "float32":
        assert_close(results[1], results[0], "f32", terms=4)
    for k in (
        "a",
        "b",
        "c",
    ):  # blocks begin elsewhere in a part: up to one step of int8 in each of two roundings
        step = np.abs(tree[k]).max() / 127
        np.testing.assert_allclose(results[1][k], results[0][k], atol=2 * step)


def sent_bytes(fn: Any, *args: Any, branch: int = 0) -> dict[str, int]:
    """Operand bytes of each kind of collective over the workers, of one branch of a switch: the first is a CPU's."""
    found: dict[str, int] = {}

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
            if "worker" in ((axes,) if isinstance(axes, str) else axes) and name != "axis_index":
                nbytes = sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
                found[name] = found.get(name, 0) + nbytes
            for key, value in eqn.params.items():
                subs = value if isinstance(value, tuple | list) else (value,)
                for sub in (subs[branch],) if key == "branches" else subs:
                    inner = getattr(sub, "jaxpr", sub)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("name", ["random_pairs", "random_ring", "ring"])
def test_bytes_are_those_of_the_closed_form(name, payload):
    """Operands in the traced program; bfloat16 travels as uint16, so that no backend widens it."""
    sizes = [x.size for x in pieces({k: x[0] for k, x in make_tree(1).items()})]
    for island in (1, 1 if name == "ring" else 2):
        mixing = Mixing(TOPOLOGIES[name], 8 // island, payload, island)
        pool = TOPOLOGIES[name].build(8 // island)
        tree = make_tree(8 // island)
        on_cpu, found = (
            sent_bytes(mixing.mix, tree, mixing.init(tree), jnp.int32(0), branch=branch) for branch in (0, -1)
        )
        closed = sum(pool.bytes_per_round(size, mixing.mixer.payload) for size in sizes)
        padding = (
            36 * len(sizes) * len(pool.graphs[0].messages)
        )  # a block at most, for each piece of a message
        if island == 1:
            padding = 0
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
            outer = gj.gasloc(
                topology=TOPOLOGIES[name], payload_dtype=PAYLOADS[payload], payload_block_size=32
            )
            assert outer.bytes_per_round(shapes, 8) == closed
        assert set(found) == {"ppermute"}
        # On CPUs in whole words; an all-reduce of two sends what it is given, once.
        (kind, sent), words = *on_cpu.items(), 3 * 2 * len(sizes) * len(pool.graphs[0].messages)
        assert kind == "psum"  # of pairs, and of the two sets of pairs that a ring of even length is
        assert 0 <= sent - found["ppermute"] <= words
        assert 0 <= island * found["ppermute"] - closed <= padding


@pytest.mark.parametrize("payload", PAYLOADS)
def test_pairs_swap_what_messages_would_bring(payload):
    """On CPUs a pair is joined by an all-reduce, where types say what varies by messages: the same to the bit."""
    mesh, mixing = mesh_of((4,), ("worker",)), Mixing(TOPOLOGIES["random_pairs"], 4, payload)
    tree = make_tree(4)
    tree["a"][:, 0, 0] = [-0.0, 1e-40, 3e38, 1.0]
    programs, results = [], []
    for typed in (False, True):
        mix = lambda *given: with_axis(mixing.mixer.mix(*without_axis(given), jnp.int32(1)))  # noqa: E731
        given = (tree, mixing.init(tree))
        specs = {"in_specs": P("worker"), "out_specs": P("worker"), "check_vma": typed}
        program = jax.jit(jax.shard_map(mix, mesh=mesh, **specs))
        results.append(program(*given))
        programs.append(program.lower(*given).compile().as_text())
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert ["all-reduce(" in text for text in programs] == [True, False]
    assert ["collective-permute(" in text for text in programs] == [False, True]


@pytest.mark.parametrize("payload", ["bfloat16", "int8"])
def test_bytes_of_the_compressed_mean(payload):
    tree = make_tree(4)
    mixing = Mixing(gj.complete(), 4, payload)
    found = sent_bytes(mixing.mean, tree, mixing.init(tree), branch=-1)
    sizes = [x[0].size for x in (tree["a"], tree["c"])] + [1]
    # Of the all-to-all's operand one part of four stays; the all-gather's is sent to three.
    sent = found["all_to_all"] * 3 // 4 + found["all_gather"] * 3
    pool = gj.complete().build(4)
    assert sent == sum(pool.bytes_per_round(size, mixing.mixer.payload) for size in sizes)


def test_two_mesh_axes_do_not_mix_islands():
    """The exchange over `worker` leaves the other axis alone: values differ between the two devices of an island."""
    mesh = mesh_of((2, 2), ("worker", "data"))
    mixer = Mixer(gj.random_pairs(), "worker", gj.make_payload(None))
    fn = jax.shard_map(
        lambda x: mixer.mix(x, None, jnp.int32(0))[0],
        mesh=mesh,
        in_specs=P("worker", "data"),
        out_specs=P("worker", "data"),
        check_vma=False,
    )
    got = jax.jit(fn)(jnp.array([[0.0, 10.0], [2.0, 20.0]]))
    assert got.tolist() == [[1.0, 15.0], [1.0, 15.0]]


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize(
    "make",
    [gj.gasloc, gj.nesterov_gossip, functools.partial(gj.nesterov_gossip, momentum="local"), gj.noloco],
    ids=["gasloc", "mixed", "local", "noloco"],
)
def test_bytes_of_the_complete_graph(make, payload):
    """Forms that mix unequal values send compressed ones to each worker: what they say they send is what they send."""
    outer = make(
        topology=gj.complete(),
        axis_name="worker",
        payload_dtype=PAYLOADS[payload],
        payload_block_size=32,
    )
    params = {k: x[0] for k, x in make_tree(1).items()}

    def step(params):
        return outer.update(params, outer.init(params), params)[0]

    mapped = jax.shard_map(step, mesh=make_mesh(4), in_specs=P(), out_specs=P(), check_vma=False)
    found = sent_bytes(mapped, params, branch=-1)
    sent = (
        found.get("ppermute", 0)
        + sum(n for name, n in found.items() if name.startswith("psum")) * 2 * 3 // 4
        + found.get("all_to_all", 0) * 3 // 4
        + found.get("all_gather", 0) * 3
    )
    closed = outer.bytes_per_round(params, 4)
    # An all-reduce of float32 is counted with each piece cut into equal parts.
    assert 0 <= closed - sent <= (2 * 3 * 4 * 6 if payload == "float32" else 0)
