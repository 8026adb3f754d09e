"""What every outer optimizer here shares: its interface, and a pseudo-gradient that is finite."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gasloc_jax._graphs import Pool
from gasloc_jax._mix import Mixer, piece_sizes
from pallas_kernels.compact.reference import materialize

# For optax.inject_hyperparams with any factory here: what is not a number that may change while training.
STATIC_ARGS = ("axis_name", "payload_dtype", "payload_block_size", "island_axis")


class OuterOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation that also knows its exchange; wrapped by optax it is an ordinary one and loses that.

    Attributes:
      mixer: what it exchanges with.
      trees_sent: payloads of the size of the parameters in a message.
      local_steps: the number of local steps that the method is defined for; None: any.
      recursion: (carried, mixed) of `Pool.growth` where the method may disagree more and more; None: it is not known.
    """

    mixer: Mixer
    trees_sent: int = 1
    local_steps: int | None = None
    recursion: tuple[Any, Any] | None = None

    @classmethod
    def made(cls, init: Callable, update: Callable, mixer: Mixer, **attributes: Any) -> "OuterOptimizer":
        optimizer = cls(init, update)
        optimizer.mixer = mixer
        for name, value in attributes.items():
            setattr(optimizer, name, value)
        return optimizer

    @property
    def axis_name(self) -> str | None:
        return self.mixer.axis_name

    @property
    def island_axis(self) -> str | None:
        return self.mixer.island_axis

    def pool(self, num_workers: int) -> Pool:
        """The graphs for W workers."""
        return self.mixer.topology.build(num_workers)

    def bytes_per_round(self, params: Any, num_workers: int) -> int:
        """Bytes that one worker (all its devices together) sends in a round; `params` may be ShapeDtypeStructs."""
        pool, sizes = self.pool(num_workers), piece_sizes((params,) * self.trees_sent)
        return sum(pool.bytes_per_round(size, self.mixer.payload, self.mixer.averages) for size in sizes)

    def growth(self, num_workers: int) -> float | None:
        """By what factor the squared disagreement of W workers changes a round (`Pool.growth`); None: it is not known."""
        return None if self.recursion is None else self.pool(num_workers).growth(*self.recursion)

    def describe(self, params: Any, num_workers: int) -> str:
        """One line for the start of a run: topology, spectral gap, rounds to halve or end disagreement, bytes."""
        pool, growth = self.pool(num_workers), self.growth(num_workers)
        if num_workers == 1:
            return f"{pool.name}, 1 worker: nobody to exchange with"
        squared, mixing = "squared", f"disagreement halves in {pool.rounds_to_halve():.1f} rounds"
        if (last := pool.rounds_to_agree()) is not None:
            squared, mixing = (
                "disagreement squared",
                f"all agree after {'a round' if last == 1 else f'{last} rounds'}",
            )
        if growth is not None:
            mixing += f" ({squared}, with this momentum: times {growth:.3f} a round)"
        return (
            f"{pool.name}, {num_workers} workers: expected spectral gap {pool.expected_gap():.3f}, {mixing}, "
            f"{self.bytes_per_round(params, num_workers):,} bytes sent by a worker in a round"
        )


def rate_at(rate: optax.ScalarOrSchedule, count: jax.Array) -> Any:
    """A number as it is, a schedule at `count` exchanges done (int32 ()), as optax's own chains count: float32 ()."""
    return jnp.asarray(rate(count), jnp.float32) if callable(rate) else rate


def any_nonfinite(tree: Any) -> jax.Array:
    """int32 (): 1 if an entry is NaN or infinite, or the squares' sum overflows, else 0.

    One read of each leaf: a sum of squares is the fastest reduction that NaN and infinity cannot pass unseen.
    """
    zero = jnp.zeros((), jnp.float32)
    total = sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)), zero)
    return (~jnp.isfinite(total)).astype(jnp.int32)


def finite_delta(updates: Any, params: Any, nonfinite: jax.Array | None) -> tuple[Any, jax.Array, Any]:
    """(pseudo-gradient in float32, zero where it is not finite; whether that is so, int32 (); params in float32)."""
    if params is None:
        raise ValueError(
            "the outer step needs the round's anchor: call update(anchor - local, state, anchor)."
        )
    bad = any_nonfinite(updates) if nonfinite is None else jnp.asarray(nonfinite).astype(jnp.int32)
    delta = jax.tree.map(lambda d: jnp.where(bad == 0, d.astype(jnp.float32), 0.0), updates)
    return delta, bad, jax.tree.map(lambda p: p.astype(jnp.float32), params)


def finite_proposal(proposal: Any, bad: jax.Array, anchor: Any, delta: Any) -> Any:
    """y = theta_t - delta in float32. Who has it already, as a round does, spares a pass and two roundings by giving it."""
    if proposal is None:
        return jax.tree.map(jnp.subtract, anchor, delta)
    return jax.tree.map(lambda y, a: jnp.where(bad == 0, y.astype(jnp.float32), a), proposal, anchor)


def once_on_cpu(tree: Any) -> Any:
    """The same arrays. XLA on CPU, which makes a loop for each result, would mix once for the updates and again for the
    momentum, and keep copies of what either overwrites; on GPU one kernel has both results.
    """
    return lax.platform_dependent(tree, cpu=materialize, default=lambda x: x)


def like(updates: Any, tree: Any) -> Any:
    """`tree` in the dtypes of `updates`: what optax's own transformations keep for their state."""
    return jax.tree.map(lambda u, x: x.astype(u.dtype), updates, tree)
