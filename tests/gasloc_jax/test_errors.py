"""Bad input to gasloc_jax: errors say what must hold, what was given and what to do, before the first compile."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gasloc_jax as gj
from tests.gasloc_jax.side_by_side import make_batches, make_mesh, make_params
from tests.quick_compile import quickest_compile  # noqa: F401

WORKERS, MOST = 4, 3
NAN, INF = float("nan"), float("inf")


def never_traced(params: Any, batch: Any) -> jax.Array:
    pytest.fail("the loss was traced before the error")


def round_of(outer: Any = None, num_workers: int = WORKERS, **options: Any) -> gj.Round:
    step = gj.make_local_step(never_traced, optax.sgd(0.1))
    return gj.make_round(step, outer or gj.gasloc(axis_name="worker"), make_mesh(num_workers), **options)


def raises(kind: type[Exception], *parts: str) -> Any:
    """The message holds these texts in this order: the invariant, the value given, the remedy."""
    return pytest.raises(kind, match="(?s)" + ".*".join(re.escape(part) for part in parts))


# Outer optimizers ---------------------------------------------------------------------------------------------

RATE = ("a finite number >= 0", "Typical: 0.7")
MOMENTUM = ("in [0, 1)", "Use 0 for none")
BAD_SETTINGS = [
    (gj.nesterov_gossip, "learning_rate", *RATE, [-0.1, NAN, INF, "0.7", True]),
    (gj.nesterov_gossip, "gamma", *MOMENTUM, [1.0, -0.1, NAN, None]),
    (gj.nesterov_gossip, "momentum", "one of ('mixed', 'local')", "Use 'mixed'", ["both", None]),
    (gj.noloco, "learning_rate", *RATE, [-1.0]),
    (gj.noloco, "pull", *RATE, [-1.0, NAN]),
    (gj.noloco, "momentum", *MOMENTUM, [1.0]),
    (gj.diloco, "learning_rate", *RATE, [-0.1, INF]),
    (gj.diloco, "momentum", *MOMENTUM, [1.0]),
    (
        gj.gasloc,
        "payload_dtype",
        "jnp.float32, jnp.bfloat16 or jnp.int8",
        "Use one of these",
        ["float16", "fp8"],
    ),
    (gj.gasloc, "payload_block_size", "a whole number >= 1", "Typical: 256", [0, 1.5]),
]


@pytest.mark.parametrize(
    ("make", "name", "must", "todo", "value"),
    [(make, name, must, todo, v) for make, name, must, todo, values in BAD_SETTINGS for v in values],
    ids=str,
)
def test_bad_setting(make, name, must, todo, value):
    with raises(ValueError, f"{name} must be {must}", "got ", todo):
        make(**{name: value})


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("random_pairs", ("got 'random_pairs'", "Write topology=gasloc_jax.random_pairs()")),
        ("worker", ("got 'worker'", "Write topology=gasloc_jax.random_pairs()")),
        (gj.ring, ("got the function ring", "Write topology=gasloc_jax.ring()")),
        (gj.mixing_matrix, ("got the function mixing_matrix", "gasloc_jax.mixing_matrix(your matrix)")),
        ([[0.5, 0.5], [0.5, 0.5]], ("got [[0.5", "gasloc_jax.mixing_matrix(your matrix)")),
        ([[1.0], [0.5, 0.5]], ("got [[1.0], [0.5", "gasloc_jax.mixing_matrix(your matrix)")),
        (np.eye(2), ("got array([[1.", "gasloc_jax.mixing_matrix(your matrix)")),
        (gj.ring().build(3), ("got Pool(", "Write topology=gasloc_jax.")),
    ],
    ids=["name", "axis", "uncalled", "uncalled matrix", "matrix", "ragged", "array", "pool"],
)
@pytest.mark.parametrize("make", [gj.gasloc, gj.nesterov_gossip, gj.noloco, gj.local_dadam, gj.dadam])
def test_what_is_no_topology(make, given, parts):
    with raises(TypeError, "topology must be a gasloc_jax.Topology", *parts):
        make(topology=given, axis_name="worker")


@pytest.mark.parametrize(
    ("given", "told"), [(0.7, "got 0.7."), ("sgd", "got 'sgd'."), (optax.sgd, "got sgd, uncalled.")], ids=str
)
def test_what_is_no_optax_transformation(given, told):
    with raises(TypeError, "outer must be an optax transformation", told, "Write outer=optax.sgd(0.7"):
        gj.gasloc(given)
    with raises(
        TypeError, "outer must be an optax transformation", told, "outer=gasloc_jax.gasloc(axis_name='"
    ):
        round_of(given)


def test_unbound_axis():
    with raises(ValueError, "axis_name must name an axis", "'worker'", "make_round"):
        gj.gasloc(axis_name="worker").init(make_params())


@pytest.mark.parametrize("make", [gj.gasloc, gj.nesterov_gossip, gj.noloco, gj.diloco])
def test_needs_the_anchor_and_floats(make):
    tx, params = make(), {"w": jnp.ones(3)}
    with raises(ValueError, "needs the round's anchor", "update(anchor - local, state, anchor)"):
        tx.update(params, tx.init(params))
    with raises(TypeError, "must be floating-point, got int32 in 'ids'"):
        tx.init({"ids": jnp.arange(3)})


# Making a round -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"axis_name": "workers"}, ("axis_name must name the workers' axis", "'workers'", "('worker',)")),
        ({"fragments": 0}, ("fragments must be a whole number >= 1, got 0", "1 exchanges the whole")),
        ({"fragments": 1.5}, ("fragments must be a whole number >= 1, got 1.5",)),
        ({"delay": -1}, ("delay must be a whole number >= 0, got -1",)),
        ({"drift_weight": "both"}, ("drift_weight must be one of ('uniform', 'steps'), got 'both'",)),
        ({"drift_weight": "steps"}, ("reference_steps must be a whole number >= 1, got None",)),
        (
            {"drift_weight": "steps", "reference_steps": 3, "delay": 1},
            ("drift_weight must be 'uniform' with fragments or a delay", "fragments=1 and delay=0"),
        ),
    ],
    ids=str,
)
def test_bad_options(options, parts):
    with raises(ValueError, *parts):
        round_of(**options)


def test_outer_optimizer_of_another_axis():
    with raises(ValueError, "axis_name of the outer optimizer must be 'worker'", "got None"):
        round_of(gj.gasloc())
    with raises(ValueError, "island_axis of the outer optimizer must be None", "got 'data'"):
        round_of(gj.gasloc(axis_name="worker", island_axis="data"))


def test_mixing_matrix_of_another_size():
    """Refused where W is first known; behind a wrapper of optax, which hides the topology, before the first round."""
    outer = gj.gasloc(topology=gj.mixing_matrix(np.full((3, 3), 1 / 3)), axis_name="worker")
    with raises(ValueError, "must have a row for each worker, got 3 rows for 4 workers", "Give a matrix"):
        round_of(outer)
    wrapped = round_of(optax.chain(outer))
    with raises(ValueError, "must have a row for each worker, got 3 rows for 4 workers"):
        wrapped.init(make_params())


def test_bad_meshes():
    with raises(ValueError, "island_size must divide the 8 devices, got 3", "divisor of 8"):
        gj.make_mesh(2, 3)
    with raises(ValueError, "must be the number of devices, 8, got 3 * 2"):
        gj.make_mesh(3, 2)
    with raises(ValueError, "num_workers must be a whole number >= 1, got 0"):
        gj.make_mesh(0)
    assert gj.make_mesh(2, 4).shape == {"worker": 2, "data": 4}


# Parameters ---------------------------------------------------------------------------------------------------


def test_more_fragments_than_layers():
    with raises(
        ValueError, "at most the layers, got 4 fragments for the 3 layers of 'layers/bias'", "fragments <= 3"
    ):
        round_of(fragments=4).init(make_params())
    with raises(ValueError, "must have layers to deal", "stacked="):
        round_of(fragments=2).init({"w": jnp.ones((8, 8))})
    round_of(fragments=2, stacked=lambda path: path == "w").init({"w": jnp.ones((8, 8))})


def test_workers_that_start_from_different_weights():
    """Copies on the devices that call themselves one array, as a user's own broken initialisation leaves them."""
    round = round_of()
    whole = NamedSharding(round.mesh, PartitionSpec())
    params = jax.tree.map(lambda x: jax.device_put(x, whole), make_params())
    odd = make_params()["embedding"]
    copies = [
        jax.device_put(odd + (0.5 if n == 2 else 0.0), device)
        for n, device in enumerate(round.mesh.devices.flat)
    ]
    round.init(params)  # equal copies are fine
    params["embedding"] = jax.make_array_from_single_device_arrays(odd.shape, whole, copies)
    with raises(
        ValueError,
        "start from the same parameters",
        "'embedding' of worker(s) [2]",
        "Initialise from one seed",
    ):
        round.init(params)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_parameters_that_are_not_finite(bad):
    params = make_params()
    params["layers/kernel"][2, 1, 4] = bad
    with raises(ValueError, "must be finite at the start", "NaN or infinity in 'layers/kernel'", "Check"):
        round_of().init(params)


def test_parameters_that_are_not_floats():
    with raises(TypeError, "must be floating-point, got int32 in 'step'"):
        round_of().init({"w": jnp.ones(2), "step": jnp.zeros((), jnp.int32)})


# A state ------------------------------------------------------------------------------------------------------


def test_state_of_another_number_of_workers():
    other = round_of(num_workers=8).init(make_params())
    round = round_of()
    for call in (
        lambda: round(other, make_batches(WORKERS, MOST), 2),
        lambda: round.local(other, make_batches(WORKERS, MOST), 2),
        lambda: round.exchange(other),
        lambda: round.mean_params(other),
        lambda: round.worker_params(other, 0),
        lambda: round.consensus_distance(other),
    ):
        with raises(ValueError, "must be of the 4 workers of this round", "shape (8,)", "round.init("):
            call()


@pytest.mark.parametrize("worker", [4, -1, 1.5, 1.0, True, None, "0"])
def test_no_such_worker(worker):
    round = round_of()
    with raises(ValueError, f"worker must be in 0..3, got {worker!r}", "Count from 0"):
        round.worker_params(round.init(make_params()), worker)


# A call -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "parts"),
    [
        (0, ("local_steps must be a whole number >= 1, got 0", "at least one step")),
        (-2, ("local_steps must be a whole number >= 1, got -2",)),
        (1.5, ("local_steps must be a whole number >= 1, got 1.5",)),
        ([1, 2, 0, 3], ("local_steps must be a whole number >= 1, got 0",)),
        ([1, 2, 3], ("one for each of the 4 workers, got 3 numbers", "Give each worker its own")),
        ([1] * 5, ("one for each of the 4 workers, got 5 numbers",)),
        ([1, 2, 3, 4], ("at most the 3 steps that batches hold, got 4", "Give more batches")),
    ],
    ids=str,
)
def test_bad_numbers_of_steps(steps, parts):
    """Case 14 too: a worker with fewer batches than steps is an error, not a wait."""
    round = round_of()
    with raises(ValueError, *parts):
        round(round.init(make_params()), make_batches(WORKERS, MOST), steps)


def test_steps_that_do_not_fit_the_method():
    round = round_of(delay=2)
    with raises(ValueError, "must be above the delay of 2 steps, got 2", "smaller delay"):
        round(round.init(make_params()), make_batches(WORKERS, MOST), [3, 3, 2, 3])
    round = round_of(gj.dadam(axis_name="worker"))
    with raises(ValueError, "must be 1 for this outer optimizer, got 2", "local_dadam"):
        round(round.init(make_params()), make_batches(WORKERS, MOST), 2)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            lambda b: {**b, "scale": b["scale"][:2]},
            ("with 4 workers, got shape (2, 3, 2) in 'scale'", "Stack"),
        ),
        (lambda b: {**b, "scale": np.float32(1)}, ("with 4 workers, got shape () in 'scale'",)),
        (lambda b: {**b, "scale": b["scale"][:, :2]}, ("equally many steps", "'scale': 2", "Cut or pad")),
    ],
)
def test_bad_batches(change, parts):
    round = round_of()
    with raises(ValueError, *parts):
        round(round.init(make_params()), change(make_batches(WORKERS, MOST)), 2)


def test_local_steps_that_change_their_trees():
    batches = np.ones((2, 1), np.float32)

    def call(step):
        round = gj.make_round(
            gj.LocalStep(lambda p: jnp.zeros(2), step), gj.gasloc(axis_name="worker"), make_mesh(2)
        )
        round(round.init({"w": jnp.ones(2)}), batches, 1)

    with raises(
        TypeError, "keep shapes and dtypes of its parameters", "'w' went from float32[2] to bfloat16[2]"
    ):
        call(lambda p, s, b: ({"w": p["w"].astype(jnp.bfloat16)}, s, {}))
    with raises(TypeError, "keep shapes and dtypes of its inner state", "float32[2] to float32[1]"):
        call(lambda p, s, b: (p, s[:1], {}))
    with raises(TypeError, "keep the structure of its inner state"):
        call(lambda p, s, b: (p, (s, s), {}))
    with raises(ValueError, "metrics of a local step must be scalars, got shape (2,) for 'loss'"):
        call(lambda p, s, b: (p, s, {"loss": p["w"]}))


@pytest.mark.parametrize(("delay", "first", "second"), [(0, "local", "exchange"), (1, "exchange", "local")])
def test_halves_out_of_turn(delay, first, second):
    """Twice the first half would silently drop what the first time did."""
    step = gj.LocalStep(lambda params: (), lambda params, state, batch: (params, state, {}))
    mesh = make_mesh(2)
    round = gj.make_round(step, gj.gasloc(axis_name="worker"), mesh, delay=delay)
    batches = np.ones((2, 2), np.float32)
    calls = {"local": lambda s: round.local(s, batches, 2)[0], "exchange": round.exchange}
    state = round.init({"w": jnp.ones(2)})
    turn = f"halves of this round are {first} and then {second}, got a state"
    with raises(ValueError, turn, "before the first. Call them in turn"):
        calls[second](state)
    state = calls[first](state)
    for call in (calls[first], lambda s: round(s, batches, 2)):
        with raises(ValueError, turn, "after the first"):
            call(state)
    calls[second](state)
