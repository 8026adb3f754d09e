"""What every outer optimizer here shares: its interface, and a pseudo-gradient that is finite."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gasloc_jax._graphs import Pool
from gasloc_jax._mix import Mixer, piece_sizes

# For optax.inject_hyperparams with any factory here: what is not a number that may change while training.
STATIC_ARGS = ("axis_name", "payload_dtype", "payload_block_size", "island_axis")


class OuterOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation that also knows its exchange; wrapped by optax it is an ordinary one and loses that.

    Attributes:
      mixer: what it exchanges with.
      trees_sent: payloads of the size of the parameters in a message.
      local_steps: the number of local steps that the method is defined for; None: any.
    """

    mixer: Mixer
    trees_sent: int = 1
    local_steps: int | None = None

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

    def describe(self, params: Any, num_workers: int) -> str:
        """One line for the start of a run: topology, spectral gap, rounds to halve disagreement, bytes."""
        pool = self.pool(num_workers)
        return (
            f"{pool.name}, {num_workers} workers: expected spectral gap {pool.expected_gap():.3f}, disagreement halves "
            f"in {pool.rounds_to_halve():.1f} rounds, {self.bytes_per_round(params, num_workers):,} bytes sent by a "
            "worker in a round"
        )


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


def like(updates: Any, tree: Any) -> Any:
    """`tree` in the dtypes of `updates`: what optax's own transformations keep for their state."""
    return jax.tree.map(lambda u, x: x.astype(u.dtype), updates, tree)
