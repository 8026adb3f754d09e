"""The methods of bench_comm.py as programs of one worker: whole step or round, the same without its messages, compute alone.

"Without its messages" is the same program traced with every collective replaced by what costs nothing on a network: what a
worker sends comes back to it. So the time of the rest is measured, not guessed.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

import gasloc_jax
import gasloc_jax._round as _round_checks
import models
import scape_jax
from training.evaluate import place
from training.mesh import AXIS_NAME, WORKER_AXIS
from training.simulate import METHODS

LATE = {"scape_d0.1_late": "scape_d0.1_bitmap"}  # masks gathered behind the gradients, for bench_overlap.py

Batches = Callable[[], dict[str, np.ndarray]]  # this worker's rows of the next global batch


def _late(tx: Any) -> Any:
    """SCAPE whose masks are gathered only when the gradients are there, instead of from the start of the step."""

    def apply(grads: Any, state: Any, params: Any, **extra: Any) -> Any:
        # Zero, which only the device knows: a product with 0 may be NaN, so XLA keeps it.
        zero = sum(x.reshape(-1)[0] * 0 for x in jax.tree.leaves(grads)).astype(jnp.uint32)
        own = jax.tree.map(lambda words: words ^ zero, optax.tree.get(state, "next_mask"))
        return tx.apply(grads, optax.tree.set(state, next_mask=own), params, **extra)

    late = copy.copy(tx)
    late.apply = apply
    return late


def together() -> None:
    """Waits for all workers; a few bytes."""
    multihost_utils.sync_global_devices("bench_comm")


@contextlib.contextmanager
def without_messages(num_workers: int) -> Iterator[None]:
    """What is traced inside does all that it would do, but for the collectives: each hands back what it was given."""

    def gather(x: Any, axis_name: Any, *, tiled: bool = False, **_: Any) -> Any:
        def one(leaf: jax.Array) -> jax.Array:
            return (
                jnp.tile(leaf, num_workers) if tiled else jnp.broadcast_to(leaf, (num_workers, *leaf.shape))
            )

        return jax.tree.map(one, x)

    def psum(x: Any, *_: Any, axis_index_groups: Any = None, **__: Any) -> Any:
        # In a pair, as if the other had the same: pallas_kernels.gloo.swap takes its own out again.
        return jax.tree.map(lambda w: w + w, x) if axis_index_groups else x

    same = lambda x, *_, **__: x  # noqa: E731
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(lax, "psum", psum))
        for name in ("pmean", "ppermute", "all_to_all"):
            stack.enter_context(mock.patch.object(lax, name, same))
        stack.enter_context(mock.patch.object(lax, "all_gather", gather))
        stack.enter_context(mock.patch.object(_round_checks, "check_collectives"))  # misses them, rightly
        yield


@dataclasses.dataclass
class Measured:
    """What bench_comm.py runs on every worker; each call returns when this worker is done.

    Attributes:
      whole: one step or round.
      alone: the same without messages.
      compute: the gradients of a step, or all local steps of a round.
      bytes: that a worker sends in a step or round, by the library's closed form.
      steps: inner steps in one call.
    """

    whole: Callable[[], Any]
    alone: Callable[[], Any]
    compute: Callable[[], Any]
    bytes: int
    steps: int


def make(name: str, config: models.LlamaConfig, mesh: Mesh, batches: Batches, local_steps: int) -> Measured:
    """Compiles the method's programs; every process calls it for the same method, of simulate.METHODS or of `LATE`."""
    if name in LATE:
        return _step(_late(METHODS[LATE[name]].make()), config, mesh, batches)
    method = METHODS[name]
    if method.in_rounds:
        return _round(method.make(), method.fragments, config, mesh, batches, local_steps)
    return _step(method.make(), config, mesh, batches)


class _Steps:
    """A training step with the parameters and the state that it takes over and hands on."""

    def __init__(self, step: scape_jax.TrainStep, params: Any, opt_state: Any, batch: Any):
        self.step, self.batch = step, batch
        self.params, self.opt_state = params, opt_state

    def __call__(self) -> Any:
        self.params, self.opt_state, metrics = self.step(self.params, self.opt_state, self.batch)
        return jax.block_until_ready(metrics)


def _step(tx: Any, config: models.LlamaConfig, mesh: Mesh, batches: Batches) -> Measured:
    loss_fn, workers = models.loss_fn(config), int(mesh.size)
    mesh = Mesh(mesh.devices, (AXIS_NAME,), axis_types=mesh.axis_types)
    batch = place(batches(), mesh, AXIS_NAME)
    make_step = lambda: scape_jax.make_train_step(loss_fn, tx, mesh, axis_name=AXIS_NAME)  # noqa: E731
    step = make_step()
    params = step.place(models.init_params(config, 0))
    whole = _Steps(step, params, step.init(params), batch)
    for _ in range(1 + getattr(tx, "final_count", 0)):
        whole()
    silent = make_step()
    silent.init(
        params := jax.tree.map(jnp.copy, whole.params)
    )  # checks that messages are sent, so outside of the block
    alone = _Steps(silent, params, jax.tree.map(jnp.copy, whole.opt_state), batch)
    with without_messages(workers):
        alone()
    gradients = jax.jit(
        jax.shard_map(
            lambda params, batch: jax.tree.map(
                lambda g: g[None], scape_jax.loss_and_grads(loss_fn, params, batch, 1)
            ),
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(AXIS_NAME)),
            out_specs=PartitionSpec(AXIS_NAME),
            check_vma=False,
        )
    )
    params = jax.tree.map(jnp.copy, whole.params)
    compute = lambda: jax.block_until_ready(gradients(params, batch))  # noqa: E731
    compute()
    return Measured(whole, alone, compute, step.wire_bytes().total_bytes, 1)


def _round(
    outer: gasloc_jax.OuterOptimizer,
    fragments: int,
    config: models.LlamaConfig,
    mesh: Mesh,
    batches: Batches,
    local_steps: int,
) -> Measured:
    mesh = Mesh(mesh.devices, (WORKER_AXIS,), axis_types=mesh.axis_types)
    local = gasloc_jax.make_local_step(models.loss_fn(config), optax.adamw(1e-3))
    params = models.init_params(config, 0)
    read = np.stack([batches()["tokens"] for _ in range(local_steps)])[None]

    def make() -> tuple[gasloc_jax.Round, Callable[[], Any]]:
        run = gasloc_jax.make_round(local, outer, mesh, fragments=fragments)
        held = [run.init(params)]
        tokens = {"tokens": jax.make_array_from_process_local_data(run.batch_sharding, read)}

        def one() -> None:
            held[0], _ = jax.block_until_ready(run(held[0], tokens, local_steps))

        one()
        return run, one

    run, whole = make()
    with without_messages(int(mesh.size)):
        _, alone = make()
    steps_alone = jax.jit(
        jax.shard_map(
            lambda params, tokens: _steps_alone(local, params, {"tokens": tokens[0]}),
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(WORKER_AXIS)),
            out_specs=PartitionSpec(WORKER_AXIS),
            check_vma=False,
        )
    )
    tokens = jax.make_array_from_process_local_data(run.batch_sharding, read)
    compute = lambda: jax.block_until_ready(steps_alone(params, tokens))  # noqa: E731
    compute()
    return Measured(whole, alone, compute, run.wire_bytes(params), local_steps)


def _steps_alone(local: gasloc_jax.LocalStep, params: Any, batches: Any) -> Any:
    """The parameters after all local steps of a worker, with an axis W."""

    def one(carry: Any, batch: Any) -> tuple[Any, None]:
        params, state = carry
        params, state, _ = local.step(params, state, batch)
        return (params, state), None

    (params, _), _ = lax.scan(one, (params, local.init(params)), batches)
    return jax.tree.map(lambda x: x[None], params)
