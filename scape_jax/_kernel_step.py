"""The SCAPE step on a GPU: each leaf goes through three kernels, and its buffers are written in place once.

Source: arXiv 2607.01678, Algorithm 1, as in `_scape_step.py`; the equations stand in pallas_kernels/moment_pass and
pallas_kernels/apply_pass. What differs from the plain-JAX step is where the work is done: masks stay packed, the kept
entries of all leaves are written into one buffer, which is what travels, and are read from there. The dense first step is
the plain-JAX one.
"""

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import divided_by_xla
from pallas_kernels.apply_pass import Scalars, apply_pass, coefficients
from pallas_kernels.compact import index_rows, mask_rows
from pallas_kernels.moment_pass import moment_pass, select_moment
from scape_jax import _exchange as ex
from scape_jax._kept import Kept
from scape_jax._layout import LeafLayout
from scape_jax._options import ScapeOptions
from scape_jax._scape_step import ScapeStep, owned_rows
from scape_jax._worker_types import equal_on_workers, own_on_workers

# Of all leaves together, with room for what travels beside them.
MAX_KEPT = 1 << 30

_logger = logging.getLogger("scape_jax")


def takes_kernels(opts: ScapeOptions) -> bool:
    """Whether a step traced here goes through kernels: where they are named, or open and the devices are GPUs.

    Open means that each operation still chooses where the program is lowered, so a wrong guess here costs speed only.
    """
    if opts.implementation is not None:
        return opts.implementation != "xla"
    if not _on_gpu():
        return False
    if reason := opts.no_kernel() or divided_by_xla():
        _log_fallback(reason)
        return False
    return True


def _on_gpu() -> bool:
    # A shard_map knows its devices; outside of one it is JAX's default.
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return platform in ("gpu", "cuda")


@functools.cache
def _log_fallback(reason: str) -> None:
    _logger.warning("scape: plain JAX instead of kernels: %s.", reason)


class KernelStep(ScapeStep):
    """`ScapeStep` by kernels. Its leaves' gradients may be bfloat16."""

    def _cut(self, layout: LeafLayout, index: int) -> dict[str, Any]:
        """How a kernel is told the rows of a leaf and what is kept of them at density levels[index]."""
        k, k_last, _ = layout.kept(self.levels[index])
        return {"k": k, "k_last": k_last, "block": layout.row, "implementation": self.opts.implementation}

    def _own(self, *arrays: Any) -> tuple[Any, ...]:
        """Operands, or None, all typed as another on each worker: a kernel's results are, and the reference's must be."""
        return tuple(None if x is None else own_on_workers(x, self.opts.axis_name) for x in arrays)

    def _shared(self, x: jax.Array) -> jax.Array:
        return equal_on_workers(x, self.opts.axis_name)

    def _gather(self, codec: str) -> list[Kept]:
        keep = [leaf.layout.kept(self.levels[-1])[0] for leaf in self.sparse]
        # The codec has no Triton kernels.
        named = None if self.opts.implementation == "triton" else self.opts.implementation
        own = [leaf.own.reshape(-1) for leaf in self.sparse]
        if codec == "index":
            own = [
                index_rows(
                    words,
                    leaf.layout.owned_rows * leaf.layout.row,
                    k,
                    block=leaf.layout.row,
                    implementation=named,
                ).reshape(-1)
                for leaf, words, k in zip(self.sparse, own, keep, strict=True)
            ]
        gathered = ex.all_gather(jnp.concatenate(own), self.opts.axis_name, self.num_workers)
        masks, start = [], 0
        for leaf, part, k in zip(self.sparse, own, keep, strict=True):
            lay = leaf.layout
            rows = gathered[:, start : start + part.size].reshape(-1)
            start += part.size
            if codec == "index":
                (columns,) = self._own(rows.reshape(-1, k)[: lay.rows])
                masks.append(
                    Kept(self._shared(mask_rows(columns, lay.size, block=lay.row, implementation=named)))
                )
            else:
                masks.append(Kept(rows[: lay.mask_words]))
        return masks

    def _select(self, keeps: jax.Array, worker: jax.Array) -> list[jax.Array]:
        own = []
        for leaf, keep in zip(self.sparse, keeps, strict=True):
            lay = leaf.layout
            _, k = owned_rows(lay, keep, worker)
            h, g, last, k, first_row = self._own(leaf.h, leaf.g, leaf.prev, k, worker * lay.owned_rows)
            words = select_moment(
                h,
                g,
                last,
                k,
                b1=self.opts.b1,
                first_row=first_row,
                num_rows=lay.owned_rows,
                block=lay.row,
                finite=self.opts.drops_nonfinite,
                implementation=self.opts.implementation,
            )
            own.append(words[None])
        return own

    def _at_level(self, index, masks, selected, emit, nonfinite, loss, stats):
        opts, step = self.opts, (self.count + 1).astype(jnp.float32)
        first = self._first_entries(index)
        # Positions in the payload are int32.
        if index == 0 or not self.sparse or first[-1] > MAX_KEPT:
            leaves = [dataclasses.replace(leaf, g=leaf.g.astype(jnp.float32)) for leaf in self.leaves]
            nonfinite, _ = ex.control_numbers([leaf.g for leaf in leaves], nonfinite, loss, opts.checks_all)
            plain = ScapeStep(opts, leaves, self.count, self.num_workers)
            return plain._at_level(index, masks, selected, emit, nonfinite, loss, stats)

        words = [kept.words for kept in self._masks_at(index, masks)]
        dense = [leaf.g.astype(jnp.float32) for leaf in self.leaves if not leaf.layout.sparse]
        payload, nonfinite = self._payload(index, words, first, dense, nonfinite)
        total, dense_means, bad, loss = self._exchanged(payload, first[-1], dense, nonfinite, loss)
        values = total[: first[-1]].astype(jnp.float32) / self.num_workers
        limits = opts.clip_norm, opts.skip_nonfinite, opts.skip_spike
        stats, ok = ex.judge([values, *dense_means], bad, loss, stats, *limits)

        scalars = Scalars(
            ok=ok,
            scale=1.0 / self.num_workers,
            clip=stats.clip_factor,
            eta=emit.eta,
            decay=0.0,
            rule=coefficients(step, b1=opts.b1, b2=opts.b2, eps=opts.eps),
        )
        results, sparse, whole = [], iter(zip(words, first[:-1], strict=True)), iter(dense_means)
        for i, leaf in enumerate(self.leaves):
            if leaf.layout.sparse:
                mask, start = next(sparse)
                own = scalars._replace(decay=self._decay(emit, i))
                results.append(self._applied(index, leaf, i, emit, mask, total, start, selected[i], own))
            else:
                results.append(self._dense(leaf, i, emit, step, next(whole), stats, ok))
        out, h, last, age = map(list, zip(*results, strict=True))
        return out, h, last, age, stats, ok

    def _first_entries(self, index: int) -> list[int]:
        """Where each sparse leaf's entries start in the payload; then their number."""
        ends = [0]
        for leaf in self.sparse:
            ends.append(ends[-1] + leaf.layout.kept(self.levels[index])[2])
        return ends

    def _payload(self, index, words, first, dense, nonfinite):
        """(what is sent of the sparse leaves, with room behind it for the rest; whether a gradient is not finite)."""
        opts = self.opts
        check = nonfinite is None and opts.checks_all
        payload: Any = first[-1] + sum(g.size for g in dense) + (2 if self._one_vector else 0)
        squares_of: list[jax.Array] = []
        for leaf, mask, start in zip(self.sparse, words, first[:-1], strict=True):
            h, g, last, mask = self._own(leaf.h, leaf.g, leaf.prev, mask)
            payload, squares = moment_pass(
                h,
                g,
                last,
                mask,
                b1=opts.b1,
                squares=check,
                dtype=opts.payload_dtype,
                into=payload,
                first=start,
                **self._cut(leaf.layout, index),
            )
            squares_of += [] if squares is None else [squares]
        if nonfinite is None:
            nonfinite = jnp.zeros((), jnp.float32)
            if check:
                total = sum([jnp.sum(x) for x in (*squares_of, *map(jnp.square, dense))], nonfinite)
                nonfinite = ex.flag_of_squares(total)
        return payload, nonfinite

    @property
    def _one_vector(self) -> bool:
        """The two control numbers are float32, so they travel in the payload only where it is that too."""
        return jnp.dtype(self.opts.payload_dtype) == jnp.float32

    def _exchanged(self, payload, kept, dense, nonfinite, loss):
        """ONE psum of one vector: (its sum, means of the dense leaves, workers with a bad gradient, mean loss).

        The rest is written behind the kept entries. Handed over as arrays of their own XLA would copy all into one.
        """
        scale = 1.0 / self.num_workers
        control = jnp.stack([nonfinite, loss.astype(jnp.float32)])
        rest = [g.reshape(-1).astype(payload.dtype) for g in dense] + ([control] if self._one_vector else [])
        if rest:
            (tail,) = self._own(jnp.concatenate(rest))
            payload = lax.dynamic_update_slice(payload, tail, (kept,))
        total, alone = ex.all_sum(
            (payload, None if self._one_vector else control), self.opts.axis_name, self.num_workers
        )
        control = total[-2:] if self._one_vector else alone
        means, start = [], kept
        for g in dense:
            means.append((total[start : start + g.size].astype(jnp.float32) * scale).reshape(g.shape))
            start += g.size
        return total, means, control[0], control[1] * scale

    def _decay(self, emit, i):
        lam = 0.0 if emit.lam is None else emit.lam[i]
        return lam if emit.update else emit.eta * lam

    def _applied(self, index, leaf, i, emit, mask, total, start, selected, scalars):
        """(result, h, mask, age) of a sparse leaf."""
        opts = self.opts
        # An update without decay needs no parameters.
        theta = None if emit.update and emit.lam is None else emit.theta[i]
        theta, h, g, last, mask, total, age = self._own(
            theta, leaf.h, leaf.g, leaf.prev, mask, total, leaf.age
        )
        new = apply_pass(
            theta,
            h,
            g,
            last,
            mask,
            total,
            scalars=jax.tree.map(lambda x: self._own(jnp.asarray(x, jnp.float32))[0], scalars),
            first=start,
            age=age,
            staleness_power=opts.staleness_power,
            bias_correction=opts.bias_correction,
            clip_all=opts.clip_order == "before",
            finite=opts.drops_nonfinite,
            update_dtype=emit.dtypes[i] if emit.update else None,
            after=self._own(selected),
            **self._cut(leaf.layout, index),
        )
        age = None if new.age is None else self._shared(new.age)
        return self._shared(new.out).reshape(leaf.layout.shape), new.h, self._shared(new.last), age

    def _dense(self, leaf, i, emit, step, ghat, stats, ok):
        """The same of a leaf that travels whole."""
        m_prev = self._shared(leaf.h.reshape(-1))
        m, u = self._rule(step, ghat.reshape(-1), m_prev, stats.clip_factor, None)
        kept = Kept()
        return emit.leaf(i, kept, u, ok), kept.put(leaf.h, m, ok), None, leaf.age
