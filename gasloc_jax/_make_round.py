"""From a local step, an outer optimizer and a mesh to a Round, with the checks of all that is given once."""

from collections.abc import Callable
from typing import Literal

import optax
from jax.sharding import Mesh

from gasloc_jax._checks import check_one_of, check_transformation, check_whole_number
from gasloc_jax._fragments import Fragments, layers_are_stacked
from gasloc_jax._local_step import LocalStep
from gasloc_jax._outer import OuterOptimizer
from gasloc_jax._round import Round
from gasloc_jax._worker_round import WorkerRound


def make_round(
    local_step: LocalStep,
    outer: optax.GradientTransformation,
    mesh: Mesh,
    axis_name: str = "worker",
    *,
    fragments: int = 1,
    stacked: Callable[[str], bool] = layers_are_stacked,
    delay: int = 0,
    drift_weight: Literal["uniform", "steps"] = "uniform",
    reference_steps: int | None = None,
) -> Round:
    """Rounds of H_i local steps on each worker and one exchange, jitted once for the whole run.

    Communicated per worker and round: what `outer` says for one fragment, see `Round.wire_bytes`; during the local steps
    nothing, but over the devices of an island what the inner optimizer exchanges.

    Args:
      local_step: from `make_local_step`, or your own `LocalStep`.
      outer: gasloc, nesterov_gossip or a baseline, built with the same axis_name; optax may wrap it.
      mesh: has the axis; its other axes are the devices of one worker (an island), on which `local_step` may communicate.
        `make_mesh` makes one.
      axis_name: the workers' axis.
      fragments: F; a round exchanges the F-th part of the model, dealt by layer, so that a round's bytes fall F-fold.
        Graphs drawn at random are drawn for each round, those in turn go on after F rounds: every fragment sees them all.
      stacked: path -> whether the leaf's first axis is the layers. Default: below a part "layers" of the path.
      delay: D; the exchange works on what the last round left and is applied after D local steps of the next one, so that
        it can go on beside them. 0: at once. XLA on GPU does both at a time where the topology has one graph only (`ring`,
        `complete`, `mixing_matrix`): the choice among several is a conditional, which it runs by itself.
      drift_weight: "steps" multiplies a worker's drift by H_i / reference_steps; "uniform" leaves it.
      reference_steps: see drift_weight.

    Returns:
      A Round: `state = round.init(params)`, then `state, metrics = round(state, batches, local_steps)`.

    Raises:
      ValueError: a setting is outside its range or does not fit the mesh. TypeError: `outer` is no transformation.

    Example:
      >>> import jax, jax.numpy as jnp, optax, gasloc_jax
      >>> mesh = gasloc_jax.make_mesh(1, devices=jax.devices()[:1])
      >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> step = gasloc_jax.make_local_step(loss_fn, optax.adamw(1e-3))
      >>> round = gasloc_jax.make_round(step, gasloc_jax.gasloc(axis_name="worker"), mesh)
      >>> state = round.init({"w": jnp.ones((4, 2))})
      >>> state, metrics = round(state, jnp.ones((1, 10, 8, 4)), 10)  # 1 worker, 10 steps on batches of 8
      >>> model = round.mean_params(state)
    """
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"axis_name must name the workers' axis of the mesh, got {axis_name!r}; the mesh has "
            f"{tuple(mesh.axis_names)}. Use one of these; one worker is an axis of size 1."
        )
    check_transformation("outer", outer, f"gasloc_jax.gasloc(axis_name={axis_name!r})")
    inner_axes = tuple(name for name in mesh.axis_names if name != axis_name)
    if isinstance(outer, OuterOptimizer):
        for name, given, wanted in (
            ("axis_name", outer.axis_name, (axis_name,)),
            ("island_axis", outer.island_axis, (None, *inner_axes)),
        ):
            if given not in wanted and mesh.size > 1:
                raise ValueError(
                    f"{name} of the outer optimizer must be {' or '.join(map(repr, wanted))} on this mesh, got {given!r}. "
                    "Build both for the same axes."
                )
        outer.pool(int(mesh.shape[axis_name]))  # refuses a mixing matrix of another size
    check_whole_number("fragments", fragments, 1, "1 exchanges the whole model in every round.")
    check_whole_number("delay", delay, 0, "0 applies an exchange at once.")
    check_one_of("drift_weight", drift_weight, ("uniform", "steps"))
    if drift_weight == "steps":
        check_whole_number(
            "reference_steps", reference_steps, 1, "Give the number of steps that counts as 1."
        )
        if fragments > 1 or delay:
            raise ValueError(
                "drift_weight must be 'uniform' with fragments or a delay, got 'steps': drifts of several rounds add up "
                "there. Use 'uniform', or fragments=1 and delay=0."
            )
    worker = WorkerRound(
        local_step,
        optax.with_extra_args_support(outer),
        Fragments(fragments, stacked),
        delay,
        drift_weight,
        reference_steps,
        inner_axes,
    )
    return Round(worker, mesh, axis_name)
