"""The step by kernels against the plain-JAX step: the same masks to the bit, the same numbers to rounding.

On CPU the operations take their references, in the order and with the buffers of the GPU; two cases run the kernels
themselves, interpreted.
"""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import scape_jax
from pallas_kernels import _dispatch
from scape_jax import _kernel_step
from tests.helpers import assert_bit_equal, assert_close, make_mesh
from tests.pallas_kernels.triton_on_cpu import needs_triton
from tests.quick_compile import quickest_compile  # noqa: F401
from tests.scape_jax.side_by_side import (
    BLOCK,
    SHAPES,
    linear_loss,
    make_batches,
    make_params,
    next_mask,
    on_host,
    one_program,
    run,
    state_of,
)

SETTINGS = {"density": 0.1, "weight_decay": 0.1, "axis_name": "data", "block_size": BLOCK}
CASES = {
    "default": {},
    "bitmap, bfloat16 payload, no decay": {
        "codec": "bitmap",
        "payload_dtype": jnp.bfloat16,
        "weight_decay": 0.0,
        "bias_correction": "momentum",
    },
    "ages, no check": {"density": 0.03, "staleness_power": 1.0, "skip_nonfinite": False},
    "warm-up, reused masks, literal clipping": {
        "density_warmup_steps": 2,
        "mask_every": 2,
        "clip_norm": 0.1,
        "clip_order": "paper",
        "bias_correction": "none",
    },
}
# One sparse leaf with a short last row, as each costs a second to compile; the default case has more.
LEAVES = {"w": (37, 19), "norm": (4, 32), "temperature": ()}


@pytest.fixture
def on_gpu(monkeypatch):
    """What the optimizer would see on a GPU; the operations still choose where the program is lowered: here."""
    monkeypatch.setattr(_kernel_step, "_on_gpu", lambda: True)


def steps(num_workers, count=3, shapes=LEAVES, **settings):
    tx = one_program(scape_jax.scape(1e-2, **(SETTINGS | settings)))
    step = scape_jax.make_train_step(linear_loss, tx, make_mesh(num_workers))
    return run(step, make_params(shapes=shapes), make_batches(8, count, shapes=shapes))


def assert_same(got, want):
    for (params, state, metrics), (want_params, want_state, want_metrics) in zip(got, want, strict=True):
        ours, theirs = (state_of(s, scape_jax.ScaleByScapeState) for s in (state, want_state))
        exact = lambda s: (s.count, s.mask, s.next_mask, s.age, s.stats.skipped)  # noqa: E731
        assert_bit_equal(exact(ours), exact(theirs))
        assert_close(params, want_params, "params")
        assert_close(ours.h, theirs.h, "params")
        assert_close(metrics, want_metrics, "params")


@pytest.mark.parametrize("case", CASES)
def test_same_masks_and_numbers(on_gpu, case):
    """Four workers; a dense step, then sparse ones, in which every worker's buffer differs."""
    shapes = SHAPES if case == "default" else LEAVES
    got = steps(4, 4, shapes, **CASES[case])
    assert_same(got, steps(4, 4, shapes, implementation="xla", **CASES[case]))


def test_only_dense_leaves(on_gpu):
    shapes = {"norm": (4, 32), "bias": (70,)}
    assert_same(steps(2, 2, shapes), steps(2, 2, shapes, implementation="xla"))


def test_one_worker(on_gpu):
    """No collective is left, and nothing else is left out."""
    assert_same(steps(1), steps(1, implementation="xla"))


@pytest.mark.parametrize("kind", ["pallas", pytest.param("triton", marks=needs_triton)])
def test_the_kernels_themselves(kind):
    """Named and interpreted, through the whole step."""
    with _dispatch.interpreted():
        got = steps(2, staleness_power=1.0, implementation=kind)
    assert_same(got, steps(2, staleness_power=1.0, implementation="xla"))


def test_bfloat16_parameters_and_gradients(on_gpu):
    """Both engines round the parameters to bfloat16 once a step; the state stays float32."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params(shapes=LEAVES))

    def some(**settings):
        tx = one_program(scape_jax.scape(1e-1, **(SETTINGS | settings)))
        step = scape_jax.make_train_step(linear_loss, tx, make_mesh(2))
        return run(step, params, make_batches(4, 3, shapes=LEAVES))

    for (got, state, _), (want, want_state, _) in zip(some(), some(implementation="xla"), strict=True):
        assert_close(got, want, "bf16")
        ours, theirs = (state_of(s, scape_jax.ScaleByScapeState) for s in (state, want_state))
        assert_bit_equal((ours.mask, ours.next_mask), (theirs.mask, theirs.next_mask))
        assert_close(ours.h, theirs.h, "params")


def updates_of(tx, check_vma=False, count=2):
    """(updates, state) of optax' interface in a user's own shard_map."""
    mesh, params = make_mesh(2), make_params(shapes=LEAVES)
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    shapes = jax.eval_shape(
        jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), params
    )
    specs = scape_jax.state_specs(shapes, "data")
    state = jax.jit(mapped(tx.init, in_specs=P(), out_specs=specs))(params)

    def step(params, state, grads):
        grads = jax.tree.map(lambda g: g[0], grads)
        return tx.update(grads, state, params)

    step = jax.jit(mapped(step, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)))
    for batch in make_batches(2, count, shapes=LEAVES):
        updates, state = step(params, state, batch)
        params = optax.apply_updates(params, updates)
    return on_host((updates, state))


UPDATES = {
    "scape": functools.partial(scape_jax.scape, 1e-2, **SETTINGS),
    "scale_by_scape": functools.partial(
        scape_jax.scale_by_scape, **{k: x for k, x in SETTINGS.items() if k != "weight_decay"}
    ),
}


@functools.cache
def plain_updates(name):
    return updates_of(UPDATES[name](implementation="xla"))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("name", UPDATES)
def test_updates_in_a_users_shard_map(on_gpu, name, check_vma):
    """Dense updates instead of parameters; under check_vma types must prove that they are equal on all workers."""
    got, state = updates_of(UPDATES[name](), check_vma)
    want, want_state = plain_updates(name)
    assert_close(got, want, "params")
    assert_bit_equal(state.mask, want_state.mask)


@pytest.mark.parametrize("value", [np.inf])
def test_a_bad_gradient_on_one_worker_changes_no_bit(on_gpu, value):
    """In an entry that nobody keeps, of the last worker: everything stays, on all."""
    tx = one_program(scape_jax.scape(1e-2, **(SETTINGS | {"staleness_power": 1.0})))
    step = scape_jax.make_train_step(linear_loss, tx, make_mesh(4))
    params, state = make_params(shapes=LEAVES), step.init(make_params(shapes=LEAVES))
    *batches, bad = make_batches(8, 3, shapes=LEAVES)
    for batch in batches:
        params, state, _ = step(params, state, batch)
    before = on_host((params, state))
    bad["w"][-1, 36, 18] = value
    params, state, metrics = step(params, state, bad)
    assert int(metrics["skipped"]) == 1
    same = lambda state: state_of(state, scape_jax.ScaleByScapeState)._replace(stats=None)  # noqa: E731
    assert_bit_equal((on_host(params), same(on_host(state))), (before[0], same(before[1])))


@functools.cache
def kept_check_step(implementation):
    tx = one_program(scape_jax.scape(1e-2, finite_check="kept", implementation=implementation, **SETTINGS))
    return scape_jax.make_train_step(linear_loss, tx, make_mesh(2))


@pytest.mark.parametrize("implementation", [None, "xla"], ids=["kernels", "xla"])
@pytest.mark.parametrize("value", [np.nan, 1e25])
def test_only_what_is_sent_is_checked(on_gpu, value, implementation):
    """finite_check="kept": in a sent entry it stops all workers, elsewhere that gradient counts as zero.

    1e25 is finite, but as a residual it would be sent next, overflow the norm, and stop this step and all that follow.
    """
    step = kept_check_step(implementation)
    first, second, third = make_batches(2, 3, shapes=LEAVES)
    params, state = make_params(shapes=LEAVES), step.init(make_params(shapes=LEAVES))
    params, state, _ = on_host(step(params, state, first))
    sent = next_mask(state_of(state, scape_jax.ScaleByScapeState), params, 2, density=0.1)["w"]
    assert 0 < sent.sum() < sent.size

    def spoilt(entry, value):
        batch = on_host(second)
        batch["w"][(1, *entry)] = value  # the second worker's gradient
        return batch

    kept, free = (tuple(np.argwhere(mask)[-1]) for mask in (sent, ~sent))
    after, after_state, metrics = on_host(step(params, state, spoilt(kept, value)))
    assert int(metrics["skipped"]) == 1
    assert_bit_equal(after, params)
    scape_state = lambda s: state_of(s, scape_jax.ScaleByScapeState)._replace(stats=None)  # noqa: E731
    assert_bit_equal(scape_state(after_state), scape_state(state))
    runs = []
    for gradient in (value, 0.0):
        run = step(params, state, spoilt(free, gradient))
        runs.append(on_host(step(*run[:2], third)))
    assert_bit_equal(*runs)
    assert int(runs[0][2]["skipped"]) == 0
    assert np.isfinite(scape_state(runs[0][1]).h["w"]).all()


# Which step is taken ----------------------------------------------------------------------------------------------


def traced_kernels(**settings):
    """Whether a traced step holds kernels."""
    tx = scape_jax.scape(1e-2, density=0.1, block_size=settings.pop("block_size", BLOCK), **settings)
    params = {"w": jnp.zeros((8, 64))}
    update = functools.partial(tx.update, level=tx.final_level)
    return "pallas_call" in str(jax.make_jaxpr(update)(params, jax.eval_shape(tx.init, params), params))


def test_kernels_are_traced_only_for_gpus(on_gpu, monkeypatch, caplog):
    """A CPU run must not pay for tracing them; a setting that no kernel takes falls back with one line."""
    assert traced_kernels()
    assert not traced_kernels(implementation="xla")
    with caplog.at_level(logging.WARNING, logger="scape_jax"):
        assert not traced_kernels(selection="leaf")
        assert not traced_kernels(selection="leaf")
        assert not traced_kernels(block_size=96)
    assert [record.message for record in caplog.records] == [
        "scape: plain JAX instead of kernels: selection='leaf', whose rows may have any length.",
        "scape: plain JAX instead of kernels: block_size=96, no power of two up to 8192.",
    ]
    monkeypatch.undo()
    assert not traced_kernels()


def test_too_many_kept_entries_for_one_payload_go_the_plain_way(on_gpu, monkeypatch):
    """Positions in the payload are int32. Here the limit is lower than what is kept."""
    monkeypatch.setattr(_kernel_step, "MAX_KEPT", 10)
    assert_same(steps(2, 2), steps(2, 2, implementation="xla"))


def test_a_named_kernel_runs_or_says_why_not():
    with pytest.raises(NotImplementedError, match="no kernel for block_size=96"):
        scape_jax.scape(1e-2, density=0.1, block_size=96, implementation="pallas")
    with pytest.raises(ValueError, match="implementation must be one of"):
        scape_jax.scape(1e-2, density=0.1, implementation="cuda")
    with pytest.raises(NotImplementedError, match="lowered for cpu"):
        steps(1, count=2, implementation="pallas")
