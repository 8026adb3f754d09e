"""Bytes on the wire: the closed form against collectives in the jaxpr, to the byte, and in compiled code."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import scape_jax
from scape_jax import _exchange as ex
from scape_jax._layout import level_of
from tests.helpers import make_mesh
from tests.scape_jax.side_by_side import SHAPES, make_params, make_step

ALL_SHAPES = SHAPES | {"b": (5, 64)}
PARAMS = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in ALL_SHAPES.items()}


def mapped(tx: Any, num_workers: int, params: dict, **extra: Any) -> tuple[Any, tuple]:
    """(the update of all workers under shard_map, the shapes of its arguments)."""
    shard_map = functools.partial(jax.shard_map, mesh=make_mesh(num_workers), check_vma=False)
    whole = PartitionSpec()
    local = jax.eval_shape(shard_map(tx.init, in_specs=whole, out_specs=whole), params)
    specs = scape_jax.state_specs(local)
    state = jax.eval_shape(shard_map(tx.init, in_specs=whole, out_specs=specs), params)
    update = functools.partial(tx.update, **extra)
    return shard_map(update, in_specs=(whole, specs, whole), out_specs=(whole, specs)), (
        params,
        state,
        params,
    )


def scape(**options: Any) -> Any:
    return scape_jax.scape(1e-3, **{"axis_name": "data", "block_size": 64, "density": 0.1} | options)


COMBINATIONS = [
    dict(),
    dict(codec="bitmap", payload_dtype=jnp.bfloat16),
    dict(codec="index", selection="leaf"),
    dict(codec="bitmap", selection="leaf", density=0.02),
    dict(codec="index", payload_dtype=jnp.bfloat16, density=0.02, block_size=32),
    dict(codec="auto", density=0.5, dense=lambda path: path == "a"),
    dict(codec="auto", selection="leaf", density=0.01),
    dict(codec="bitmap", density_warmup_steps=7),
    dict(codec="index", density_warmup_steps=7, payload_dtype=jnp.bfloat16),
    dict(codec="index", density_warmup_steps=9, mask_every=3, selection="leaf"),
    dict(codec="bitmap", mask_every=3, staleness_power=1.0),
    dict(density=1.0),
]


@pytest.mark.parametrize(
    ("num_workers", "options"), [(8, c) for c in COMBINATIONS] + [(2, c) for c in COMBINATIONS[1:4]]
)
def test_closed_form_equals_the_jaxpr_at_every_level(num_workers: int, options: dict) -> None:
    """JAX writes the one psum of a tuple as one equation a part; XLA makes one all-reduce of them (below).

    One all-gather a step; only a warm-up level under the index codec gathers a bitmap as well.
    """
    tx = scape(**options)
    update, arguments = mapped(tx, num_workers, PARAMS)
    warmup, every = options.get("density_warmup_steps", 0), options.get("mask_every", 1)
    last, seen = tx.final_level, set()
    for t in range(1, warmup + 2 * every + 2):
        level = level_of(t - 1, last + 1, warmup, every)
        # The jaxpr's conditional between refreshes counts as gathering: look at steps that gather.
        if level in seen or not (t - 2) % every == 0:
            continue
        seen.add(level)
        found = scape_jax.collective_operand_bytes(update, *arguments, level=level)
        closed = tx.wire(PARAMS, num_workers=num_workers, step=t)
        assert found["all_reduce"] == closed.all_reduce_operand
        assert found["all_gather"] == closed.all_gather_operand
        # A dense step hands the leaves over as they are; all others send one vector, bfloat16 ones two numbers beside it.
        bundled = 1 + (jnp.dtype(options.get("payload_dtype", jnp.float32)) == jnp.bfloat16)
        assert found["num_all_reduce"] == (bundled if level > 0 else len(PARAMS) + 1)
        both = options.get("codec") == "index" and 0 < level < last
        assert found["num_all_gather"] == (0 if last == 0 else 2 if both else 1)
    assert len(seen) >= min(last + 1, 3 if warmup else 1) and last in seen
    assert tx.wire(PARAMS, num_workers=num_workers, step=None) == tx.wire(
        PARAMS, num_workers=num_workers, step=2 + every * (warmup + 1)
    )


def test_step_1_sends_everything() -> None:
    update, arguments = mapped(scape(codec="bitmap"), 2, PARAMS)
    found = scape_jax.collective_operand_bytes(update, *arguments, level=0)
    total = sum(math.prod(shape) for shape in ALL_SHAPES.values())
    assert found["all_reduce"] == 4 * total + 8
    assert found["all_reduce"] == scape().wire(PARAMS, num_workers=2, step=1).all_reduce_operand


def test_steps_between_refreshes_gather_nothing() -> None:
    tx = scape(mask_every=3, codec="bitmap")
    gathered = [tx.wire(PARAMS, num_workers=2, step=t).all_gather_operand for t in range(1, 9)]
    assert [n > 0 for n in gathered] == [False, True, False, False, True, False, False, True]


@pytest.mark.parametrize("num_workers", [2, 8])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("adams", dict()),
        ("adamw", dict(payload_dtype=jnp.bfloat16)),
        ("topk", dict(density=0.1, block_size=64)),
    ],
)
def test_baselines_closed_form_equals_the_jaxpr(num_workers: int, method: str, options: dict) -> None:
    tx = getattr(scape_jax, method)(1e-3, axis_name="data", **options)
    update, arguments = mapped(tx, num_workers, PARAMS)
    found = scape_jax.collective_operand_bytes(update, *arguments)
    closed = tx.wire(PARAMS, num_workers=num_workers, step=3)
    assert found["all_reduce"] == closed.all_reduce_operand
    assert found["all_gather"] == closed.all_gather_operand
    dense = len(PARAMS) - (3 if method == "topk" else 0)
    assert found["num_all_reduce"] == dense + 1
    assert found["num_all_gather"] == (1 if closed.all_gather_operand else 0)


def hand_counted(num_workers: int) -> tuple[int, int]:
    """(all-reduce, all-gather) operand bytes of SHAPES at d = .1, B = 64, float32 values and bitmaps.

    703 = 10 rows of 64 (6 kept) and one of 63 (6); 99 = a row of 64 (6) and one of 35 (4); 214 are dense.
    """
    owned = math.ceil(11 / num_workers) + math.ceil(2 / num_workers)
    return (11 * 6 + 10 + 70 + 128 + 15 + 1) * 4 + 8, owned * 64 // 8


@pytest.mark.parametrize("num_workers", [2, 8])
def test_compiled_step_sends_what_was_counted_by_hand(num_workers: int) -> None:
    """Read from the optimised HLO: ONE all-reduce, ONE all-gather; XLA neither drops, doubles nor widens."""
    tx = scape(codec="bitmap")
    params = {path: PARAMS[path] for path in SHAPES}
    reduce, gather = hand_counted(num_workers)
    closed = tx.wire(params, num_workers=num_workers, step=None)
    assert (closed.all_reduce_operand, closed.all_gather_operand) == (reduce, gather)
    update, arguments = mapped(tx, num_workers, params, level=tx.final_level)
    text = jax.jit(update).lower(*arguments).compile().as_text()
    assert result_bytes(text, "all-reduce") == [reduce]
    assert result_bytes(text, "all-gather") == [gather * num_workers]


@pytest.mark.parametrize("num_workers", [2, 8])
def test_compiled_bfloat16_is_not_widened_on_cpus(num_workers: int) -> None:
    """XLA makes float32 of a bfloat16 all-reduce there. In parts it sends what a ring all-reduce would, and 8 bytes."""
    tx = scape(codec="bitmap", payload_dtype=jnp.bfloat16)
    params = {path: PARAMS[path] for path in SHAPES}
    update, arguments = mapped(tx, num_workers, params, level=tx.final_level)
    text = jax.jit(update).lower(*arguments).compile().as_text()
    _, gather = hand_counted(num_workers)
    entries = (tx.wire(params, num_workers=num_workers, step=None).all_reduce_operand - 8) // 2
    whole = 2 * -(-entries // num_workers) * num_workers
    # The all-to-all is a swap in pairs with each of the others, of a part in whole words (pallas_kernels/gloo.py).
    part = 4 * -(-whole // num_workers // 4)
    assert sorted(result_bytes(text, "all-reduce")) == [8, *[part] * (num_workers - 1)]
    assert result_bytes(text, "all-to-all") == []
    assert sorted(result_bytes(text, "all-gather")) == sorted([whole, gather * num_workers])


@pytest.mark.parametrize("num_workers", [2, 8])
def test_sum_in_parts_rounds_once(num_workers: int) -> None:
    """Of shapes that do not divide, beside a float32 array; as NumPy adds bfloat16 numbers in float32."""
    rng = np.random.default_rng(0)
    tree = {
        k: rng.standard_normal((num_workers, *shape))
        for k, shape in {"a": (3, 5), "b": (), "c": (7,)}.items()
    }
    tree = {k: jnp.asarray(x, jnp.float32 if k == "c" else jnp.bfloat16) for k, x in tree.items()}

    def local(tree):
        return ex.all_sum(jax.tree.map(lambda x: x[0], tree), "data", num_workers)

    for typed in (False, True):
        specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec(), "check_vma": typed}
        found = jax.jit(jax.shard_map(local, mesh=make_mesh(num_workers), **specs))(tree)
        for k, x in tree.items():
            assert found[k].dtype == x.dtype
            want = np.asarray(x, np.float32).sum(axis=0)
            if k == "c":
                np.testing.assert_allclose(found[k], want, rtol=1e-5, atol=1e-6)
            else:
                np.testing.assert_array_equal(found[k], want.astype(x.dtype))


def result_bytes(hlo: str, op: str) -> list[int]:
    """Bytes of the result of each such instruction; of an all-reduce that is what a worker puts in."""
    sizes = {"f32": 4, "u32": 4, "bf16": 2, "u16": 2}
    out = []
    for result in re.findall(rf"= (.*?) {op}(?:-start)?\(", hlo):
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", result)
        out.append(sum(sizes[t] * math.prod(int(d) for d in dims.split(",") if d) for t, dims in shapes))
    return out


BIG = {"w": jax.ShapeDtypeStruct((4096 * 64, 4096), jnp.float32)}


@pytest.mark.parametrize("num_workers", [8, 64])
@pytest.mark.parametrize(("codec", "ratio"), [("index", 80), ("bitmap", 39), ("auto", 80)])
def test_times_fewer_bytes_than_dense_at_density_01(codec: str, ratio: int, num_workers: int) -> None:
    """Fact 9: 2dP 4 (W-1)/W values and 2dP or P/8 bytes of mask, against 2P 4 (W-1)/W."""
    sent = scape_jax.wire_bytes(BIG, num_workers=num_workers, density=0.01, codec=codec)
    assert round(sent.ratio) == ratio
    if codec == "bitmap":
        assert round(100 * sent.mask_bytes / sent.total_bytes) == 61


def test_bfloat16_values_halve_the_values_only() -> None:
    wide, narrow = (
        scape_jax.wire_bytes(BIG, num_workers=8, density=0.01, payload_dtype=t)
        for t in (jnp.float32, jnp.bfloat16)
    )
    assert wide.values_bytes == 2 * narrow.values_bytes
    assert wide.mask_bytes == narrow.mask_bytes


@pytest.mark.parametrize(
    ("density", "codec"), [(0.05, "index"), (0.0625 - 1 / 4096, "index"), (0.07, "bitmap"), (0.1, "bitmap")]
)
def test_auto_takes_the_cheaper_codec(density: float, codec: str) -> None:
    """Fact 9: break-even at 1/16."""
    auto, named = (
        scape_jax.wire_bytes(BIG, num_workers=8, density=density, codec=c) for c in ("auto", codec)
    )
    assert auto == named


def test_ring_formulas_by_hand() -> None:
    """W = 4, one leaf of 64 rows of 4096 at d = 1/32: 128 kept a row, no dense leaf, two control numbers."""
    params = {"w": jax.ShapeDtypeStruct((64, 4096), jnp.float32)}
    sent = scape_jax.wire_bytes(params, num_workers=4, density=1 / 32)
    assert sent.all_reduce_operand == 64 * 128 * 4 + 8
    assert sent.values_bytes == 2 * 3 * (64 * 128 * 4) // 4
    assert sent.dense_bytes == 2 * 3 * 8 // 4
    assert sent.all_gather_operand == 16 * 128 * 2
    assert sent.mask_bytes == 3 * 16 * 128 * 2
    assert sent.dense_total_bytes == 2 * 3 * (64 * 4096 * 4) // 4
    assert sent.total_bytes == sent.values_bytes + sent.mask_bytes + sent.dense_bytes
    assert sent.density == 1 / 32
    assert sent.ratio == sent.dense_total_bytes / sent.total_bytes


def test_train_step_tells_the_same() -> None:
    """The step's own figures, and for a chain, whose closed form is unknown, those counted from its jaxpr."""
    tx = scape(codec="bitmap", axis_name="data")
    step, chained = make_step(tx, 2), make_step(optax.chain(tx), 2)
    for made in (step, chained):
        made.init(make_params(shapes=ALL_SHAPES))
    closed = tx.wire(PARAMS, num_workers=2, step=5)
    assert step.wire_bytes(5) == closed
    counted = chained.wire_bytes()
    for field in (
        "all_reduce_operand",
        "all_gather_operand",
        "mask_bytes",
        "total_bytes",
        "dense_total_bytes",
    ):
        assert getattr(counted, field) == getattr(closed, field)


def test_one_worker_sends_nothing() -> None:
    for method in ("scape", "all_reduce", "topk"):
        assert scape_jax.wire_bytes(BIG, num_workers=1, method=method).total_bytes == 0
    assert np.isinf(scape_jax.wire_bytes(BIG, num_workers=1).ratio)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_workers=0), "num_workers must be"),
        (dict(num_workers=2, step=0), "step counts from 1"),
        (dict(num_workers=2, method="gossip"), "method must be"),
        (dict(num_workers=2, density=1.5), r"density must be in \(0, 1\]"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scape_jax.wire_bytes(BIG, **arguments)
