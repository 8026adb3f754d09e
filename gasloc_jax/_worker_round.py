"""What one worker does in a round, in two halves: its local steps, and the exchange. Source: GASLoC (arXiv 2606.11081).

Without a delay the local half comes first. With a delay of D steps the exchange comes first, on the values that the last
round left, and its result is applied after D local steps: theta <- theta_now + (theta_outer - theta_sent).
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gasloc_jax._checks import path_name
from gasloc_jax._fragments import Fragments
from gasloc_jax._local_step import LocalStep
from gasloc_jax._outer import OuterOptimizer, any_nonfinite, once_on_cpu


class RoundState(NamedTuple):
    """All that a run is: one tree to save and to go on from. Every array has a leading axis W.

    Attributes:
      params: each worker's parameters, (W, *shape).
      anchor: the parameters as last exchanged; None where these are `params`: between rounds without fragments or delay.
      inner: the inner optimizer's state; its per-worker fields are (W, devices of an island, ...).
      outer: the outer optimizer's; with fragments each leaf has a second axis F.
      arrival: with a delay, between the halves of a round, what the exchange adds to the fragment; else None.
      round: int32 (W,), rounds done, equal on all workers.
      steps: int32 (W,), inner steps that each worker has taken.
      skipped: int32 (W,), rounds of which a worker's steps were dropped because its parameters were not finite.
    """

    params: Any
    anchor: Any
    inner: Any
    outer: Any
    arrival: Any
    round: jax.Array
    steps: jax.Array
    skipped: jax.Array


@dataclasses.dataclass(frozen=True)
class WorkerRound:
    """The two halves under shard_map; states come in and go out with an axis W of size 1.

    Attributes:
      local_step, outer, fragments, delay, drift_weight, reference_steps: as given to `make_round`.
      inner_axes: mesh axes inside a worker.
    """

    local_step: LocalStep
    outer: optax.GradientTransformationExtraArgs
    fragments: Fragments
    delay: int
    drift_weight: Literal["uniform", "steps"]
    reference_steps: int | None
    inner_axes: tuple[str, ...]

    @property
    def keeps_anchor(self) -> bool:
        """Whether parameters and anchors differ between rounds."""
        return self.fragments.count > 1 or self.delay > 0

    def init(self, params: Any) -> RoundState:
        """The state of one worker that starts from `params`."""
        outer = [
            self.outer.init(self.fragments.take(params, jnp.int32(f))) for f in range(self.fragments.count)
        ]
        return with_axis(
            RoundState(
                params=params,
                anchor=jax.tree.map(jnp.copy, params) if self.keeps_anchor else None,
                inner=self.local_step.init(params),
                outer=outer[0] if len(outer) == 1 else jax.tree.map(lambda *x: jnp.stack(x), *outer),
                arrival=None,
                round=jnp.zeros((), jnp.int32),
                steps=jnp.zeros((), jnp.int32),
                skipped=jnp.zeros((), jnp.int32),
            )
        )

    def round(self, state: RoundState, batches: Any, steps: jax.Array) -> tuple[RoundState, dict]:
        """Both halves."""
        if self.delay:
            return self.local(self.exchange(state), batches, steps)
        state, metrics = self.local(state, batches, steps)
        return self.exchange(state), metrics

    def local(self, state: RoundState, batches: Any, steps: jax.Array) -> tuple[RoundState, dict]:
        """`steps` (int32 (1,)) inner steps on batches (1, H_max, ...), and their mean metrics."""
        state, batches, steps = without_axis((state, batches, steps))
        anchor = state.anchor if self.keeps_anchor else state.params
        carry = (state.params, state.inner, self._zero_metrics(state, batches))
        if self.delay:
            params, *rest = self._run(carry, batches, 0, self.delay)
            number = self._fragment(state)
            late = jax.tree.map(jnp.add, self.fragments.take(params, number), state.arrival)
            carry = (self.fragments.put(params, late, number), *rest)
        params, inner, sums = self._run(carry, batches, self.delay, steps)

        # Steps that ended in NaN are dropped: the drift is then zero and nothing spreads. A loop of 0 or 1 turns leaves
        # big buffers where they are, which a conditional does not promise.
        bad = any_nonfinite(params)
        drop = lambda _, carry: (anchor, jax.tree.map(_zero_where_nonfinite, carry[1]))  # noqa: E731
        params, inner = lax.fori_loop(0, bad, drop, (params, inner))
        if self.drift_weight == "steps":
            weight = steps.astype(jnp.float32) / self.reference_steps
            params = jax.tree.map(lambda a, p: (a + weight * (p - a)).astype(p.dtype), anchor, params)
        metrics = {name: total / steps for name, total in sums.items()}
        if self.inner_axes:
            metrics = lax.pmean(metrics, self.inner_axes)
        state = state._replace(
            params=params,
            anchor=anchor,
            inner=inner,
            arrival=None,
            round=state.round + 1 if self.delay else state.round,
            steps=state.steps + steps,
            skipped=state.skipped + bad,
        )
        return with_axis((state, metrics | {"local_steps": steps, "skipped": bad}))

    def exchange(self, state: RoundState) -> RoundState:
        """The outer step of this round's fragment."""
        state = without_axis(state)
        number = self._fragment(state)
        sent = self.fragments.take(state.params, number)
        anchor = self.fragments.take(state.anchor, number)
        outer = self._outer_of(state.outer, number)
        if self.fragments.count > 1:
            # Read before anything is written back, which then needs no copy of the whole.
            sent, anchor, outer = once_on_cpu((sent, anchor, outer))
        # Non-finite parameters were dropped by the local half.
        updates, outer = self.outer.update(
            jax.tree.map(jnp.subtract, anchor, sent),
            outer,
            anchor,
            round=state.round,
            turn=lax.div(state.round, jnp.int32(self.fragments.count)),
            nonfinite=jnp.zeros((), jnp.int32),
            **({"proposal": sent} if isinstance(self.outer, OuterOptimizer) else {}),
        )
        new = optax.apply_updates(anchor, updates)
        state = state._replace(outer=self._put_outer(state.outer, outer, number))
        if self.keeps_anchor:
            state = state._replace(anchor=self.fragments.put(state.anchor, new, number))
        else:
            state = state._replace(anchor=None)
        if self.delay:
            return with_axis(state._replace(arrival=jax.tree.map(jnp.subtract, new, sent)))
        params = self.fragments.put(state.params, new, number)
        return with_axis(state._replace(params=params, round=state.round + 1))

    # Parts --------------------------------------------------------------------------------------------------------

    def _run(self, carry: Any, batches: Any, start: Any, stop: Any) -> Any:
        def one(i, carry):
            params, inner, sums = carry
            batch = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), batches)
            params, inner, metrics = self.local_step.step(params, inner, batch)
            return params, inner, {name: sums[name] + x.astype(jnp.float32) for name, x in metrics.items()}

        return lax.fori_loop(start, stop, one, carry)

    def _zero_metrics(self, state: RoundState, batches: Any) -> dict[str, jax.Array]:
        batch = jax.tree.map(lambda x: x[0], batches)
        params, inner, metrics = jax.eval_shape(self.local_step.step, state.params, state.inner, batch)
        for kind, before, after in (
            ("parameters", state.params, params),
            ("inner state", state.inner, inner),
        ):
            _check_same_types(kind, before, after)
        for name, x in metrics.items():
            if x.shape != ():
                raise ValueError(
                    f"metrics of a local step must be scalars, got shape {x.shape} for {name!r}. Take its mean."
                )
        return {name: jnp.zeros((), jnp.float32) for name in metrics}

    def _fragment(self, state: RoundState) -> jax.Array:
        return lax.rem(state.round, jnp.int32(self.fragments.count))

    def _outer_of(self, outer: Any, number: jax.Array) -> Any:
        if self.fragments.count == 1:
            return outer
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, 0, keepdims=False), outer)

    def _put_outer(self, outer: Any, new: Any, number: jax.Array) -> Any:
        if self.fragments.count == 1:
            return new
        return jax.tree.map(lambda x, n: lax.dynamic_update_index_in_dim(x, n, number, 0), outer, new)


def with_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def without_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _zero_where_nonfinite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _check_same_types(kind: str, before: Any, after: Any) -> None:
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise TypeError(
            f"a local step must keep the structure of its {kind}, which it changed. Return the same tree."
        )
    pairs = zip(jax.tree_util.tree_flatten_with_path(before)[0], jax.tree.leaves(after), strict=True)
    for (path, x), y in pairs:
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise TypeError(
                f"a local step must keep shapes and dtypes of its {kind}, but {path_name(path)!r} went from "
                f"{x.dtype}{list(x.shape)} to {y.dtype}{list(y.shape)}. Cast it back."
            )
