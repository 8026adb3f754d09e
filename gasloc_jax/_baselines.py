"""What GASLoC is measured against, in the same interface: DiLoCo, local SGD, DAdam, Local-DAdam and NoLoCo.

All but NoLoCo are `gasloc` in one setting, so that a comparison changes one thing at a time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gasloc_jax._checks import check_floating, check_momentum, check_rate
from gasloc_jax._gasloc import gasloc
from gasloc_jax._mix import Mixer
from gasloc_jax._outer import OuterOptimizer, finite_delta, like, once_on_cpu, rate_at
from gasloc_jax._payload import make_payload
from gasloc_jax._topology import Topology, complete, random_pairs


def diloco(
    learning_rate: optax.ScalarOrSchedule = 0.7,
    momentum: float = 0.9,
    axis_name: str | None = None,
    *,
    payload_dtype: Any = None,
    payload_block_size: int = 256,
    island_axis: str | None = None,
) -> OuterOptimizer:
    """DiLoCo: Nesterov's SGD on the mean of all workers' pseudo-gradients. Source: arXiv 2311.08105.

    Communicated per worker and round: one all-reduce of the P entries, 2 (W-1)/W * 4 P bytes in float32.

    Args:
      learning_rate: outer learning rate, a number or a schedule of the rounds; with fragments of those in which the
        fragment was exchanged.
      momentum: in [0, 1).
      axis_name, payload_dtype, payload_block_size, island_axis: as in `gasloc`.

    Raises:
      ValueError: a setting is outside its range.

    Example:
      >>> import jax.numpy as jnp, gasloc_jax
      >>> state = gasloc_jax.diloco().init({"w": jnp.ones(3)})
    """
    check_rate("learning_rate", learning_rate, "Typical: 0.7.")
    check_momentum("momentum", momentum)
    return gasloc(
        optax.sgd(learning_rate, momentum=momentum, nesterov=True),
        complete(),
        axis_name,
        payload_dtype=payload_dtype,
        payload_block_size=payload_block_size,
        island_axis=island_axis,
    )


def local_sgd(
    axis_name: str | None = None,
    *,
    payload_dtype: Any = None,
    payload_block_size: int = 256,
    island_axis: str | None = None,
) -> OuterOptimizer:
    """Local SGD: after its local steps each worker takes the mean of all parameters. Bytes as in `diloco`.

    Args:
      axis_name, payload_dtype, payload_block_size, island_axis: as in `gasloc`.

    Example:
      >>> import jax.numpy as jnp, gasloc_jax
      >>> state = gasloc_jax.local_sgd().init({"w": jnp.ones(3)})
    """
    return local_dadam(
        complete(),
        axis_name,
        payload_dtype=payload_dtype,
        payload_block_size=payload_block_size,
        island_axis=island_axis,
    )


def local_dadam(
    topology: Topology | None = None,
    axis_name: str | None = None,
    *,
    payload_dtype: Any = None,
    payload_block_size: int = 256,
    island_axis: str | None = None,
) -> OuterOptimizer:
    """Local-DAdam: after its local (Adam) steps each worker takes the mix of its neighbours' parameters; no outer momentum.

    Bytes as in `gasloc`, of which the arguments are.

    Example:
      >>> import jax.numpy as jnp, gasloc_jax
      >>> state = gasloc_jax.local_dadam(gasloc_jax.ring()).init({"w": jnp.ones(3)})
    """
    return gasloc(
        optax.sgd(1.0),
        topology,
        axis_name,
        payload_dtype=payload_dtype,
        payload_block_size=payload_block_size,
        island_axis=island_axis,
    )


def dadam(
    topology: Topology | None = None,
    axis_name: str | None = None,
    *,
    payload_dtype: Any = None,
    payload_block_size: int = 256,
    island_axis: str | None = None,
) -> OuterOptimizer:
    """DAdam: `local_dadam` with one local step a round, which `make_round` then insists on.

    Example:
      >>> import gasloc_jax
      >>> gasloc_jax.dadam().local_steps
      1
    """
    optimizer = local_dadam(
        topology,
        axis_name,
        payload_dtype=payload_dtype,
        payload_block_size=payload_block_size,
        island_axis=island_axis,
    )
    optimizer.local_steps = 1
    return optimizer


class NoLoCoState(NamedTuple):
    """State of `noloco` on one worker.

    Attributes:
      round: int32 (), rounds done.
      velocity: like the parameters, float32: m.
      residual, skipped: as in `GaslocState`.
    """

    round: jax.Array
    velocity: Any
    residual: Any
    skipped: jax.Array


NoLoCoState.per_worker = ("residual",)  # type: ignore[attr-defined]


def noloco(
    learning_rate: optax.ScalarOrSchedule = 0.7,
    momentum: float = 0.5,
    pull: optax.ScalarOrSchedule = 0.7,
    topology: Topology | None = None,
    axis_name: str | None = None,
    *,
    payload_dtype: Any = None,
    payload_block_size: int = 256,
    island_axis: str | None = None,
) -> OuterOptimizer:
    r"""NoLoCo: heavy ball on the pair's mean drift, with a pull towards the pair's mean parameters.

    .. math::
      m \leftarrow \mu\,m - \beta\,\mathrm{mix}(\Delta) + k\,(\mathrm{mix}(\theta_t) - \theta_t), \qquad
      \theta_{t+1} = \theta_t + m

    Communicated per worker and round: twice the bytes of `gasloc`, since pseudo-gradient and parameters travel apart.

    Args:
      learning_rate: beta, a number or a schedule of the rounds; with fragments of those in which the fragment was exchanged.
      momentum: mu in [0, 1).
      pull: k, likewise; `growth` of a schedule is not known. With random pairs the squared disagreement shrinks to 0.67 of
        itself in a round at the defaults (8 workers, no drift), to 0.75 for k = 1. At momentum 0.9 it grows, for k = 0.7
        with 4 workers or more, by 1.07 a round with 8: `growth(num_workers)` of the optimizer tells, and `describe` says it.
      topology, axis_name, payload_dtype, payload_block_size, island_axis: as in `gasloc`.

    Raises:
      ValueError: a setting is outside its range. TypeError: a leaf is not floating-point.

    Example:
      >>> import jax.numpy as jnp, gasloc_jax
      >>> state = gasloc_jax.noloco().init({"w": jnp.ones(3)})

    References:
      NoLoCo, arXiv 2506.10911.
    """
    for name, value in (("learning_rate", learning_rate), ("pull", pull)):
        check_rate(name, value, "Typical: 0.7.")
    check_momentum("momentum", momentum)
    mixer = Mixer(
        random_pairs() if topology is None else topology,
        axis_name,
        make_payload(payload_dtype, payload_block_size),
        island_axis,
        averages=False,
    )

    def init(params):
        check_floating(params)
        zero = jnp.zeros((), jnp.int32)
        velocity = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
        return NoLoCoState(zero, velocity, mixer.init((params, params)), zero.copy())

    def update(updates, state, params=None, *, round=None, turn=None, nonfinite=None, **extra_args):
        del extra_args
        delta, bad, anchor = finite_delta(updates, params, nonfinite)
        (delta, mean), residual = mixer.mix(
            (delta, anchor), state.residual, state.round if round is None else round, turn
        )
        rate, k = rate_at(learning_rate, state.round), rate_at(pull, state.round)
        velocity = jax.tree.map(
            lambda m, d, z, a: momentum * m - rate * d + k * (z - a),
            state.velocity,
            delta,
            mean,
            anchor,
        )
        velocity = once_on_cpu(velocity)
        return like(updates, velocity), NoLoCoState(
            optax.safe_increment(state.round), velocity, residual, state.skipped + bad
        )

    # (theta, m) without drift: m <- mu m - k (theta - mix(theta)), theta <- theta + m, whatever the rate.
    recursion = None if callable(pull) else ([[1.0, momentum], [0.0, momentum]], [[-pull, 0.0], [-pull, 0.0]])
    return OuterOptimizer.made(init, update, mixer, trees_sent=2, recursion=recursion)
