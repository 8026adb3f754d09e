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
from jax import lax

from pallas_kernels.bits import bit_at, ones_mask, pack, unpack
from pallas_kernels.compact import mask_from_indices, row_indices
from pallas_kernels.select import select
from scape_jax import _exchange as ex
from scape_jax._adams import adams_rule, output_dtypes
from scape_jax._chain import make_optimizer
from scape_jax._layout import LeafLayout, density_levels, final_count, leaf_layouts, level_of
from scape_jax._options import ScapeOptions
from scape_jax._wire import wire_bytes

MAX_AGE = 255


class ScaleByScapeState(NamedTuple):
    """State of `scale_by_scape`, for one worker (local) or W workers (global): only the leading axis of h and next_mask differs.

    Attributes:
      count: int32 (), steps taken; skipped ones do not count.
      h: like the parameters with a leading worker axis, float32 (W, *shape): m_t on `mask`, the worker's residual off it.
      mask: like the parameters, uint32 (ceil(N/32),): M of the last step, packed; None for a dense leaf.
      next_mask: like the parameters, uint32 (W, words of the owned rows): the rows of the next M that a worker selected.
      age: like the parameters, uint8 (*shape,), steps since an entry was last sent; None where staleness_power is 0.
      stats: what the last exchange told.
    """

    count: jax.Array
    h: Any
    mask: Any
    next_mask: Any
    age: Any
    stats: ex.StepStats


# Fields that hold another value on each worker: they carry the leading worker axis.
ScaleByScapeState.per_worker = ("h", "next_mask")  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One leaf inside a step: flat views of what this worker holds."""

    layout: LeafLayout
    g: jax.Array  # (N,) float32
    h: jax.Array  # (N,) float32
    prev: jax.Array | None  # packed M_{t-2}: where h holds m
    own: jax.Array | None  # packed rows of M_{t-1} that this worker selected
    age: jax.Array | None  # (N,) uint8


def _semi_updated(h: jax.Array, g: jax.Array, prev: jax.Array, b1: Any) -> jax.Array:
    """mt^n = b1 m_{t-1} + (1-b1) g^n + e^n, with m in h on M_{t-2} (`prev`) and e in h off it; all (N,)."""
    return jnp.where(unpack(prev, h.shape[0]), b1 * h, h) + (1 - b1) * g


def _gathered(leaves: list[_Leaf], opts: ScapeOptions, codec: str, density: float, num_workers: int):
    """The owners' rows of M_{t-1} from all workers, in ONE all-gather: per leaf (packed mask, indices or None)."""
    sparse = [leaf for leaf in leaves if leaf.layout.sparse]
    index_dtype = opts.index_dtype([leaf.layout for leaf in sparse])
    if codec == "bitmap":
        parts = [leaf.own for leaf in sparse]
    else:
        parts = [
            row_indices(leaf.own.reshape(-1, leaf.layout.row_words), leaf.layout.kept(density)[0])
            .astype(index_dtype)
            .reshape(-1)
            for leaf in sparse
        ]
    flat = ex.all_gather(jnp.concatenate(parts), opts.axis_name, num_workers)
    out, start = [], 0
    for leaf, part in zip(sparse, parts, strict=True):
        rows = flat[:, start : start + part.size].reshape(-1)
        start += part.size
        if codec == "bitmap":
            out.append((rows[: leaf.layout.mask_words], None))
        else:
            index = _flat_index(rows.reshape(-1, leaf.layout.kept(density)[0]).astype(jnp.int32), leaf.layout, density)
            out.append((mask_from_indices(index, leaf.layout.mask_words), index))
    return out


def _flat_index(columns: jax.Array, layout: LeafLayout, density: float) -> jax.Array:
    """int32 (>= R, k) columns of kept entries -> int32 (entries kept,) positions in the flat leaf."""
    start = jnp.arange(layout.rows, dtype=jnp.int32)[:, None] * layout.row
    return (columns[: layout.rows] + start).reshape(-1)[: layout.kept(density)[2]]


def _indices(words: jax.Array, layout: LeafLayout, density: float) -> jax.Array:
    words = jnp.pad(words, (0, layout.rows * layout.row_words - layout.mask_words))
    return _flat_index(row_indices(words.reshape(layout.rows, -1), layout.kept(density)[0]), layout, density)


def _refresh(leaf: _Leaf, b1, keeps: jax.Array, worker: jax.Array) -> jax.Array:
    """M_t of the rows this worker owns: its largest |mt^n|, packed. keeps: int32 (2,), k of a full row and of the last."""
    lay = leaf.layout
    owned, total = lay.owned_rows * lay.row, lay.owned_rows * lay.row * lay.num_workers

    def part(x, unit):
        n = total // unit
        x = jnp.pad(x, (0, n - x.shape[0])) if x.shape[0] < n else x
        return lax.dynamic_slice(x, (worker * (owned // unit),), (owned // unit,))

    score = _semi_updated(part(leaf.h, 1), part(leaf.g, 1), part(leaf.prev, 32), b1).reshape(lay.owned_rows, lay.row)
    row = worker * lay.owned_rows + jnp.arange(lay.owned_rows, dtype=jnp.int32)
    k = jnp.where(row < lay.rows - 1, keeps[0], jnp.where(row == lay.rows - 1, keeps[1], 0))
    valid = None
    if total != lay.size:
        valid = row[:, None] * lay.row + jnp.arange(lay.row, dtype=jnp.int32)[None, :] < lay.size
    return pack(select(score, k, valid)).reshape(-1)


def scale_by_scape(density: float | None = None, **options: Any) -> optax.GradientTransformationExtraArgs:
    """The bare SCAPE rule: exchange, error feedback and AdamS; no learning rate, no weight decay.

    Takes the arguments of `scape` but learning_rate, weight_decay and weight_decay_mask. On a skipped step its own state
    stands still and the update is zero; transformations chained behind it see that zero. `scape` holds them still too.
    """
    return _scale_by_scape(ScapeOptions(**({} if density is None else {"density": density}), **options))


def _scale_by_scape(opts: ScapeOptions) -> optax.GradientTransformationExtraArgs:
    b1 = opts.b1
    levels = density_levels(opts.density, opts.density_warmup_steps)
    schedule = (len(levels), opts.density_warmup_steps, opts.mask_every)

    def init(params):
        num_workers = ex.axis_size(opts.axis_name)
        layouts, treedef = leaf_layouts(params, num_workers=num_workers, **opts.layout_arguments())
        tree = lambda f: treedef.unflatten([f(lay) for lay in layouts])  # noqa: E731
        words = lambda f: tree(lambda lay: jnp.zeros(f(lay), jnp.uint32) if lay.sparse else None)  # noqa: E731
        return ScaleByScapeState(
            count=jnp.zeros((), jnp.int32),
            h=tree(lambda lay: jnp.zeros((1, *lay.shape), jnp.float32)),
            mask=words(lambda lay: (lay.mask_words,)),
            next_mask=words(lambda lay: (1, lay.owned_rows * lay.row_words)),
            age=tree(lambda lay: jnp.zeros(lay.shape, jnp.uint8) if lay.sparse else None)
            if opts.staleness_power
            else None,
            stats=ex.init_stats(),
        )

    def update(updates, state, params=None, *, value=None, nonfinite=None, level=None, **extra_args):
        """Besides optax's arguments: `value`, this worker's loss, is averaged in the same all-reduce (stats.loss);
        `nonfinite`, float32 () 1 or 0, replaces the own check; `level`, a Python int, promises the density level."""
        del extra_args
        num_workers = ex.axis_size(opts.axis_name)
        ex.check_local(updates, opts.axis_name, num_workers)
        layouts, treedef = leaf_layouts(updates, num_workers=num_workers, **opts.layout_arguments())
        up = treedef.flatten_up_to
        grads = jax.tree.leaves(updates)
        none = [None] * len(grads)
        flat = lambda x: None if x is None else x.reshape(-1)  # noqa: E731
        leaves = [
            _Leaf(lay, g.astype(jnp.float32).reshape(-1), flat(h), prev, flat(own), flat(age))
            for lay, g, h, prev, own, age in zip(
                layouts,
                grads,
                up(state.h),
                up(state.mask),
                up(state.next_mask),
                none if state.age is None else up(state.age),
                strict=True,
            )
        ]
        if nonfinite is None:
            nonfinite = ex.any_nonfinite([x.g for x in leaves]) if opts.skip_nonfinite else jnp.zeros((), jnp.float32)
        value = jnp.zeros((), jnp.float32) if value is None else value
        step = (state.count + 1).astype(jnp.float32)
        masks = _current_masks(leaves, opts, levels, state.count, num_workers)

        def at_level(index: int):
            return lambda: _step_at_level(
                leaves, masks, opts, levels, index, step, (nonfinite, value), state.stats, num_workers
            )

        if level is None and len(levels) > 1:
            out = lax.switch(level_of(state.count, *schedule), [at_level(i) for i in range(len(levels))])
        else:
            out = at_level(len(levels) - 1 if level is None else level)()
        new, stats = out
        ok = stats.skipped == state.stats.skipped

        sparse = [x for x in leaves if x.layout.sparse]
        own = [x.own for x in sparse]
        if sparse:
            keeps = jnp.array([[x.layout.kept(d)[:2] for d in levels] for x in sparse], jnp.int32)
            keeps = keeps[:, level_of(state.count + 1, *schedule)]
            worker = ex.worker_index(opts.axis_name, num_workers)
            refresh = lambda: [_refresh(x, b1, k, worker) for x, k in zip(sparse, keeps, strict=True)]  # noqa: E731
            if opts.mask_every > 1:
                own = lax.cond(state.count % opts.mask_every == 0, refresh, lambda: own)
            else:
                own = refresh()
            own = [jnp.where(ok, n, x.own) for n, x in zip(own, sparse, strict=True)]
        own = iter(own)

        dtypes = output_dtypes(grads, treedef, params)
        shaped = lambda xs, to: treedef.unflatten([to(x, lay) for x, lay in zip(xs, layouts, strict=True)])  # noqa: E731
        new_state = ScaleByScapeState(
            count=jnp.where(ok, optax.safe_increment(state.count), state.count),
            h=shaped([n["h"] for n in new], lambda x, lay: x.reshape(1, *lay.shape)),
            mask=treedef.unflatten([n["mask"] for n in new]),
            next_mask=treedef.unflatten([next(own)[None] if lay.sparse else None for lay in layouts]),
            age=None
            if state.age is None
            else shaped([n["age"] for n in new], lambda x, lay: None if x is None else x.reshape(lay.shape)),
            stats=stats,
        )
        u = [n["u"].astype(t) for n, t in zip(new, dtypes, strict=True)]
        return shaped(u, lambda x, lay: x.reshape(lay.shape)), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _current_masks(leaves, opts, levels, count, num_workers):
    """M_{t-1} of every sparse leaf as (packed, indices or None); depends on no gradient, so it can be gathered while
    forward and backward run. At warm-up levels the final codec may not hold the mask: see `_step_at_level`."""
    if not any(x.layout.sparse for x in leaves):
        return []
    codec = opts.resolved_codec([x.layout for x in leaves])
    gather = lambda: _gathered(leaves, opts, codec, levels[-1], num_workers)  # noqa: E731
    if opts.mask_every == 1:
        return gather()
    # Between refreshes the mask stays; the step after a refresh gathers it.
    fresh = (count - 1) % opts.mask_every == 0
    kept = [x.prev for x in leaves if x.layout.sparse]
    words = lax.cond(fresh, lambda: [w for w, _ in gather()], lambda: kept)
    return [(w, None) for w in words]


def _step_at_level(leaves, masks, opts, levels, index, step, control, old_stats, num_workers):
    """The step under the mask of density levels[index]: (per leaf {u, h, mask, age}, stats)."""
    density, b1 = levels[index], opts.b1
    nonfinite, value = control
    codec = opts.resolved_codec([x.layout for x in leaves])
    if 0 < index < len(levels) - 1 and codec == "index":
        masks = _warmup_masks(leaves, masks, opts, step, num_workers)
    masks = iter(masks)
    terms = []  # per leaf: (mask, indices, m_prev on the mask, residual on the mask or None)
    payload = []
    for leaf in leaves:
        lay = leaf.layout
        if not lay.sparse:
            mask, at, g, m_prev, e = None, None, leaf.g, leaf.h, None
        elif index == 0:
            next(masks)
            was_kept = unpack(leaf.prev, lay.size)
            mask, at, g = ones_mask(lay.size), None, leaf.g
            m_prev, e = jnp.where(was_kept, leaf.h, 0.0), jnp.where(was_kept, 0.0, leaf.h)
        else:
            mask, at = next(masks)
            at = _indices(mask, lay, density) if at is None else at
            g, h = (x.at[at].get(mode="promise_in_bounds", unique_indices=True) for x in (leaf.g, leaf.h))
            was_kept = bit_at(leaf.prev, at)
            m_prev, e = jnp.where(was_kept, h, 0.0), jnp.where(was_kept, 0.0, h)
        terms.append((mask, at, m_prev))
        payload.append(g if e is None else g + e / (1 - b1))

    ghats, bad, loss = ex.all_reduce_mean(payload, nonfinite, value, opts.axis_name, num_workers, opts.payload_dtype)
    norm = ex.global_norm(ghats)
    ok = (bad == 0) & jnp.isfinite(norm) if opts.skip_nonfinite else jnp.ones((), bool)
    factor = ex.clip_factor(norm, opts.clip_norm)
    stats = ex.StepStats(loss, norm, factor, old_stats.skipped + (~ok).astype(jnp.int32))

    new = []
    for leaf, (mask, at, m_prev), ghat in zip(leaves, terms, ghats, strict=True):
        clipped = factor * ghat
        in_v = clipped
        if leaf.age is not None:
            tau = (leaf.age if at is None else leaf.age.at[at].get(mode="promise_in_bounds")).astype(jnp.float32) + 1
            in_v = clipped / tau**opts.staleness_power
        in_m = ghat if opts.clip_order == "paper" else clipped
        m, u = adams_rule(
            in_m, m_prev, step, b1=b1, b2=opts.b2, eps=opts.eps, bias_correction=opts.bias_correction, g_in_v=in_v
        )
        u = jnp.where(ok, u, 0.0)
        new.append(_written_back(leaf, mask, at, m, u, ok, b1))
    return new, stats


def _warmup_masks(leaves, masks, opts, step, num_workers):
    """At a warm-up level the indices of the final codec cover only a part of the mask: gather the bitmap instead."""
    bitmaps = lambda: _gathered(leaves, opts, "bitmap", 1.0, num_workers)  # noqa: E731
    if opts.mask_every == 1:
        return bitmaps()
    fresh = (step.astype(jnp.int32) - 2) % opts.mask_every == 0
    words = lax.cond(fresh, lambda: [w for w, _ in bitmaps()], lambda: [w for w, _ in masks])
    return [(w, None) for w in words]


def _written_back(leaf: _Leaf, mask, at, m, u, ok, b1) -> dict[str, Any]:
    """Dense update, buffer, mask and age of one leaf from the kept entries. On a skip all but the update stand still."""
    if mask is None:
        return {"u": u, "h": jnp.where(ok, m, leaf.h), "mask": None, "age": None}
    age = leaf.age
    if at is None:
        h = jnp.where(ok, m, leaf.h)
        if age is not None:
            age = jnp.where(ok, jnp.zeros_like(age), age)
    else:
        put = {"mode": "promise_in_bounds", "unique_indices": True}
        old = leaf.h.at[at].get(**put)
        h = jnp.where(ok, _semi_updated(leaf.h, leaf.g, leaf.prev, b1), leaf.h).at[at].set(jnp.where(ok, m, old), **put)
        u = jnp.zeros_like(leaf.h).at[at].set(u, **put)
        if age is not None:
            grown = jnp.where(ok & (age < MAX_AGE), age + 1, age)
            age = grown.at[at].set(jnp.where(ok, 0, age.at[at].get(**put)).astype(jnp.uint8), **put)
    return {"u": u, "h": h, "mask": jnp.where(ok, mask, leaf.prev), "age": age}


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
) -> optax.GradientTransformationExtraArgs:
    r"""SCAPE with learning rate and decoupled weight decay: AdamS that exchanges only `density` of the entries per step.

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
      clip_order: "before" clips what enters both m and v; "paper" clips only what enters v, as the paper's listing does,
        which makes the step larger whenever clipping acts.
      bias_correction: "both", "none" or "momentum", see `adams_rule`.
      axis_name: mesh axis (or axes) of the workers; None: one worker.
      selection: "block" keeps max(1, round(d*B)) entries in every row of B; "leaf" is a top-k over each owner's share of
        a leaf.
      block_size: B, a multiple of 32. None: 4096. Leaves smaller than this are dense.
      codec: how masks travel: "bitmap", "index", or "auto" for the cheaper one.
      payload_dtype: jnp.float32 or jnp.bfloat16. None: float32.
      dense: leaves whose path it returns True for are exchanged whole, beside scalars, vectors, norm scales and biases.
      density_warmup_steps: T of d_t = d^min(1, t/T), rounded up to a few levels. None: none, dense in step 1 only.
      mask_every: steps between refreshes of the mask. None: 1.
      staleness_power: p: an entry that waited tau steps enters v as ghat / tau^p. None: 0 (the paper). 1 is better at
        small budgets (docs/results).
      skip_nonfinite: a non-finite gradient on any worker makes all workers skip the step, bit for bit.

    Returns:
      An ordinary optax transformation. `init` and `update` run inside shard_map when axis_name is given
      (`make_train_step` does that); for optax.inject_hyperparams pass static_args=scape_jax.STATIC_ARGS when you set a
      static number such as density.

    Raises:
      ValueError: a setting is outside its range. TypeError: a leaf is not floating-point.

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
    )
    levels = density_levels(opts.density, opts.density_warmup_steps)
    return make_optimizer(
        _scale_by_scape(opts),
        learning_rate,
        weight_decay,
        weight_decay_mask,
        wire=functools.partial(wire_bytes, method="scape", **dataclasses.asdict(opts)),
        final_level=len(levels) - 1,
        final_count=final_count(len(levels), opts.density_warmup_steps, opts.mask_every),
    )
