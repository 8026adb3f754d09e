"""SCAPE: AdamS whose workers exchange only the entries of a shared mask. Source: arXiv 2607.01678, Algorithm 1.

One step of worker n, as computed here (the README's table maps the letters):

    mt^n  = b1 m_{t-1} + (1-b1) g^n + e^n             semi-updated first moment
    e^n  <- mt^n off M_{t-1}, 0 on it                  residual
    ghat  = mean_n (g^n + e^n / (1-b1)) on M_{t-1}     THE ONLY all-reduce
    ghat  = clip_by_global_norm(ghat)
    m_t, u_t = AdamS(ghat, m_{t-1}) on M_{t-1}, 0 off it
    M_t   = refresh(|mt^n|): each owner selects in its own rows; gathered at the start of the next step

Two things differ from the paper's listing, neither in what is computed. The paper sends mt^n[M] and subtracts
b1 m_{t-1} from the mean; m_{t-1} is the same on all workers, so sending g + e/(1-b1) gives the same ghat without the
cancellation. And m and e never overlap (m_t is zero off M_{t-1}, e_t is zero on it), so ONE buffer h holds both.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from scape_jax import _exchange as ex
from scape_jax._adams import output_dtypes
from scape_jax._chain import Optimizer, check_rates
from scape_jax._kernel_step import KernelStep, takes_kernels
from scape_jax._layout import density_levels, final_count, leaf_layouts
from scape_jax._options import ScapeOptions
from scape_jax._scape_step import Emit, Leaf, ScapeStep
from scape_jax._wire import wire_bytes
from scape_jax._worker_types import own_on_workers


class ScaleByScapeState(NamedTuple):
    """State of `scale_by_scape`, for one worker (local) or W workers (global).

    Attributes:
      count: int32 (), steps taken; skipped ones do not count.
      h: like the parameters with a leading worker axis, float32 (W, *shape): m_t on `mask`, the residual off it.
      mask: like the parameters, uint32 (ceil(N/32),): M of the last step, packed; None for a dense leaf.
      next_mask: like the parameters, uint32 (W, words of the owned rows): the next M in a worker's own rows.
      age: like the parameters, uint8 (*shape,), steps since an entry was last sent; None where staleness_power is 0.
      stats: what the last exchange told.
    """

    count: jax.Array  # type: ignore[assignment]  # a tuple's method of that name is not needed
    h: Any
    mask: Any
    next_mask: Any
    age: Any
    stats: ex.StepStats


# Fields that hold another value on each worker: they carry the leading worker axis.
ScaleByScapeState.per_worker = ("h", "next_mask")  # type: ignore[attr-defined]


def _init(opts: ScapeOptions, params: Any) -> ScaleByScapeState:
    layouts, treedef = leaf_layouts(
        params, num_workers=ex.axis_size(opts.axis_name), **opts.layout_arguments()
    )

    def tree(shape, dtype, sparse_only=True):
        return treedef.unflatten(
            [jnp.zeros(shape(lay), dtype) if lay.sparse or not sparse_only else None for lay in layouts]
        )

    return ScaleByScapeState(
        count=jnp.zeros((), jnp.int32),
        h=tree(lambda lay: (1, *lay.shape), jnp.float32, sparse_only=False),
        mask=tree(lambda lay: (lay.mask_words,), jnp.uint32),
        next_mask=tree(lambda lay: (1, lay.owned_rows * lay.row_words), jnp.uint32),
        age=tree(lambda lay: lay.shape, jnp.uint8) if opts.staleness_power else None,
        stats=ex.init_stats(opts.skip_spike),
    )


def _step(
    opts: ScapeOptions,
    emit: Emit,
    updates: Any,
    state: ScaleByScapeState,
    *,
    value=None,
    nonfinite=None,
    level=None,
    **_,
) -> tuple[Any, ScaleByScapeState]:
    """One step on this worker's gradients: (the tree of what `emit` returns, reshaped like the leaves; new state).

    value: this worker's loss, averaged in the same all-reduce (stats.loss). nonfinite: float32 () 1 or 0, in place of
    the own check of the gradients. level: Python int, a promise of the density level; spares the choice at run time.
    """
    num_workers = ex.axis_size(opts.axis_name)
    ex.check_local(updates, opts.axis_name, num_workers)
    layouts, treedef = leaf_layouts(updates, num_workers=num_workers, **opts.layout_arguments())

    # Also where init ran in the same shard_map, so that the zeros it made are typed alike on all workers.
    h, next_mask = (
        jax.tree.map(lambda x: own_on_workers(x, opts.axis_name), t) for t in (state.h, state.next_mask)
    )

    def flat(tree):
        return [None] * len(layouts) if tree is None else treedef.flatten_up_to(tree)

    kernels = takes_kernels(opts)
    leaves = [
        Leaf(lay, g if kernels else g.astype(jnp.float32), h, prev, own, age)
        for lay, g, h, prev, own, age in zip(
            layouts,
            jax.tree.leaves(updates),
            flat(h),
            flat(state.mask),
            flat(next_mask),
            flat(state.age),
            strict=True,
        )
    ]
    if not kernels:
        nonfinite, value = ex.control_numbers([leaf.g for leaf in leaves], nonfinite, value, opts.checks_all)
    step = (KernelStep if kernels else ScapeStep)(opts, leaves, state.count, num_workers)
    new = step.run(
        emit, nonfinite, jnp.zeros((), jnp.float32) if value is None else value, state.stats, level
    )

    tree = treedef.unflatten
    new_state = ScaleByScapeState(
        count=jnp.where(new.ok, optax.safe_increment(state.count), state.count),
        h=tree(new.h),
        mask=tree(new.words),
        next_mask=tree(new.own),
        age=None if state.age is None else tree(new.age),
        stats=new.stats,
    )
    return tree(new.emitted), new_state


def scale_by_scape(density: float | None = None, **options: Any) -> optax.GradientTransformationExtraArgs:
    """The bare SCAPE rule: exchange, error feedback and AdamS; no learning rate, no weight decay.

    Takes the arguments of `scape` but learning_rate, weight_decay and weight_decay_mask. On a skipped step its own
    state stands still and the update is zero; what is chained behind it sees that zero. `scape` has no such part.
    """
    if density is not None:
        options["density"] = density
    opts = ScapeOptions(**options)

    def update(updates, state, params=None, **extra_args):
        leaves, treedef = jax.tree.flatten(updates)
        dtypes = output_dtypes(leaves, treedef, params)

        def leaf(i, kept, u, ok):
            return kept.put(jnp.zeros(leaves[i].shape, jnp.float32), u, ok).astype(dtypes[i])

        emit = Emit(leaf, update=True, dtypes=dtypes, eta=-1.0, lam=None, theta=None)
        return _step(opts, emit, updates, state, **extra_args)

    return optax.GradientTransformationExtraArgs(functools.partial(_init, opts), update)


def _scape(opts: ScapeOptions, learning_rate: Any, weight_decay: Any, weight_decay_mask: Any) -> Optimizer:
    """theta <- theta - eta (u + lam theta) on top of the rule, in two forms that share everything else.

    `update` returns a dense update tree, as optax wants it. `apply` writes the kept entries into the parameters and
    decays the rest in the same pass, so no parameter-sized update ever exists.
    """
    static_zero_decay = isinstance(weight_decay, int | float) and weight_decay == 0

    def rates(params, state):
        """(eta, lam per leaf or None): the schedule is that of the steps taken, so it waits on a skip."""
        eta = learning_rate(state.count) if callable(learning_rate) else learning_rate
        if static_zero_decay:
            return eta, None
        if params is None:
            raise ValueError("weight decay needs the parameters: call update(grads, state, params).")
        chosen = weight_decay_mask(params) if callable(weight_decay_mask) else weight_decay_mask
        chosen = jax.tree.broadcast(True if chosen is None else chosen, params)
        return eta, [weight_decay if c else 0.0 for c in jax.tree.leaves(chosen)]

    def update(updates, state, params=None, **extra_args):
        leaves, treedef = jax.tree.flatten(updates)
        dtypes = output_dtypes(leaves, treedef, params)
        eta, lam = rates(params, state)
        theta = leaves if lam is None else treedef.flatten_up_to(params)

        def leaf(i, kept, u, ok):
            decay = 0.0 if lam is None else lam[i] * theta[i].astype(jnp.float32)
            change = kept.add(jnp.broadcast_to(jnp.asarray(decay, jnp.float32), leaves[i].shape), u)
            # -0.0 is the one number that leaves every parameter bit-equal when added.
            return jnp.where(ok, -eta * change, -0.0).astype(dtypes[i])

        emit = Emit(leaf, update=True, dtypes=dtypes, eta=eta, lam=lam, theta=theta)
        return _step(opts, emit, updates, state, **extra_args)

    def apply(updates, state, params, **extra_args):
        theta = jax.tree.structure(updates).flatten_up_to(params)
        eta, lam = rates(params, state)

        def leaf(i, kept, u, ok):
            x = theta[i].astype(jnp.float32)
            if kept.at is None:  # the very operations of the dense optimizers
                return jnp.where(
                    ok, x - eta * (u.reshape(x.shape) + (0.0 if lam is None else lam[i] * x)), x
                ).astype(theta[i].dtype)
            decayed = x if lam is None else jnp.where(ok, x - (eta * lam[i]) * x, x)
            return kept.add(decayed, jnp.where(ok, -eta * u, -0.0)).astype(theta[i].dtype)

        dtypes = [x.dtype for x in theta]
        emit = Emit(leaf, update=False, dtypes=dtypes, eta=eta, lam=lam, theta=theta)
        return _step(opts, emit, updates, state, **extra_args)

    levels = density_levels(opts.density, opts.density_warmup_steps)
    optimizer = Optimizer(functools.partial(_init, opts), update)
    optimizer.apply = apply
    optimizer.wire = functools.partial(wire_bytes, method="scape", **dataclasses.asdict(opts))
    optimizer.final_level = len(levels) - 1
    optimizer.mask_every = opts.mask_every
    optimizer.final_count = final_count(len(levels), opts.density_warmup_steps, opts.mask_every)
    return optimizer


def scape(
    learning_rate: optax.ScalarOrSchedule,
    density: float | None = None,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    clip_norm: float | None = 1.0,
    clip_order: Literal["before", "paper"] = "before",
    bias_correction: Literal["both", "none", "momentum"] = "both",
    axis_name: ex.AxisName = None,
    selection: Literal["block", "leaf"] = "block",
    block_size: int | None = None,
    codec: Literal["auto", "bitmap", "index"] = "auto",
    payload_dtype: Any = None,
    dense: Callable[[str], bool] | None = None,
    density_warmup_steps: int | None = None,
    mask_every: int | None = None,
    staleness_power: float | None = None,
    skip_nonfinite: bool = True,
    skip_spike: float | None = None,
    finite_check: Literal["all", "kept"] = "all",
    implementation: Literal["xla", "pallas", "triton"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""SCAPE with learning rate and decoupled weight decay: AdamS that exchanges only `density` of the entries.

    On the mask M, with e the residual (error feedback) and n the workers,

    .. math::
      \hat g = \mathrm{clip}\Big(\mathrm{mean}_n\,(g^n + e^n/(1-b_1))\Big), \quad
      m_t = b_1 m_{t-1} + (1-b_1)\hat g, \quad v_t = b_2 m_{t-1}^2 + (1-b_2)\hat g^2, \quad
      \theta \leftarrow \theta - \eta\,(m_t/(\sqrt{v_t}+\epsilon) + \lambda\theta)

    and off it only the decay acts. Step 1 exchanges everything.

    Communicated per worker and step (W workers, P parameters, ring algorithms): one all-reduce of d*P values of
    `payload_dtype` plus the dense leaves and 8 bytes, and one all-gather of the masks' parts: P/8 bytes as a bitmap,
    2*d*P as 16-bit indices. `scape_jax.wire_bytes` gives the exact counts.
    State per worker: 4 bytes per parameter, 1 bit + 1/W bit for the masks, 1 byte more with staleness_power > 0.

    Args:
      learning_rate: number or optax schedule of the step count; the first update uses schedule(0).
      density: fraction d of the entries exchanged, in (0, 1]. None: 0.1. 1.0 is dense AdamS.
      b1: decay of the first moment, in [0, 1).
      b2: weight of the old moment in the rebuilt second one, in [0, 1).
      eps: added to the denominator.
      weight_decay: decoupled, applied to all entries in every step.
      weight_decay_mask: as in optax.adamw, a tree or a function of the parameters.
      clip_norm: global norm to which the averaged gradient (with its residual) is clipped; None: no clipping.
      clip_order: "before" clips what enters both m and v; "paper" clips only what enters v, as the paper's listing
        does, which makes the step larger whenever clipping acts.
      bias_correction: "both", "none" or "momentum", see `adams_rule`.
      axis_name: mesh axis (or axes) of the workers; None: one worker.
      selection: "block" keeps max(1, round(d*B)) entries in every row of B; "leaf" is a top-k over each owner's share
        of a leaf.
      block_size: B, a multiple of 32. None: 4096. Leaves smaller than this are dense.
      codec: how masks travel: "bitmap", "index", or "auto" for the cheaper one.
      payload_dtype: jnp.float32 or jnp.bfloat16. None: float32.
      dense: leaves whose path it returns True for are exchanged whole, beside scalars, vectors, norm scales and biases.
      density_warmup_steps: T of d_t = d^min(1, t/T), rounded up to a few levels. None: none, dense in step 1 only.
      mask_every: steps between refreshes of the mask. None: 1.
      staleness_power: p: an entry that waited tau steps enters v as ghat / tau^p. None: 0 (the paper). 1 is better at
        small budgets (docs/results).
      skip_nonfinite: a non-finite gradient on any worker makes all workers skip the step, bit for bit.
      skip_spike: so do nats by which the mean loss is above its mean over about 20 steps taken; update() needs the `value`
        for that, as make_train_step gives it. None: never.
      finite_check: "all" looks at every entry of the gradients, which reads them once more; "kept" only at what is
        exchanged, which costs nothing: there a non-finite entry makes all skip the step too, elsewhere it counts as zero, as
        does one beyond 2^40.
      implementation: None takes the GPU kernels on GPUs where they fit (selection "block", block_size a power of two up
        to 8192) and plain JAX elsewhere; "xla" is plain JAX everywhere; "pallas" or "triton" is that kind of kernel
        (the mask's codec is Pallas' in both) or NotImplementedError. XLA cannot divide kernels over devices by itself:
        with several of them call it inside shard_map, as make_train_step does.

    Returns:
      An ordinary optax transformation. `init` and `update` run inside shard_map when axis_name is given
      (`make_train_step` does that); for optax.inject_hyperparams pass static_args=scape_jax.STATIC_ARGS when you set a
      static number such as density.

    Raises:
      ValueError: a setting is outside its range. TypeError: a leaf is not floating-point. NotImplementedError: the named
        implementation is not for these settings or this device.

    Example:
      >>> import jax.numpy as jnp, optax, scape_jax
      >>> tx = scape_jax.scape(1e-3, density=0.1)
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = tx.init(params)
      >>> updates, state = tx.update({"w": jnp.ones((64, 128))}, state, params)
      >>> params = optax.apply_updates(params, updates)

    References:
      SCAPE, arXiv 2607.01678, Algorithm 1. AdamS, arXiv 2505.16363.
    """
    given = {
        "density": density,
        "block_size": block_size,
        "payload_dtype": payload_dtype,
        "density_warmup_steps": density_warmup_steps,
        "mask_every": mask_every,
        "staleness_power": staleness_power,
    }
    opts = ScapeOptions(
        **{name: value for name, value in given.items() if value is not None},
        b1=b1,
        b2=b2,
        eps=eps,
        clip_norm=clip_norm,
        clip_order=clip_order,
        bias_correction=bias_correction,
        axis_name=axis_name,
        selection=selection,
        codec=codec,
        dense=dense,
        skip_nonfinite=skip_nonfinite,
        skip_spike=skip_spike,
        finite_check=finite_check,
        implementation=implementation,
    )
    check_rates(learning_rate, weight_decay)
    return _scape(opts, learning_rate, weight_decay, weight_decay_mask)
