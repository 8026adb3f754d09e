"""One SCAPE step on one worker, in payload space: what is gathered, exchanged, updated and selected.

Source: arXiv 2607.01678, Algorithm 1, in the form of `_scape.py`. Only the kept entries of a leaf are computed with; the
full-size work is one pass over h and, in the caller's `emit`, one over the parameters.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.apply_pass import MAX_AGE
from pallas_kernels.bits import bit_at, ones_mask, pack, unpack
from pallas_kernels.compact import (
    in_turn,
    is_computed,
    materialize,
    row_indices,
)
from pallas_kernels.moment_pass import semi_updated
from pallas_kernels.select import select
from scape_jax import _exchange as ex
from scape_jax._adams import adams_rule
from scape_jax._kept import Kept, flat_positions, kept_in_turn, located
from scape_jax._layout import LeafLayout, density_levels, level_of
from scape_jax._options import ScapeOptions
from scape_jax._worker_types import equal_on_workers


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf inside a step, as this worker holds it. prev, own and age are None for a dense leaf.

    Arrays keep the shapes of the state, so that XLA writes into the donated buffers in place.
    """

    layout: LeafLayout
    g: jax.Array  # (*shape) float32, the worker's gradient
    h: jax.Array  # (1, *shape) float32
    prev: Any  # packed M_{t-2}: where h holds m
    own: Any  # (1, words), packed rows of M_{t-1} that this worker selected
    age: Any  # (*shape) uint8


@dataclasses.dataclass(frozen=True)
class Emit:
    """What the step returns for each leaf: theta - eta (u + lam theta), or that change alone.

    `leaf` makes it in plain JAX; a kernel makes the same from the other fields.
    """

    # (leaf number, its mask, u on the kept entries, ok) -> what the step returns for that leaf.
    leaf: Callable[[int, Kept, jax.Array, jax.Array], jax.Array]
    update: bool  # the change alone
    dtypes: list[Any]  # of the results
    eta: Any
    lam: list[Any] | None  # weight decay of each leaf; None: none
    theta: list[jax.Array] | None  # parameters, where they are needed


@dataclasses.dataclass(frozen=True)
class StepResult:
    emitted: list[jax.Array]
    h: list[jax.Array]
    words: list[jax.Array | None]
    own: list[jax.Array | None]
    age: list[jax.Array | None]
    stats: ex.StepStats
    ok: jax.Array


class ScapeStep:
    """The step for given settings and leaves. `count` is the number of steps taken before."""

    def __init__(self, opts: ScapeOptions, leaves: list[Leaf], count: jax.Array, num_workers: int):
        self.opts, self.leaves, self.count, self.num_workers = opts, leaves, count, num_workers
        self.levels = density_levels(opts.density, opts.density_warmup_steps)
        self.sparse = [leaf for leaf in leaves if leaf.layout.sparse]
        layouts = [leaf.layout for leaf in leaves]
        self.codec, self.index_dtype = opts.resolved_codec(layouts), opts.index_dtype(layouts)

    def run(self, emit: Emit, nonfinite: jax.Array, loss: jax.Array, stats: ex.StepStats, level: int | None):
        """The whole step; `level`, where given, promises the density level of `count`."""
        # Nothing here depends on a gradient, so XLA can gather the masks while forward and backward run.
        masks = self._current_masks()
        selected = self._selected()

        def at_level(index: int):
            return lambda: self._at_level(index, masks, selected, emit, nonfinite, loss, stats)

        if level is None and len(self.levels) > 1:
            branches = [at_level(i) for i in range(len(self.levels))]
            emitted, h, words, age, stats, ok = lax.switch(self._level_after(0), branches)
        else:
            emitted, h, words, age, stats, ok = at_level(len(self.levels) - 1 if level is None else level)()
        own = [
            None if new is None else jnp.where(ok, new, leaf.own)
            for leaf, new in zip(self.leaves, selected, strict=True)
        ]
        return StepResult(emitted, h, words, own, age, stats, ok)

    # The mask in use ----------------------------------------------------------------------------------------------

    def _level_after(self, steps: int) -> jax.Array:
        o = self.opts
        return level_of(self.count + steps, len(self.levels), o.density_warmup_steps, o.mask_every)

    def _fresh(self) -> jax.Array:
        """bool (): the last step selected a mask, which is not gathered yet."""
        return (self.count - 1) % self.opts.mask_every == 0

    def _current_masks(self) -> list[Kept]:
        """M_{t-1} of every sparse leaf, by the codec of the final density."""
        if not self.sparse:
            return []
        if self.opts.mask_every == 1:
            return self._gather(self.codec)
        return self._gather_if_fresh(self.codec, [leaf.prev for leaf in self.sparse])

    def _gather_if_fresh(self, codec: str, otherwise: list[jax.Array]) -> list[Kept]:
        def gather():
            return [
                kept.packed(leaf.layout) for kept, leaf in zip(self._gather(codec), self.sparse, strict=True)
            ]

        return [Kept(words) for words in lax.cond(self._fresh(), gather, lambda: otherwise)]

    def _gather(self, codec: str) -> list[Kept]:
        """The owners' rows from all workers, for all leaves in ONE all-gather."""
        keep = [leaf.layout.kept(self.levels[-1])[0] for leaf in self.sparse]
        if codec == "bitmap":
            parts = [leaf.own.reshape(-1) for leaf in self.sparse]
        else:
            parts = [
                row_indices(leaf.own.reshape(-1, leaf.layout.row_words), k)
                .astype(self.index_dtype)
                .reshape(-1)
                for leaf, k in zip(self.sparse, keep, strict=True)
            ]
        gathered = ex.all_gather(jnp.concatenate(parts), self.opts.axis_name, self.num_workers)
        masks, start = [], 0
        for leaf, part, k in zip(self.sparse, parts, keep, strict=True):
            rows = gathered[:, start : start + part.size].reshape(-1)
            start += part.size
            if codec == "bitmap":
                masks.append(Kept(rows[: leaf.layout.mask_words]))
            else:
                columns = rows.reshape(-1, k).astype(jnp.int32)
                at = materialize(flat_positions(columns, leaf.layout, self.levels[-1]))
                masks.append(Kept(at=at))
        return masks

    def _masks_at(self, index: int, masks: list[Kept]) -> Iterator[Kept]:
        """The masks of density levels[index]."""
        if index == 0:
            return iter([Kept(ones_mask(leaf.layout.size)) for leaf in self.sparse])
        if index < len(self.levels) - 1 and self.codec == "index":
            # The indices gathered for the final density hold only a part of this larger mask: send its bitmap.
            if self.opts.mask_every == 1:
                masks = self._gather("bitmap")
            else:
                masks = self._gather_if_fresh("bitmap", [kept.words for kept in masks])
        return iter(masks)

    # Exchange and update ------------------------------------------------------------------------------------------

    def _at_level(self, index, masks, selected, emit, nonfinite, loss, stats):
        opts, b1 = self.opts, self.opts.b1
        step = (self.count + 1).astype(jnp.float32)
        masks = self._masks_at(index, masks)
        kept_of, m_prevs, payload = [], [], []
        turn = is_computed(self.count)
        for leaf in self.leaves:
            kept = next(masks) if leaf.layout.sparse else Kept()
            if leaf.layout.sparse and index > 0:
                kept = located(kept, leaf.layout, self.levels[index], turn)
                m_prev, g = in_turn(turn, functools.partial(_taken, leaf, b1), kept)
                turn = self._next_turn(turn, g)
            else:
                m_prev, g = _taken(leaf, b1, kept)
            kept_of.append(kept)
            m_prevs.append(equal_on_workers(m_prev, opts.axis_name))
            payload.append(g)

        ghats, bad, loss = ex.all_reduce_mean(
            payload, nonfinite, loss, opts.axis_name, self.num_workers, opts.payload_dtype, bundle=index > 0
        )
        limits = opts.clip_norm, opts.skip_nonfinite, opts.skip_spike
        stats, ok = ex.judge(ghats, bad, loss, stats, *limits)
        # The buffers are overwritten in place, after everything else has read them.
        write = self._next_turn(ok, stats.grad_norm, *[x for x in selected if x is not None])
        emitted, hs, ages, words = [], [], [], []
        for i, (leaf, kept, m_prev, ghat) in enumerate(
            zip(self.leaves, kept_of, m_prevs, ghats, strict=True)
        ):
            kept, rule = kept_in_turn(write, kept, leaf.layout), functools.partial(self._rule, step)
            values = (ghat, m_prev, stats.clip_factor, None if leaf.age is None else kept.take(leaf.age))
            m, u = rule(*values) if kept.at is None else in_turn(write, rule, *values)
            emitted.append(emit.leaf(i, kept, u, write))
            hs.append(_new_buffer(leaf, kept, m, write, b1, opts.drops_nonfinite))
            ages.append(_new_age(leaf, kept, write))
            write = self._next_turn(write, emitted[-1], hs[-1])
            words.append(None if kept.words is None else jnp.where(write, kept.words, leaf.prev))
        return emitted, hs, words, ages, stats, ok

    def _rule(self, step, ghat, m_prev, clip_factor, age):
        """(m_t, u_t) on the kept entries."""
        o = self.opts
        clipped = clip_factor * ghat
        in_v = clipped if age is None else clipped / (age.astype(jnp.float32) + 1) ** o.staleness_power
        return adams_rule(
            ghat if o.clip_order == "paper" else clipped,
            m_prev,
            step,
            b1=o.b1,
            b2=o.b2,
            eps=o.eps,
            bias_correction=o.bias_correction,
            g_in_v=in_v,
        )

    def _next_turn(self, turn: jax.Array, *values: jax.Array) -> jax.Array:
        """`turn`, but only once `values` are computed.

        Leaves take turns, so that one uses the memory that the last one has worked in: XLA's CPU backend gets the
        memory of a step from the system anew, and a page that is touched first costs more than its contents.
        A buffer is overwritten in place only where those who read it took their turn before.
        """
        return equal_on_workers(_after(turn, *values), self.opts.axis_name)

    # The mask of the next step ------------------------------------------------------------------------------------

    def _selected(self) -> list[jax.Array | None]:
        """Per leaf the owned rows of the next mask, packed (1, words); the old ones between refreshes."""
        if not self.sparse:
            return [None for _ in self.leaves]
        worker = ex.worker_index(self.opts.axis_name, self.num_workers)
        keeps = jnp.array([[leaf.layout.kept(d)[:2] for d in self.levels] for leaf in self.sparse], jnp.int32)
        keeps = keeps[:, self._level_after(1)]

        def select_all():
            return self._select(keeps, worker)

        if self.opts.mask_every > 1:
            old = [leaf.own for leaf in self.sparse]
            own = iter(lax.cond(self.count % self.opts.mask_every == 0, select_all, lambda: old))
        else:
            own = iter(select_all())
        return [next(own) if leaf.layout.sparse else None for leaf in self.leaves]

    def _select(self, keeps: jax.Array, worker: jax.Array) -> list[jax.Array]:
        """Of every sparse leaf the new rows of `worker`; keeps: int32 (leaves, 2), k of a full row and of the last."""
        own, turn = [], jnp.ones((), bool)
        for leaf, k in zip(self.sparse, keeps, strict=True):
            part = _refresh(leaf, self.opts.b1, k, jnp.where(turn, worker, -1), self.opts.drops_nonfinite)
            own.append(part[None])
            turn = is_computed(own[-1])
        return own


def _taken(leaf: Leaf, b1: Any, kept: Kept) -> tuple[jax.Array, jax.Array]:
    """On the kept entries: m_{t-1}, and what is averaged over the workers, g^n + e^n / (1-b1)."""
    g, old = kept.take(leaf.g), kept.take(leaf.h)
    if not leaf.layout.sparse:
        return old, g
    # h holds m where the entry was kept in the last step, the residual elsewhere.
    had_m = unpack(leaf.prev, leaf.layout.size) if kept.at is None else bit_at(leaf.prev, kept.at)
    return jnp.where(had_m, old, 0.0), g + jnp.where(had_m, 0.0, old) / (1 - b1)


def _semi_updated(h: jax.Array, g: jax.Array, prev: jax.Array, b1: Any, finite: bool) -> jax.Array:
    """mt^n = b1 m_{t-1} + (1-b1) g^n + e^n, with m in h on M_{t-2} (`prev`) and e in h off it; of h's shape.

    `finite`: a gradient that is not, or is beyond 2^40, counts as zero.
    """
    had_m = unpack(prev, h.size).reshape(h.shape)
    return semi_updated(h, g.reshape(h.shape), had_m, b1, 1 - b1, finite)


def _after(ok: jax.Array, *values: jax.Array) -> jax.Array:
    """`ok`, but a consumer of it runs after `values` are computed.

    Without such a data dependency XLA copies a buffer that others read before it is overwritten in place; its CPU
    backend drops optimization_barrier before that decision.
    """
    return ok & jnp.stack([is_computed(x) for x in values]).all()


def _new_buffer(leaf: Leaf, kept: Kept, m: jax.Array, ok: jax.Array, b1: Any, finite: bool) -> jax.Array:
    """h of the next step: `m` on the mask, mt^n off it, which is left alone on a skip."""
    h = leaf.h
    if kept.at is not None:
        h = jnp.where(ok, _semi_updated(h, leaf.g, leaf.prev, b1, finite), h)
    return kept.put(h, m, ok)


def _new_age(leaf: Leaf, kept: Kept, ok: jax.Array) -> jax.Array | None:
    """Steps since each entry was sent: 0 on the mask, one more off it. Unchanged on a skip."""
    if leaf.age is None:
        return None
    older = jnp.where(ok & (leaf.age < MAX_AGE), leaf.age + 1, leaf.age)
    return kept.put(older, jnp.zeros((kept.count(leaf.layout),), jnp.uint8), ok)


def owned_rows(layout: LeafLayout, keeps: jax.Array, worker: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 (owned rows,): the rows of a worker, and how many entries are kept in each; none behind the last one."""
    row = worker * layout.owned_rows + jnp.arange(layout.owned_rows, dtype=jnp.int32)
    last = layout.rows - 1
    return row, jnp.where(row < last, keeps[0], jnp.where(row == last, keeps[1], 0))


def _refresh(leaf: Leaf, b1: Any, keeps: jax.Array, worker: jax.Array, finite: bool) -> jax.Array:
    """M_t of the rows this worker owns: its largest |mt^n|, packed. keeps: int32 (2,), k of a full row and of the last."""
    lay = leaf.layout
    owned, total = lay.owned_rows * lay.row, lay.owned_rows * lay.row * lay.num_workers

    def part(x: jax.Array, unit: int) -> jax.Array:
        x, n = x.reshape(-1), total // unit
        x = jnp.pad(x, (0, n - x.shape[0])) if x.shape[0] < n else x
        return lax.dynamic_slice(x, (worker * (owned // unit),), (owned // unit,))

    score = _semi_updated(part(leaf.h, 1), part(leaf.g, 1), part(leaf.prev, 32), b1, finite).reshape(
        lay.owned_rows, lay.row
    )
    row, k = owned_rows(lay, keeps, worker)
    valid = None
    if total != lay.size:
        valid = row[:, None] * lay.row + jnp.arange(lay.row, dtype=jnp.int32)[None, :] < lay.size
    return pack(select(score, k, valid)).reshape(-1)
