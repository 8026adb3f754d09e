"""The whole training step under shard_map, so that a user never writes a PartitionSpec.

Gradients stay local to each worker; the optimizer owns the exchange. Step and optimizer are one jitted program, so that
XLA can hide the gather of masks behind forward and backward.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scape_jax import _exchange as ex
from scape_jax._ahead import Ahead
from scape_jax._checks import check_whole_number
from scape_jax._preflight import check_equal_on_workers, check_exchange
from scape_jax._state_specs import state_specs
from scape_jax._telemetry import telemetry
from scape_jax._wire import (
    WireBytes,
    collective_operand_bytes,
    ring_all_gather_bytes,
    ring_all_reduce_bytes,
    wire_bytes,
)
from scape_jax._worker_step import check_batch, worker_step
from scape_jax._worker_types import axes_of


class TrainStep:
    """One training step on all workers; made by `make_train_step`."""

    def __init__(self, loss_fn, tx, mesh, axis_name, accumulate, with_telemetry):
        names = axes_of(axis_name)
        missing = [n for n in names if n not in mesh.axis_names]
        if missing or not names:
            raise ValueError(
                f"axis_name must name the workers' axis of the mesh, got {(missing or [axis_name])[0]!r}; the "
                f"mesh has {tuple(mesh.axis_names)}. Use one of these; one worker is an axis of size 1."
            )
        check_whole_number("accumulate", accumulate, 1, "1 is no accumulation.")
        self.mesh, self.axis_name = mesh, axis_name
        self.num_workers = int(np.prod([mesh.shape[n] for n in names]))
        self.accumulate = accumulate
        self.tx = tx
        self._loss_fn = loss_fn
        self._with_telemetry = with_telemetry
        self._tx_update = optax.with_extra_args_support(tx).update
        self._programs: dict[int | str | None, Any] = {}
        self._ahead: dict[int | None, Ahead] = {}  # programs of the above that are being compiled
        self._specs: Any = None
        self._params_like: Any = None
        self._wire: dict[int | None, WireBytes] = {}
        self._last_count: Any = None
        self._steady = False
        self._steps_taken = 0  # as far as the host knows; read from the state until the density is final

    # What the user calls -------------------------------------------------------------------------------------------

    def init(self, params: Any) -> Any:
        """Checks the parameters and makes the optimizer state, every worker's buffers on its own device.

        Args:
          params: a tree of floating-point arrays, equal on all workers.

        Returns:
          The optimizer state; per-worker buffers have a leading axis W.

        Raises:
          TypeError: a leaf is not floating-point. ValueError: workers hold different parameters, or `tx` exchanges nothing.
        """
        params = self.place(params)
        self._prepare(params)
        check_equal_on_workers(params, self.mesh, self.axis_name)
        return jax.jit(self._mapped(self.tx.init, PartitionSpec(), self._specs))(params)

    def place(self, params: Any) -> Any:
        """The parameters as float arrays replicated over the mesh; a no-op where they are that already."""
        replicated = NamedSharding(self.mesh, PartitionSpec())

        def put(x):
            if isinstance(x, jax.Array) and x.sharding == replicated and not x.weak_type:
                return x
            # The step returns strong types: a weak one at the start would compile it twice.
            return jax.device_put(jnp.asarray(x, jnp.result_type(x)), replicated)

        return jax.tree.map(put, params)

    def __call__(self, params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        """One step. `params` and `opt_state` are donated: use the returned ones.

        Args:
          params, opt_state: as returned by `init` and the previous step.
          batch: a tree of arrays with a leading global batch axis, divisible by W * accumulate; worker n takes the n-th
            contiguous part, in `accumulate` micro-batches.

        Returns:
          (params, opt_state, metrics); metrics are scalars on the devices: loss (mean over workers), grad_norm,
          clip_factor, skipped, and with telemetry=True those of `telemetry` and wire_bytes, a Python int.

        Raises:
          ValueError: the batch does not divide, before anything is compiled.
        """
        params = self._ready(params, batch)
        level = self._level(opt_state)
        if level not in self._programs:
            self._programs[level] = self._compile_later(level)
        if level in self._ahead:
            self._ahead.pop(level).wait()
        params, opt_state, metrics = self._programs[level](params, opt_state, batch)
        self._last_count = self._count(opt_state)
        self._steps_taken += 1
        if self._with_telemetry:
            metrics["wire_bytes"] = self.wire_bytes(self._steps_taken).total_bytes
        return params, opt_state, metrics

    def compile_ahead(
        self,
        params: Any,
        opt_state: Any,
        batch: Any,
        *,
        steps: int | None = None,
        on_wait: Callable[[], Any] | None = None,
    ) -> bool:
        """Before the first step: compiles the program for the time after the density warm-up, in the background.

        A sparse method has two programs: one that chooses among the densities of the warm-up, and a faster one for the
        final density, which is otherwise compiled in the middle of the run. The thread also traces loss_fn.

        Args:
          params, opt_state, batch: of the step to come; only their types and shardings are used.
          steps: how many steps will be taken; where they do not get past the warm-up nothing is compiled.
          on_wait: called without arguments if a step has to wait for the second program.

        Returns:
          Whether a program is being compiled: not where there is only one, or the warm-up is over already.

        Raises:
          As the step. What goes wrong in the background is raised by the step that needs the program.
        """
        params = self._ready(params, batch)
        final = getattr(self.tx, "final_level", 0)
        if final == 0 or final in self._programs or self._level(opt_state) is not None:
            return False
        if steps is not None and self._steps_taken + steps <= self.tx.final_count:
            return False
        self._programs[final] = self._compile_later(final)
        self._ahead[final] = Ahead(self._programs[final], (params, opt_state, batch), on_wait)
        return True

    def lower(self, params: Any, opt_state: Any, batch: Any, *, final: bool = False) -> jax.stages.Lowered:
        """The step's program before XLA has compiled it, to be looked at or compiled elsewhere; nothing is run.

        Args:
          params, opt_state, batch: of a step, or their ShapeDtypeStructs with shardings.
          final: of the final density, without the choice among those of the warm-up.

        Raises:
          ValueError: the batch does not divide.

        Example:
          >>> import jax, jax.numpy as jnp, scape_jax
          >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
          >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
          >>> step = scape_jax.make_train_step(loss_fn, scape_jax.adams(1e-3, axis_name="data"), mesh)
          >>> params = {"w": jnp.ones((4, 2))}
          >>> lowered = step.lower(params, step.init(params), jnp.ones((8, 4)))
          >>> lowered.compile().memory_analysis().argument_size_in_bytes > 0
          True
        """
        check_batch(batch, self.num_workers, self.accumulate)
        if self._specs is None:
            self._prepare(params)
        level = getattr(self.tx, "final_level", 0) if final else 0
        return self._compile_later(level or None).lower(params, opt_state, batch)

    def telemetry(self, opt_state: Any) -> dict[str, jax.Array]:
        """Figures about masks and residuals, see `scape_jax.telemetry`; {} for dense methods."""
        if "telemetry" not in self._programs:
            fn = functools.partial(telemetry, axis_name=self.axis_name)
            specs = state_specs(opt_state, self.axis_name)
            self._programs["telemetry"] = jax.jit(self._mapped(fn, specs, PartitionSpec(), wrap=True))
        return self._programs["telemetry"](opt_state)

    def wire_bytes(self, step: int | None = None) -> WireBytes:
        """What one worker sends in step number `step` (from 1; None: after warm-up). Needs `init` or one step before.

        The closed form where `tx` is one of scape_jax's optimizers, else counted from the update's jaxpr.
        """
        if self._params_like is None:
            raise ValueError("wire_bytes needs the parameters' shapes: call init(params) first.")
        if hasattr(self.tx, "wire"):
            # Past the warm-up the steps repeat with the period of the mask.
            first = self.tx.final_count + 1
            if step is not None and step > first:
                step = first + (step - first) % self.tx.mask_every
            if step not in self._wire:
                self._wire[step] = self.tx.wire(self._params_like, num_workers=self.num_workers, step=step)
            return self._wire[step]
        found = self.collective_bytes()
        dense = wire_bytes(self._params_like, num_workers=self.num_workers, method="all_reduce")
        return WireBytes(
            all_reduce_operand=found["all_reduce"],
            all_gather_operand=found["all_gather"],
            values_bytes=ring_all_reduce_bytes(found["all_reduce"], self.num_workers),
            mask_bytes=ring_all_gather_bytes(found["all_gather"], self.num_workers),
            dense_bytes=0,
            dense_total_bytes=dense.dense_total_bytes,
            density=float("nan"),
        )

    def collective_bytes(self, level: int | None = None) -> dict[str, int]:
        """Operand bytes of the collectives in the update's jaxpr, see `collective_operand_bytes`."""
        fn = self._mapped(
            self._tx_update, (PartitionSpec(), self._specs, PartitionSpec()), (PartitionSpec(), self._specs)
        )
        return collective_operand_bytes(
            fn, self._params_like, self._state_like, self._params_like, level=level
        )

    # How it is done ------------------------------------------------------------------------------------------------

    def _mapped(self, fn: Callable, in_specs: Any, out_specs: Any, wrap: bool = False) -> Callable:
        # check_vma=False: gradients of replicated parameters stay local instead of being summed silently.
        in_specs = (in_specs,) if wrap else in_specs
        return jax.shard_map(fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _ready(self, params: Any, batch: Any) -> Any:
        check_batch(batch, self.num_workers, self.accumulate)
        params = self.place(params)
        if self._specs is None:
            self._prepare(params)
        return params

    def _prepare(self, params: Any) -> None:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        # The structure of the state is all that is wanted here; its specs follow from it.
        local = jax.eval_shape(self._mapped(self.tx.init, PartitionSpec(), PartitionSpec()), like)
        if not ex.communicating_states(local):
            raise ValueError(
                "tx must exchange gradients between workers, got a transformation that does not. Use scape_jax.scape, "
                "adams, adamw or topk, or chain scape_jax.all_reduce_gradients(axis_name) before it."
            )
        specs = state_specs(local, self.axis_name)
        state_like = jax.eval_shape(self._mapped(self.tx.init, PartitionSpec(), specs), like)
        final = getattr(self.tx, "final_level", 0)
        update = functools.partial(self._tx_update, **({"level": final} if final else {}))
        check_exchange(update, like, state_like, specs, self.mesh, self.axis_name)
        self._specs, self._params_like, self._state_like = specs, like, state_like

    def _count(self, opt_state: Any) -> Any:
        for state in ex.communicating_states(opt_state):
            if hasattr(state, "count"):
                return state.count
        return None

    def _level(self, opt_state: Any) -> int | None:
        """The density level if it is the last one for good, else None: then the program chooses by the step count.

        Once the last level is reached there is no conditional left in the program, and no host read per step: a state
        that this object returned itself is known to be past that point.
        """
        final = getattr(self.tx, "final_level", 0)
        if final == 0 or any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(opt_state)):
            return None
        count = self._count(opt_state)
        if not (self._steady and count is self._last_count):
            self._steps_taken = int(count)
            self._steady = self._steps_taken >= self.tx.final_count
        return final if self._steady else None

    def _compile_later(self, level: int | None) -> Any:
        in_specs = (PartitionSpec(), self._specs, PartitionSpec(self.axis_name))
        out_specs = (PartitionSpec(), self._specs, PartitionSpec())
        fn = functools.partial(
            worker_step,
            self._loss_fn,
            self.tx,
            accumulate=self.accumulate,
            level=level,
            telemetry_over=self.axis_name if self._with_telemetry else None,
        )
        return jax.jit(self._mapped(fn, in_specs, out_specs), donate_argnums=(0, 1))


def make_train_step(
    loss_fn: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: ex.AxisName = "data",
    accumulate: int = 1,
    telemetry: bool = False,
) -> TrainStep:
    """A jitted data-parallel training step for a transformation that exchanges gradients itself.

    Args:
      loss_fn: (params, batch) -> scalar loss, the mean over the batch it is given.
      tx: scape_jax.scape, adams, adamw, topk, or an optax chain that holds one of them, built with the same axis_name.
      mesh: a mesh that has the axis; parameters are replicated over it.
      axis_name: the workers' axis (or axes).
      accumulate: micro-batches per step and worker; their gradients are averaged before the exchange and clipped once.
      telemetry: add masks' and residuals' figures to the metrics of each step (a few scalars more on the wire).

    Returns:
      A TrainStep: `opt_state = step.init(params)`, then `params, opt_state, metrics = step(params, opt_state, batch)`.

    Raises:
      ValueError: the axis is not in the mesh, or accumulate is below 1.

    Example:
      >>> import jax, jax.numpy as jnp, scape_jax
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> step = scape_jax.make_train_step(loss_fn, scape_jax.scape(1e-3, density=0.1, axis_name="data"), mesh)
      >>> params = {"w": jnp.ones((64, 128))}
      >>> opt_state = step.init(params)
      >>> params, opt_state, metrics = step(params, opt_state, jnp.ones((8, 64)))
    """
    return TrainStep(loss_fn, tx, mesh, axis_name, accumulate, telemetry)
