"""Rounds of all workers as jitted programs under shard_map. Source: GASLoC (arXiv 2606.11081).

Everything a worker owns is a global array with a leading axis W, sharded over the worker axis; the specs are made here.
The number of local steps is another one on each worker (a loop with a trip count of its own), and the graph of a round is
chosen on the device: one compile for the whole run.
"""

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gasloc_jax._checks import check_floating
from gasloc_jax._elastic import resized_state
from gasloc_jax._inputs import check_batches, place, replicated, steps_of_workers
from gasloc_jax._outer import OuterOptimizer
from gasloc_jax._preflight import check_collectives, check_start
from gasloc_jax._specs import batch_spec, state_specs
from gasloc_jax._worker_round import RoundState, WorkerRound

_WHOLE = PartitionSpec()


class Round:
    """A round of all workers; made by `make_round`."""

    def __init__(self, worker: WorkerRound, mesh: Mesh, axis_name: str):
        self.worker, self.mesh, self.axis_name = worker, mesh, axis_name
        self.num_workers = int(mesh.shape[axis_name])
        self.island_size = mesh.size // self.num_workers
        self._over_workers = PartitionSpec(axis_name)
        # Rounds dispatched ahead on several virtual CPU devices of a process have been seen to wait forever for each
        # other's threads in a collective. There, a round begins when the last one has ended.
        local = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        self._waits = len(local) > 1 and local[0].platform == "cpu"
        self._bytes: int | None = None
        self._programs: dict[str, Any] = {}
        self._readers: dict[str, Any] = {}
        self._placed_steps: dict[tuple[int, ...], jax.Array] = {}

    # Rounds -------------------------------------------------------------------------------------------------------

    def init(self, params: Any) -> RoundState:
        """Checks the parameters and makes the state of all workers, each worker's on its own devices.

        Communicates 4 bytes per leaf and device.

        Args:
          params: one tree of floating-point arrays, the same on all processes.

        Raises:
          TypeError: a leaf is not floating-point.
          ValueError: workers start from different parameters, a parameter is not finite, the topology is for another
            number of workers, or there are fewer layers than fragments.
        """
        self._check_params(params)
        params = replicated(params, self.mesh)
        check_start(params, self.mesh, self.axis_name)
        specs = self.specs(jax.eval_shape(self._mapped(self.worker.init, _WHOLE, _WHOLE), params))
        return jax.jit(self._mapped(self.worker.init, _WHOLE, specs))(params)

    def __call__(
        self, state: RoundState, batches: Any, local_steps: int | Sequence[int]
    ) -> tuple[RoundState, dict[str, Any]]:
        """One round. `state` is donated: use the returned one.

        Args:
          state: as returned by `init` or the previous round.
          batches: a tree of arrays (W, H_max, batch, ...): step i of worker n takes [n, i], an island splits the batch
            axis over its devices. Global jax.Arrays (see `batch_sharding`), or NumPy arrays that every process has whole.
          local_steps: H, or a list of each worker's H_i; all processes must give the same.

        Returns:
          (state, metrics). Metrics are arrays (W,): the means of the step's own metrics over each worker's own steps,
          local_steps, and skipped, 1 where this round's steps were dropped; and wire_bytes, a Python int.

        Raises:
          ValueError: a state of another number of workers; fewer than 1 local steps, more than the batches hold, or not
            more than the delay; a list of another length than W; batches that do not fit workers and islands. All before
            anything is compiled.
        """
        self._check_half(state, begun=False)
        batches, steps = self.place(batches), self._steps(local_steps, batches)
        return self._with_bytes(self._program("round", state, batches)(state, batches, steps))

    def local(
        self, state: RoundState, batches: Any, local_steps: int | Sequence[int]
    ) -> tuple[RoundState, dict[str, Any]]:
        """The local half of a round as a program of its own, so that a driver can time it; arguments as of the round.

        It comes first without a delay, and second with one. Nothing is communicated between workers.
        """
        self._check_half(state, begun=self.worker.delay > 0)
        batches, steps = self.place(batches), self._steps(local_steps, batches)
        # What only goes in is not donated: it has no output to turn into.
        state, arrival = state._replace(arrival=None), state.arrival
        return self._with_bytes(self._program("local", state, batches)(state, batches, steps, arrival))

    def exchange(self, state: RoundState) -> RoundState:
        """The exchanging half of a round as a program of its own; see `local`. Bytes: `wire_bytes`."""
        self._check_half(state, begun=self.worker.delay == 0)
        anchor = None
        if not self.worker.keeps_anchor:
            state, anchor = state._replace(anchor=None), state.anchor
        return self._program("exchange", state)(state, anchor)

    def resize(self, state: RoundState) -> RoundState:
        """A state of another number of workers for those of this round; between two rounds, such as at a restart.

        The mean over the workers of the parameters stays, to a rounding: who joins starts at it, and the drift of those that
        leave, the last ones, goes to those that stay. See gasloc_jax/_elastic.py for the other fields. Communicates what the
        arrays' shardings ask for, once.

        Args:
          state: of a round that was made alike but for the mesh; its arrays may lie anywhere on the devices of this mesh.

        Raises:
          ValueError: the state stands between the halves of a round.
        """
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params)
        like = self.abstract_state(one)
        shardings = jax.tree.map(lambda x: x.sharding, like)
        return jax.device_put(resized_state(state, like), shardings)

    # Data ---------------------------------------------------------------------------------------------------------

    def place(self, batches: Any) -> Any:
        """Host arrays as global arrays, each worker's part on its devices; jax.Arrays are left as they are.

        Raises:
          ValueError: they do not fit workers and islands.
        """
        check_batches(batches, self.num_workers, self.island_size)
        sharding = self.batch_sharding
        return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else place(x, sharding), batches)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Where the leaves of `batches` lie, for `jax.make_array_from_process_local_data`."""
        return NamedSharding(self.mesh, batch_spec(self.axis_name, self.worker.inner_axes))

    # The model and its figures ------------------------------------------------------------------------------------

    def mean_params(self, state: RoundState) -> Any:
        """The mean over workers of their parameters, replicated: the model to evaluate or export.

        Communicates one all-reduce of the parameters.
        """

        def mean(tree):
            total = lax.psum(jax.tree.map(lambda x: x[0].astype(jnp.float32), tree), self.axis_name)
            return jax.tree.map(lambda x, like: (x / self.num_workers).astype(like.dtype), total, tree)

        return self._read("mean", mean, state)

    def worker_params(self, state: RoundState, worker: int) -> Any:
        """One worker's parameters, replicated. Communicates one all-reduce of the parameters.

        Raises:
          ValueError: there is no such worker.
        """
        whole = isinstance(worker, numbers.Integral) and not isinstance(worker, bool)
        if not whole or not 0 <= worker < self.num_workers:
            raise ValueError(
                f"worker must be in 0..{self.num_workers - 1}, got {worker!r}. Count from 0, in whole numbers."
            )

        def pick(tree, worker):
            mine = lax.axis_index(self.axis_name) == worker
            return lax.psum(
                jax.tree.map(lambda x: jnp.where(mine, x[0], 0).astype(x.dtype), tree), self.axis_name
            )

        return self._read("pick", pick, state, np.int32(worker))

    def consensus_distance(self, state: RoundState) -> jax.Array:
        """sqrt(mean_i |theta^i - mean|^2), float32 (): how far the workers are from their mean.

        Communicates one all-reduce of the parameters.
        """

        def distance(tree):
            total = jnp.zeros((), jnp.float32)
            for x in jax.tree.leaves(tree):
                x = x[0].astype(jnp.float32)
                total += jnp.sum(jnp.square(x - lax.psum(x, self.axis_name) / self.num_workers))
            return jnp.sqrt(lax.psum(total, self.axis_name) / self.num_workers)

        return self._read("distance", distance, state)

    def wire_bytes(self, params: Any) -> int:
        """Bytes that one worker (all its devices together) sends in a round.

        Args:
          params: the parameters or their ShapeDtypeStructs, without the axis W.

        Returns:
          The closed form; 0 for an outer optimizer that was wrapped by optax and cannot tell.
        """
        if not isinstance(self.worker.outer, OuterOptimizer):
            return 0
        take = lambda tree: self.worker.fragments.take(tree, jnp.int32(0))  # noqa: E731
        return self.worker.outer.bytes_per_round(jax.eval_shape(take, params), self.num_workers)

    # Specs and programs -------------------------------------------------------------------------------------------

    def specs(self, state: RoundState) -> RoundState:
        """PartitionSpecs of a state, as a prefix of its tree."""
        return state_specs(state, self.axis_name, self.worker.inner_axes, self.worker.fragments.count)

    def abstract_state(self, params: Any) -> RoundState:
        """The state's ShapeDtypeStructs with their shardings, for a checkpoint's restore; nothing is allocated."""
        self._check_params(params)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
        specs = self.specs(jax.eval_shape(self._mapped(self.worker.init, _WHOLE, _WHOLE), like))
        state = jax.eval_shape(self._mapped(self.worker.init, _WHOLE, specs), like)

        def shard(spec, part):
            sharding = NamedSharding(self.mesh, spec)
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part)

        return jax.tree.map(shard, specs, state, is_leaf=lambda x: isinstance(x, PartitionSpec))

    def _mapped(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        # check_vma=False: gradients stay those of the device, also where parameters are equal over an island.
        return jax.shard_map(fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _program(self, name: str, state: RoundState, batches: Any = None) -> Callable:
        if self._waits:
            jax.block_until_ready(state.round)
        if name in self._programs:
            return self._programs[name]
        specs, own, worker = self.specs(state), self._over_workers, self.worker
        fn: Callable
        if name == "round":
            fn = worker.round
            in_specs, out_specs = (specs, self.batch_sharding.spec, own), (specs, own)
        elif name == "local":
            fn = lambda state, batches, steps, arrival: worker.local(  # noqa: E731
                state._replace(arrival=arrival), batches, steps
            )
            in_specs, out_specs = (specs, self.batch_sharding.spec, own, own), (specs, own)
        else:
            fn = lambda state, anchor: worker.exchange(  # noqa: E731
                state if worker.keeps_anchor else state._replace(anchor=anchor)
            )
            in_specs, out_specs = (specs, own), specs
        jitted = jax.jit(self._mapped(fn, in_specs, out_specs), donate_argnums=0)

        def first_call(*args):
            inner_axes = () if name == "exchange" else worker.inner_axes
            check_collectives(
                jitted.trace(*args).jaxpr,
                self.axis_name,
                tuple(axis for axis in inner_axes if self.mesh.shape[axis] > 1),
                exchanges=name != "local" and self._must_exchange(),
            )
            self._programs[name] = jitted
            return jitted(*args)

        return first_call

    def _must_exchange(self) -> bool:
        outer = self.worker.outer
        if isinstance(outer, OuterOptimizer):
            return self.num_workers > 1 and any(g.messages for g in outer.pool(self.num_workers).graphs)
        return self.num_workers > 1

    def _read(self, name: str, fn: Callable, state: RoundState, *args: Any) -> Any:
        self._check_workers(state)
        if name not in self._readers:
            in_specs = (self._over_workers, *[_WHOLE] * len(args))
            self._readers[name] = jax.jit(self._mapped(fn, in_specs, _WHOLE))
        out = self._readers[name](state.params, *args)
        return jax.block_until_ready(out) if self._waits else out

    def _with_bytes(self, result: tuple[RoundState, dict]) -> tuple[RoundState, dict[str, Any]]:
        state, metrics = result
        if self._bytes is None:
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params)
            self._bytes = self.wire_bytes(like)
        return state, metrics | {"wire_bytes": self._bytes}

    # What is given ------------------------------------------------------------------------------------------------

    def _check_params(self, params: Any) -> None:
        check_floating(params)
        self.worker.fragments.check(params)

    def _check_workers(self, state: RoundState) -> None:
        if jnp.shape(state.round) != (self.num_workers,):
            raise ValueError(
                f"a state must be of the {self.num_workers} workers of this round, got one whose `round` has shape "
                f"{jnp.shape(state.round)}. Start anew from its mean: round.init(its_own_round.mean_params(state))."
            )

    def _check_half(self, state: RoundState, begun: bool) -> None:
        """A round's halves alternate; with fragments and no delay a state does not tell them apart."""
        self._check_workers(state)
        worker = self.worker
        found = state.arrival is not None or (state.anchor is not None and not worker.keeps_anchor)
        if found != begun and (worker.delay or not worker.keeps_anchor):
            first, second = ("exchange", "local") if worker.delay else ("local", "exchange")
            raise ValueError(
                f"the halves of this round are {first} and then {second}, got a state "
                f"{'after' if found else 'before'} the first. Call them in turn."
            )

    def _steps(self, local_steps: Any, batches: Any) -> jax.Array:
        """int32 (W,) over the workers."""
        steps = steps_of_workers(
            local_steps,
            num_workers=self.num_workers,
            held=jnp.shape(jax.tree.leaves(batches)[0])[1],
            delay=self.worker.delay,
            wanted=getattr(self.worker.outer, "local_steps", None),
        )
        if steps not in self._placed_steps:
            # Only the last ones are kept: numbers of steps that are adapted may take many values.
            placed = place(np.array(steps, np.int32), NamedSharding(self.mesh, self._over_workers))
            self._placed_steps = {steps: placed}
        return self._placed_steps[steps]
