"""The program after the warm-up, compiled beside the first one: in a thread, once, and without changing a bit."""

import contextlib
import logging
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import scape_jax
from tests.helpers import assert_bit_equal, make_mesh
from tests.quick_compile import quickest_compile  # noqa: F401
from tests.scape_jax.contract_table import SCAPE, make_params
from tests.scape_jax.test_train_step import FINAL, WARMUP, WORKERS, batch_of, loss_fn, on_host, warm_run

ROOT = Path(__file__).parents[2]
THREAD = "compile-ahead"


def make_step(loss=loss_fn, **options):
    tx = SCAPE(**{"density_warmup_steps": WARMUP, "weight_decay": 0.01, **options}, axis_name="data")
    return scape_jax.make_train_step(loss, tx, make_mesh(WORKERS), telemetry=True)


@contextlib.contextmanager
def logged_compilations():
    """`jax.log_compiles` holds for one thread only."""
    jax.config.update("jax_log_compiles", True)
    try:
        yield
    finally:
        jax.config.update("jax_log_compiles", False)


def test_second_program_is_made_in_the_thread_and_only_there(caplog):
    """A trace or a compilation too many (another sharding, a weak type), or a missing wait, would show here.

    The thread is held until a step waits for it, so `on_wait` must come, and at the right step.
    """
    may_go_on, traced_in, waited_at = threading.Event(), [], []

    def held_loss(params, batch):
        traced_in.append(threading.current_thread().name)
        if traced_in[-1] == THREAD:
            assert may_go_on.wait(60)
        return loss_fn(params, batch)

    def on_wait():
        waited_at.append(t)
        may_go_on.set()

    step = make_step(held_loss)
    params = step.place({**make_params(), "temp": jnp.asarray(1.0)})
    state = step.init(params)
    donated, after = (params, state), []
    with caplog.at_level(logging.WARNING, logger="jax"), logged_compilations():
        assert step.compile_ahead(params, state, batch_of(1), on_wait=on_wait)
        for t in range(1, FINAL + 4):
            params, state, _ = step(params, state, batch_of(t))
            after.append(on_host(params))
    assert_bit_equal(after, warm_run().params[: len(after)])
    assert sorted(traced_in) == ["MainThread", THREAD]
    assert waited_at == [FINAL + 1]
    compiled_in = [
        r.threadName
        for r in caplog.records
        if r.getMessage().startswith("Finished XLA compilation of jit(worker_step)")
    ]
    assert sorted(compiled_in) == ["MainThread", THREAD]
    assert all(x.is_deleted() for x in jax.tree.leaves(donated) if x.size > 1)


def test_what_goes_wrong_in_the_thread_is_raised_by_the_step_that_needs_it():
    def broken_loss(params, batch):
        if threading.current_thread().name == THREAD:
            raise RuntimeError("no such program")
        return loss_fn(params, batch)

    step = make_step(broken_loss, density_warmup_steps=0)
    params = step.place(make_params())
    state = step.init(params)
    step.compile_ahead(params, state, batch_of(1))
    params, state, _ = step(params, state, batch_of(1))
    with pytest.raises(RuntimeError, match="no such program"):
        step(params, state, batch_of(2))


@pytest.mark.parametrize(("steps", "expected"), [(FINAL, False), (FINAL + 1, True)])
def test_short_run_does_not_compile_what_it_never_reaches(steps, expected):
    step = make_step(lambda params, batch: jnp.sum(params["odd"]) * jnp.mean(batch["x"]))
    params = make_params()
    assert step.compile_ahead(params, step.init(params), batch_of(1), steps=steps) is expected


def test_nothing_to_compile_where_there_is_one_program():
    run = warm_run()
    assert not run.step.compile_ahead(*run.last, batch_of(1))  # past its warm-up, and compiled already
    fresh = make_step()
    assert not fresh.compile_ahead(*jax.tree.map(jnp.copy, run.last), batch_of(1))  # resumed past it
    dense = scape_jax.make_train_step(loss_fn, scape_jax.adams(0.1, axis_name="data"), make_mesh(WORKERS))
    params = make_params()
    assert not dense.compile_ahead(params, dense.init(params), batch_of(1))


LEAVES_EARLY = """
import threading, time, jax, jax.numpy as jnp
from scape_jax._ahead import Ahead

lowered = threading.Event()

class Program:
    def lower(self, x):
        def program(x):
            for i in range(100):
                x = jnp.sin(x @ x) + i
            return x

        made = jax.jit(program).lower(x)
        lowered.set()
        return made

Ahead(Program(), (jnp.ones((64, 64)),))
lowered.wait()
time.sleep(0.3)  # now in the compiler, for about a second
assert any(thread.name == "compile-ahead" for thread in threading.enumerate())
"""


def test_process_that_ends_while_compiling_ends_well():
    """A thread that the interpreter does not wait for is torn out of the compiler, which aborts the process."""
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_EARLY], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
