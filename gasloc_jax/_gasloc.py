"""GASLoC's outer step as optax transformations. Source: GASLoC (arXiv 2606.11081); DiLoCo (arXiv 2311.08105).

One round of worker i, whose parameters were theta_t and are theta_{t,H} after its local steps:

    y^i = theta_t^i + (theta_{t,H}^i - theta_t^i)        proposal, the only thing that is sent
    z^i = sum_j W_ij y^j                                 W: this round's random graph
    theta_{t+1}^i = theta_t^i + outer(theta_t^i - z^i)   any optax chain

`update` is given the pseudo-gradient theta_t - theta_{t,H} of its own worker, as gradients are in optax, and theta_t.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gasloc_jax._checks import check_floating, check_momentum, check_one_of, check_rate, check_transformation
from gasloc_jax._mix import Mixer
from gasloc_jax._outer import OuterOptimizer, finite_delta, finite_proposal, like, once_on_cpu, rate_at
from gasloc_jax._payload import make_payload
from gasloc_jax._topology import Topology, random_pairs


class GaslocState(NamedTuple):
    """State of `gasloc` on one worker.

    Attributes:
      round: int32 (), rounds done.
      outer: state of the outer chain.
      residual: float32 (1, entries sent) for each piece, what compression still owes; None for float32 payloads.
      skipped: int32 (), rounds in which this worker's pseudo-gradient was not finite.
    """

    round: jax.Array
    outer: Any
    residual: Any
    skipped: jax.Array


# Another value on each device of an island too: it carries a leading axis for these.
GaslocState.per_worker = ("residual",)  # type: ignore[attr-defined]


class NesterovGossipState(NamedTuple):
    """State of `nesterov_gossip` on one worker.

    Attributes:
      round: int32 (), rounds done.
      previous: like the parameters, float32: z of the last round ("mixed") or y ("local"), theta_0 at first.
      residual, skipped: as in `GaslocState`.
    """

    round: jax.Array
    previous: Any
    residual: Any
    skipped: jax.Array


NesterovGossipState.per_worker = ("residual",)  # type: ignore[attr-defined]


def gasloc(
    outer: optax.GradientTransformation | None = None,
    topology: Topology | None = None,
    axis_name: str | None = None,
    *,
    payload_dtype: Any = None,
    payload_block_size: int = 256,
    island_axis: str | None = None,
) -> OuterOptimizer:
    r"""GASLoC's outer optimizer: proposals are mixed over a random graph, then any optax chain takes the step.

    .. math::
      z^i = \sum_j W_{ij}\,(\theta_t^j - \Delta^j), \qquad
      \theta_{t+1}^i = \theta_t^i + \mathrm{outer}(\theta_t^i - z^i)

    with the pseudo-gradient \Delta^i = theta_t^i - theta_{t,H}^i given to `update` and theta_t^i as `params`. On
    `complete()` all theta_t are equal, and the mean of the pseudo-gradients is fed as it is: DiLoCo, bit for bit the one
    composed of optax and a mean that is compiled in the same way (shard_map, the same layout); in another layout XLA may
    contract other products and sums to fused multiply-adds, which differ by a rounding.

    Communicated per worker and round: one message of all P entries to each neighbour of the round's graph, 1 with
    `random_pairs`, 2 with rings: 4 P bytes each in float32, 2 P in bfloat16, P + 4 P / payload_block_size in int8.
    `complete()` sends 2 (W-1)/W of that. One worker sends nothing.

    A worker whose pseudo-gradient is not finite proposes theta_t for that round, so that nothing spreads.

    Args:
      outer: the chain that takes the step. None: optax.sgd(0.7, momentum=0.9, nesterov=True).
      topology: who meets in a round. None: random_pairs().
      axis_name: mesh axis of the workers; None: one worker.
      payload_dtype: jnp.float32 (None), jnp.bfloat16 or jnp.int8; less than float32 keeps a residual (error feedback).
      payload_block_size: entries that share a scale in int8.
      island_axis: mesh axis of the devices of one worker, over which parameters are equal: each then sends its part only.

    Returns:
      An optax transformation. `init` and `update` run inside shard_map when axis_name is given; `make_round` does that.
      `update` takes `round=` (int32 ()) in place of its own count to choose the graph, `turn=` in place of that where graphs
      are taken in turn, and `proposal=`, theta_{t,H} in place of theta_t - Delta, from who has it at hand.

    Raises:
      ValueError: a setting is outside its range, or at `init` the topology is not for that number of workers.
      TypeError: `outer` is no optax transformation, `topology` no Topology, or a leaf is not floating-point.

    Example:
      >>> import jax.numpy as jnp, optax, gasloc_jax
      >>> tx = gasloc_jax.gasloc(optax.sgd(0.5))
      >>> params = {"w": jnp.array([1.0])}
      >>> state = tx.init(params)
      >>> updates, state = tx.update({"w": jnp.array([0.6])}, state, params)
      >>> float(optax.apply_updates(params, updates)["w"][0])
      0.699999988079071

    References:
      GASLoC, arXiv 2606.11081. DiLoCo, arXiv 2311.08105.
    """
    if outer is not None:
        check_transformation("outer", outer, "optax.sgd(0.7, momentum=0.9, nesterov=True)")
    chain = optax.with_extra_args_support(
        optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    )
    mixer = Mixer(
        random_pairs() if topology is None else topology,
        axis_name,
        make_payload(payload_dtype, payload_block_size),
        island_axis,
    )

    def init(params):
        check_floating(params)
        zero = jnp.zeros((), jnp.int32)
        return GaslocState(zero, chain.init(params), mixer.init(params), zero.copy())

    def update(
        updates, state, params=None, *, round=None, turn=None, nonfinite=None, proposal=None, **extra_args
    ):
        delta, bad, anchor = finite_delta(updates, params, nonfinite)
        pool, residual = mixer.pool(), state.residual
        if pool.num_workers == 1 or pool.all_reduce:
            gradient, residual = mixer.mean(delta, residual)
        else:
            proposal = finite_proposal(proposal, bad, anchor, delta)
            mixed, residual = mixer.mix(proposal, residual, state.round if round is None else round, turn)
            gradient = once_on_cpu(jax.tree.map(jnp.subtract, anchor, mixed))
        new_updates, outer_state = chain.update(like(updates, gradient), state.outer, params, **extra_args)
        return new_updates, GaslocState(
            optax.safe_increment(state.round), outer_state, residual, state.skipped + bad
        )

    return OuterOptimizer.made(init, update, mixer)


def nesterov_gossip(
    learning_rate: optax.ScalarOrSchedule = 0.7,
    gamma: float = 0.9,
    momentum: Literal["mixed", "local"] = "mixed",
    topology: Topology | None = None,
    axis_name: str | None = None,
    *,
    payload_dtype: Any = None,
    payload_block_size: int = 256,
    island_axis: str | None = None,
) -> OuterOptimizer:
    r"""The two explicit Nesterov forms of gossip, without an optax chain.

    .. math::
      y_t = \theta_t - \eta\,\Delta, \quad z_t = W_t\,y_t, \quad
      \theta_{t+1} = z_t + \gamma\,(z_t - z_{t-1}) \;\text{(mixed)} \quad\text{or}\quad
      z_t + \gamma\,(y_t - y_{t-1}) \;\text{(local)}

    with z_{-1} = y_{-1} = theta_0. "local" is the form published for GASLoC; its workers disagree more. With random pairs of
    8 workers and gamma = 0.9 the squared disagreement grows without any drift, by 1.05 a round ("mixed") or 1.17
    ("local"): `growth(num_workers)` of the optimizer tells, and `describe` says it. Bytes as in `gasloc`, of which the
    arguments not named here are.

    Args:
      learning_rate: eta, a number or a schedule of the rounds; with fragments of those in which the fragment was exchanged,
        as an optax chain in `gasloc` counts.
      gamma: momentum in [0, 1).
      momentum: "mixed" or "local".

    Raises:
      ValueError: a setting is outside its range. TypeError: a leaf is not floating-point.

    Example:
      >>> import jax.numpy as jnp, gasloc_jax
      >>> tx = gasloc_jax.nesterov_gossip(momentum="local")
      >>> state = tx.init({"w": jnp.ones(3)})
    """
    check_rate("learning_rate", learning_rate, "Typical: 0.7.")
    check_momentum("gamma", gamma)
    check_one_of("momentum", momentum, ("mixed", "local"))
    mixer = Mixer(
        random_pairs() if topology is None else topology,
        axis_name,
        make_payload(payload_dtype, payload_block_size),
        island_axis,
        averages=momentum == "mixed",
    )

    def init(params):
        check_floating(params)
        zero = jnp.zeros((), jnp.int32)
        # A copy, so that parameters and state can both be donated.
        previous = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
        return NesterovGossipState(zero, previous, mixer.init(params), zero.copy())

    def update(updates, state, params=None, *, round=None, turn=None, nonfinite=None, **extra_args):
        del extra_args
        delta, bad, anchor = finite_delta(updates, params, nonfinite)
        pool, residual = mixer.pool(), state.residual
        rate = rate_at(learning_rate, state.round)
        proposal = jax.tree.map(lambda a, d: a - rate * d, anchor, delta)
        if momentum == "mixed" and pool.all_reduce:
            mean, residual = mixer.mean(delta, residual)
            mixed = jax.tree.map(lambda a, d: a - rate * d, anchor, mean)
        else:
            mixed, residual = mixer.mix(proposal, residual, state.round if round is None else round, turn)
        moved = mixed if momentum == "mixed" else proposal
        new_updates = jax.tree.map(
            lambda z, m, before, a: z + gamma * (m - before) - a, mixed, moved, state.previous, anchor
        )
        return like(updates, new_updates), NesterovGossipState(
            optax.safe_increment(state.round), moved, residual, state.skipped + bad
        )

    # (theta, z or y of the last round) without drift, where z = theta - L theta and y = theta: whatever the rate.
    recursion = (
        [[1.0 + gamma, -gamma], [1.0, 0.0]],
        [[-(1.0 + gamma), 0.0], [-1.0, 0.0]] if momentum == "mixed" else [[-1.0, 0.0], [0.0, 0.0]],
    )
    return OuterOptimizer.made(init, update, mixer, recursion=recursion)
