"""Bad input to scape_jax: errors say what must hold, what was given and what to do, before the first compile.

Nothing of a training step may be traced before the error: the loss functions here fail when they are called.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import scape_jax
from tests.helpers import make_mesh
from tests.scape_jax.contract_table import SCAPE, make_params

WORKERS = 4


def never_traced(params: Any, batch: Any) -> jax.Array:
    pytest.fail("the loss was traced before the error")


def step_of(tx: Any, **options: Any) -> scape_jax.TrainStep:
    return scape_jax.make_train_step(never_traced, tx, make_mesh(WORKERS), **options)


def raises(kind: type[Exception], *parts: str) -> Any:
    """The message holds these texts in this order: the invariant, the value given, the remedy."""
    return pytest.raises(kind, match="(?s)" + ".*".join(re.escape(part) for part in parts))


# Settings -------------------------------------------------------------------------------------------------

RATE = "must be a finite number >= 0"
NAN, INF = float("nan"), float("inf")
# setting -> (what must hold, what to do, bad values)
BAD_SCAPE = {
    "density": (
        "in (0, 1]",
        "1.0 for a dense exchange",
        [0, 0.0, -1, -0.1, 1.5, NAN, INF, True, False, "0.1"],
    ),
    "b1": ("in [0, 1)", "b1=0.9", [1.0, 1, -0.1, NAN, "0.9", True]),
    "b2": ("in [0, 1)", "b2=0.95", [1.0, -1e-9, None]),
    "eps": ("a finite number >= 0", "1e-8", [-1e-8, INF, NAN, "1e-8"]),
    "clip_norm": ("a finite number > 0", "None for no clipping", [0, 0.0, -1.0, NAN, INF, "1", False]),
    "weight_decay": ("a finite number >= 0", "Use a number", [-0.1, NAN, "0.1", True]),
    "staleness_power": ("in [0, 4]", "0 switches it off", [-1.0, 4.5, NAN, "1"]),
    "block_size": ("a ", "Typical: 4096", [33, 0, 16, -32, 64.0, "64", True]),
    "mask_every": ("a whole number >= 1", "Use 1", [0, -1, 1.5, True]),
    "density_warmup_steps": ("", ". ", [-1, 0.5, 1 << 24]),
    "selection": ("one of ('block', 'leaf')", "Use 'block'", ["global", None]),
    "codec": ("one of ('auto', 'bitmap', 'index')", "Use 'auto'", ["zip", 16]),
    "clip_order": ("one of ('before', 'paper')", "Use 'before'", ["after"]),
    "bias_correction": ("one of ('both', 'none', 'momentum')", "Use 'both'", [True, "adam"]),
    "payload_dtype": ("jnp.float32 or jnp.bfloat16", "Use one of these", ["float16", "int8", "fp32"]),
}
CASES = [(name, value, must, todo) for name, (must, todo, values) in BAD_SCAPE.items() for value in values]


@pytest.mark.parametrize(("name", "value", "must", "todo"), CASES, ids=str)
def test_bad_setting_of_scape(name, value, must, todo):
    given = f"dtype({value!r})" if value in ("float16", "int8") else repr(value)
    parts = (f"{name} must be {must}", "got ", given.removesuffix(")"), todo)
    with raises(ValueError, *parts):
        scape_jax.scape(1e-3, **{name: value})
    if name != "weight_decay":
        with raises(ValueError, *parts):
            scape_jax.scale_by_scape(**{name: value})


@pytest.mark.parametrize("make", [scape_jax.scape, scape_jax.adams, scape_jax.adamw, scape_jax.topk])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"learning_rate": -1e-3}, ("learning_rate must be a finite number >= 0", "got -0.001", "schedule")),
        ({"learning_rate": float("nan")}, ("learning_rate must be", "got nan", "schedule")),
        ({"learning_rate": "3e-4"}, ("learning_rate must be", "got '3e-4'", "schedule")),
        ({"weight_decay": -0.1}, ("weight_decay must be a finite number >= 0", "got -0.1")),
        ({"b1": 1.0}, ("b1 must be in [0, 1)", "got 1.0")),
        ({"b2": 1.5}, ("b2 must be in [0, 1)", "got 1.5")),
        ({"eps": -1.0}, ("eps must be a finite number >= 0", "got -1.0")),
        ({"clip_norm": 0}, ("clip_norm must be a finite number > 0", "got 0", "None for no clipping")),
    ],
    ids=lambda x: str(x)[:30],
)
def test_bad_setting_of_any_optimizer(make, options, parts):
    with raises(ValueError, *parts):
        make(**{"learning_rate": 1e-3, **options})


@pytest.mark.parametrize("density", [0, -1, 1.5, float("nan"), True, "0.1"])
def test_bad_density_of_top_k(density):
    for make in (functools.partial(scape_jax.topk, 1e-3), scape_jax.topk_gradients):
        with raises(ValueError, "density must be in (0, 1]", f"got {density!r}", "1.0"):
            make(density)


def test_bad_settings_of_the_baselines():
    with raises(ValueError, "payload_dtype must be", "dtype('float16')"):
        scape_jax.adams(1e-3, payload_dtype=jnp.float16)
    with raises(ValueError, "payload_dtype must be", "dtype('float16')"):
        scape_jax.adamw(1e-3, payload_dtype=jnp.float16)
    with raises(ValueError, "optimizer must be one of ('adamw', 'adams')", "got 'sgd'"):
        scape_jax.topk(1e-3, optimizer="sgd")
    with raises(ValueError, "block_size must be a whole number >= 1", "got 0"):
        scape_jax.topk(1e-3, block_size=0)
    with raises(ValueError, "bias_correction must be one of", "got 'all'"):
        scape_jax.scale_by_adams(bias_correction="all")


def test_bad_arguments_of_wire_bytes():
    params = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    for options, parts in (
        ({"num_workers": 0}, ("num_workers must be", "got 0")),
        ({"num_workers": 2, "step": 0}, ("step", "from 1", "got 0")),
        ({"num_workers": 2, "method": "gossip"}, ("method must be", "got 'gossip'")),
        ({"num_workers": 2, "density": 2.0}, ("density must be in (0, 1]", "got 2.0")),
        ({"num_workers": 2, "density": 2.0, "method": "topk"}, ("density must be in (0, 1]", "got 2.0")),
    ):
        with raises(ValueError, *parts):
            scape_jax.wire_bytes(params, **options)


# Axis and transformation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "given"), [("model", "'model'"), (("data", "model"), "'model'"), (None, "None"), ((), "()")]
)
def test_axis_not_in_the_mesh(axis, given):
    with raises(ValueError, "axis_name must name", f"got {given}", "('data',)", "Use one of these"):
        step_of(SCAPE(axis_name="data"), axis_name=axis)


@pytest.mark.parametrize("make", [scape_jax.scape, scape_jax.adams, scape_jax.adamw, scape_jax.topk])
def test_axis_is_not_bound(make):
    """update (and SCAPE's init) outside shard_map, or under a mesh without the axis."""
    tx, params = make(1e-3, axis_name="data"), make_params()
    with raises(
        ValueError,
        "axis_name must name an axis of the surrounding shard_map",
        "got 'data'",
        "make_train_step",
    ):
        tx.update(params, tx.init(params), params)


def test_optimizer_of_another_axis_than_the_step():
    with raises(ValueError, "axis_name must name an axis", "got 'model'", "not bound"):
        step_of(SCAPE(axis_name="model")).init(make_params())


@pytest.mark.parametrize(
    "tx", [optax.adamw(1e-3), optax.identity(), scape_jax.scale_by_adams()], ids=["adamw", "id", "adams"]
)
def test_transformation_that_exchanges_nothing(tx):
    with raises(ValueError, "tx must exchange gradients between workers", "does not", "all_reduce_gradients"):
        step_of(tx).init(make_params())


@pytest.mark.parametrize("make", [scape_jax.scape, scape_jax.adams, scape_jax.adamw, scape_jax.topk])
def test_optimizer_without_the_axis(make):
    """Without it each worker would train a model of its own, and nothing would tell."""
    with raises(ValueError, "same update", "'layer/bias'", "axis_name='data'"):
        step_of(make(1e-3)).init(make_params())


def test_group_that_does_not_exchange():
    tx = optax.partition(
        {"a": SCAPE(axis_name="data"), "b": optax.sgd(0.1)}, {"layer": "a", "odd": "b", "temp": "a"}
    )
    with raises(ValueError, "same update", "'odd'", "all_reduce_gradients"):
        step_of(tx).init(make_params())


def test_memory_in_front_of_the_exchange():
    """It would be stored as one array but hold W values: a checkpoint would keep only one of them."""
    with raises(ValueError, "equal on all workers", "'0/trace/layer/bias'", "behind the exchange"):
        step_of(optax.chain(optax.trace(0.9), SCAPE(axis_name="data"))).init(make_params())


@pytest.mark.parametrize(
    ("wrap", "parts"),
    [
        (lambda tx: optax.MultiSteps(tx, 2), ("MultiSteps", "running sum", "make_train_step(accumulate=")),
        (lambda tx: optax.apply_if_finite(tx, 3), ("apply_if_finite", "forever", "skip_nonfinite=True")),
    ],
)
def test_wrappers_that_look_at_local_gradients(wrap, parts):
    """Each worker would decide for itself, and those that exchange would wait for those that do not."""
    with raises(ValueError, "same on all workers", *parts):
        step_of(optax.chain(wrap(SCAPE(axis_name="data")))).init(make_params())


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, "2", True])
def test_bad_accumulation(accumulate):
    with raises(ValueError, "accumulate must be a whole number >= 1", f"got {accumulate!r}"):
        step_of(SCAPE(axis_name="data"), accumulate=accumulate)


# Parameters and batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64"])
@pytest.mark.parametrize("make", [scape_jax.scape, scape_jax.topk])
def test_leaf_that_is_no_real_float_names_its_path(make, dtype):
    params = {"layer": {"kernel": jnp.ones((4, 4)), "table": [jnp.ones(3, dtype)]}}
    for init in (make(1e-3).init, step_of(make(1e-3, axis_name="data")).init):
        with raises(TypeError, "real floating-point array", "'layer/table/0'", dtype, "optax.masked"):
            init(params)


@pytest.mark.parametrize("make", [scape_jax.adams, scape_jax.adamw])
def test_dense_methods_refuse_it_too(make):
    params = {"layer": {"kernel": jnp.ones((4, 4)), "table": [jnp.ones(3, jnp.int32)]}}
    with raises(TypeError, "real floating-point array", "'layer/table/0'", "int32", "optax.masked"):
        step_of(make(1e-3, axis_name="data")).init(params)


def array_of_workers(values: list[np.ndarray]) -> jax.Array:
    """Says that it is replicated but holds another value on each worker, as two seeds would give."""
    mesh = make_mesh(len(values))
    parts = [jax.device_put(v, d) for v, d in zip(values, mesh.devices.flat, strict=True)]
    return jax.make_array_from_single_device_arrays(
        values[0].shape, NamedSharding(mesh, PartitionSpec()), parts
    )


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_parameters_that_differ_name_leaf_and_worker(dtype):
    same = np.arange(12, dtype=np.float32).reshape(3, 4).astype(dtype)
    other = same.copy()
    other[1, 2] += 1
    params = {"a": array_of_workers([same] * 4), "b": {"c": array_of_workers([same, same, other, same])}}
    with raises(ValueError, "start from the same parameters", "'b/c'", "worker(s) [2]", "one seed"):
        step_of(SCAPE(axis_name="data")).init(params)


@pytest.mark.parametrize("change", ["swap", "negative zero", "last bit"])
def test_every_difference_in_the_bits_is_seen(change):
    """What a plain sum of values would miss: two entries swapped, -0.0 for 0.0, a change in the last bit."""
    same = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    other = same.copy()
    if change == "swap":
        other[[1, 2]] = other[[2, 1]]
    elif change == "negative zero":
        other[0] = -0.0
    else:
        other[3] = np.nextafter(other[3], np.float32(4))
    params = {"w": array_of_workers([same, other])}
    with raises(ValueError, "start from the same parameters", "'w'", "worker(s) [1]"):
        scape_jax.check_equal_on_workers(params, make_mesh(2))
    scape_jax.check_equal_on_workers({"w": array_of_workers([same, same])}, make_mesh(2))


@pytest.mark.parametrize(
    ("batch", "accumulate", "parts"),
    [
        (
            {"x": np.ones((6, 2))},
            1,
            ("workers * accumulate = 4 * 1 = 4", "got 6 rows in 'x'", "multiple of 4"),
        ),
        ({"x": np.ones((8, 2)), "y": np.ones(9)}, 1, ("got 9 rows in 'y'", "multiple of 4")),
        ({"x": np.ones((8, 2))}, 3, ("4 * 3 = 12", "got 8 rows in 'x'", "multiple of 12")),
        ({"x": np.ones((0, 2))}, 1, ("got 0 rows in 'x'", "multiple of 4")),
        ({"x": np.float32(1)}, 1, ("got 0 rows in 'x'", "multiple of 4")),
    ],
)
def test_batch_that_does_not_divide(batch, accumulate, parts):
    step = step_of(SCAPE(axis_name="data"), accumulate=accumulate)
    params = make_params()
    state = step.init(params)
    with raises(ValueError, "batch must be divisible", *parts):
        step(params, state, batch)


def test_leaves_of_one_batch_have_equal_rows():
    step, params = step_of(SCAPE(axis_name="data")), make_params()
    with raises(ValueError, "equally many rows", "'x': 8, 'y': 4", "Cut or pad"):
        step(params, step.init(params), {"x": np.ones((8, 2)), "y": np.ones(4)})


def test_wire_bytes_before_init():
    with raises(ValueError, "wire_bytes needs the parameters' shapes", "init(params)"):
        step_of(SCAPE(axis_name="data")).wire_bytes(1)


def test_nothing_is_compiled_for_a_bad_start(caplog):
    """Beyond the comparison of the parameters' bits, no program at all."""
    step = step_of(scape_jax.scape(1e-3))
    params = step.place(make_params())
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        with pytest.raises(ValueError):
            step.init(params)
        with pytest.raises(ValueError):
            scape_jax.scape(1e-3, density=2.0)
        with pytest.raises(ValueError):
            step_of(SCAPE(axis_name="data"), axis_name="model")
    assert "Compiling" not in caplog.text
    with jax.log_compiles(), caplog.at_level("WARNING"):
        jax.jit(lambda x: x + 1)(1)
    assert "Compiling" in caplog.text, "the log that this test reads is not written any more"
