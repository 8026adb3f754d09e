"""Streaming: fragments dealt by layer, and exchanges that arrive late, against masks and float64 in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gasloc_jax as gj
from gasloc_jax import reference as ref
from gasloc_jax._fragments import Fragments
from tests.gasloc_jax.side_by_side import (
    SHAPES,
    gradient_of,
    make_batches,
    make_params,
    make_round,
    on_host,
    stacked,
    start_workers,
)
from tests.helpers import assert_bit_equal, assert_close
from tests.quick_compile import quickest_compile  # noqa: F401


def masks(count: int) -> list[dict[str, np.ndarray]]:
    """Layers f, f + F, ..; of other leaves the f-th of F runs of rows."""
    out = []
    for f in range(count):
        fragment = {}
        for path, shape in SHAPES.items():
            size = shape[0] if shape else 1
            rows = np.arange(size)
            share = -(-size // count)
            on = rows % count == f if path.startswith("layers") else rows // share == f
            fragment[path] = np.broadcast_to(
                on.reshape(-1, *[1] * (len(shape) - 1)) if shape else on[0], shape
            )
        out.append(fragment)
    return out


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fragments_partition_the_model(count):
    """Each entry belongs to exactly one fragment, and putting back what was taken changes nothing else."""
    fragments = Fragments(count)
    params = jax.tree.map(jnp.asarray, make_params())
    seen = {path: np.zeros(shape, int) for path, shape in SHAPES.items()}
    for f, mask in enumerate(masks(count)):
        taken = jax.jit(fragments.take)(params, jnp.int32(f))
        put = fragments.put(params, jax.tree.map(lambda x: jnp.full_like(x, 7.0), taken), jnp.int32(f))
        for path, on in mask.items():
            np.testing.assert_array_equal(put[path], np.where(on, 7.0, params[path]))
            seen[path] += on
        assert_bit_equal(fragments.put(params, taken, jnp.int32(f)), params)
    assert all((times == 1).all() for times in seen.values())


def test_fragments_have_near_equal_bytes():
    """Of a model of 12 layers whose embedding is larger than a layer: all within a layer of the F-th part."""
    params = {
        "embed": jax.ShapeDtypeStruct((1000, 16), jnp.float32),
        "layers": {
            "kernel": jax.ShapeDtypeStruct((12, 16, 64), jnp.float32),
            "bias": jax.ShapeDtypeStruct((12, 64), jnp.float32),
        },
    }
    size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
    for count in (2, 4, 5, 12):
        part = jax.eval_shape(Fragments(count).take, params, jnp.int32(0))
        assert 0 <= size(part) - size(params) / count <= 16 * 64 + 64 + 16
    round = gj.make_round(
        gj.make_local_step(lambda p, b: 0.0, optax.sgd(0.1)),
        gj.gasloc(axis_name="worker"),
        gj.make_mesh(8),
        fragments=4,
    )
    assert round.wire_bytes(params) == size(params)  # 4 bytes an entry, a quarter of the entries


# name -> (fragments, delay, local steps, outer of JAX, outer of the reference)
PAIRS = functools.partial(gj.gasloc, axis_name="worker")
STREAMS = {
    "fragments": (2, 0, [3, 1, 2, 3], PAIRS, lambda: ref.Optax(lambda: ref.Sgd(0.7, 0.9, True), 4)),
    "fragments of one layer": (3, 0, 2, PAIRS, lambda: ref.Optax(lambda: ref.Sgd(0.7, 0.9, True), 4)),
    "delay": (1, 2, [3, 4, 3, 4], PAIRS, lambda: ref.Optax(lambda: ref.Sgd(0.7, 0.9, True), 4)),
    "fragments and delay": (2, 1, [3, 2, 4, 3], PAIRS, lambda: ref.Optax(lambda: ref.Sgd(0.7, 0.9, True), 4)),
    "explicit form": (
        2,
        1,
        3,
        lambda: gj.nesterov_gossip(axis_name="worker"),
        lambda: ref.NesterovGossip(0.7, 0.9, "mixed"),
    ),
    # As many graphs as fragments: by the round alone each fragment would meet over the same graph for ever.
    "graphs in turn": (
        2,
        0,
        2,
        lambda: gj.gasloc(topology=gj.exponential(), axis_name="worker"),
        lambda: ref.Optax(lambda: ref.Sgd(0.7, 0.9, True), 4),
    ),
    "explicit form in turn": (
        2,
        1,
        3,
        lambda: gj.nesterov_gossip(topology=gj.exponential(), axis_name="worker"),
        lambda: ref.NesterovGossip(0.7, 0.9, "mixed"),
    ),
    "noloco in turn": (
        2,
        0,
        2,
        lambda: gj.noloco(topology=gj.exponential(), axis_name="worker"),
        lambda: ref.NoLoCo(0.7, 0.5, 0.7),
    ),
    "noloco": (2, 0, 3, lambda: gj.noloco(axis_name="worker"), lambda: ref.NoLoCo(0.7, 0.5, 0.7)),
    "diloco": (
        3,
        1,
        3,
        lambda: gj.diloco(axis_name="worker"),
        lambda: ref.Optax(lambda: ref.Sgd(0.7, 0.9, True), 4),
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_ten_rounds_of_streaming(name):
    count, delay, steps, make_outer, make_reference = STREAMS[name]
    outer = make_outer()
    round = make_round(outer, 4, optax.sgd(0.05, momentum=0.5), fragments=count, delay=delay)
    workers = start_workers(
        4,
        lambda: ref.Sgd(0.05, 0.5),
        [make_reference() for _ in range(count)],
        fragments=masks(count),
        delay=delay,
    )
    state, pool = round.init(make_params()), outer.pool(4)
    for t in range(10):
        batches = make_batches(4, 4, seed=t)
        state, _ = round(state, batches, steps)
        matrix = pool.matrix(t // count if pool.in_turn else t)
        workers.round(gradient_of(batches), matrix, [steps] * 4 if isinstance(steps, int) else steps)
        for got, want in ((state.params, workers.params), (state.anchor, workers.anchors)):
            assert_close(on_host(got), stacked(want), "params", terms=t + 1, dtype=jnp.float32)
    assert round._programs["round"]._cache_size() == 1


def test_only_the_fragment_moves_and_only_its_outer_state():
    round = make_round(gj.gasloc(axis_name="worker"), 4, optax.sgd(0.05), fragments=2)
    state = round.init(make_params())
    for t in range(4):
        before = on_host(state)
        state, _ = round(state, make_batches(4, 2, seed=t), 2)
        on = masks(2)[t % 2]
        for path in SHAPES:
            moved = np.asarray(state.anchor[path]) != before.anchor[path]
            np.testing.assert_array_equal(moved, np.broadcast_to(on[path], moved.shape))
        for old, new in zip(jax.tree.leaves(before.outer), jax.tree.leaves(state.outer), strict=True):
            np.testing.assert_array_equal(old[:, 1 - t % 2], np.asarray(new)[:, 1 - t % 2])
    assert np.asarray(state.outer.round).tolist() == [[2, 2]] * 4


@pytest.mark.parametrize(("fragments", "delay"), [(2, 0), (1, 1), (3, 2)])
def test_halves_equal_the_round(fragments, delay):
    """With a delay the exchange comes first; compressed, so that residuals of fragments are in it."""
    outer = gj.gasloc(axis_name="worker", payload_dtype=jnp.int8, payload_block_size=16)
    round = make_round(outer, 3, optax.sgd(0.05), fragments=fragments, delay=delay)
    state, other = round.init(make_params()), round.init(make_params())
    for t in range(4):
        batches = make_batches(3, 3, seed=t)
        state, _ = round(state, batches, 3)
        if delay:
            other, _ = round.local(round.exchange(other), batches, 3)
        else:
            other = round.exchange(round.local(other, batches, 3)[0])
    # int8 may round a tie the other way where the compiler contracted another product and sum.
    assert_close(on_host(other.params), on_host(state.params), "bf16", terms=4)


def test_delayed_exchange_keeps_what_was_learned_meanwhile():
    """One parameter, H = 2, D = 1, outer SGD(1): each worker adds 1 a step, and only disagreement is taken away."""
    step = gj.LocalStep(
        lambda params: (), lambda params, state, batch: ({"w": params["w"] + batch}, state, {})
    )
    mesh = gj.make_mesh(2, devices=jax.devices()[:2])
    round = gj.make_round(step, gj.local_sgd("worker"), mesh, delay=1)
    state = round.init({"w": jnp.zeros(())})
    drift = np.array([[1.0, 1.0], [3.0, 3.0]], np.float32)
    for wanted in ([2.0, 6.0], [6.0, 10.0], [10.0, 14.0]):
        # The first exchange finds equal workers; each later one moves both to the mean of the round before.
        state, _ = round(state, drift, 2)
        assert np.asarray(state.params["w"]).tolist() == wanted


def test_non_finite_worker_with_fragments_and_delay():
    """All of the worker's fragments come back, not only the one that is exchanged next."""
    round = make_round(gj.gasloc(axis_name="worker"), 4, optax.adamw(0.02), fragments=2, delay=1)
    state = round.init(make_params())
    for t in range(6):
        batches = make_batches(4, 2, seed=t)
        if t == 2:
            batches["scale"][3, 1, 0] = np.nan
        state, metrics = round(state, batches, 2)
        assert np.asarray(metrics["skipped"]).tolist() == [0, 0, 0, int(t == 2)]
        for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
            assert np.isfinite(np.asarray(x)).all(), (t, jax.tree_util.keystr(path))
