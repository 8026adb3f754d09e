"""The byte ledger: what one worker sends per step, in closed form, and the same counted from a jaxpr.

Ring algorithms: an all-reduce of n bytes sends 2 (W-1)/W n bytes per worker, an all-gather of n bytes per worker (W-1) n.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from scape_jax._checks import check_density
from scape_jax._layout import density_levels, keep_of, leaf_layouts, level_of
from scape_jax._options import ScapeOptions

CONTROL_BYTES = 8  # two float32 beside each all-reduce: non-finite flag and loss


@dataclasses.dataclass(frozen=True)
class WireBytes:
    """Bytes of one step. `*_operand` is what a worker puts into the collective, the others what it sends.

    Attributes:
      all_reduce_operand: bytes a worker puts into the all-reduce.
      all_gather_operand: bytes a worker puts into the all-gather.
      values_bytes: sent for the kept entries (with positions, for top-k).
      mask_bytes: sent for the masks.
      dense_bytes: sent for the dense leaves and the two control numbers.
      dense_total_bytes: what a float32 ring all-reduce of all parameters would send.
      density: fraction of all parameters whose values are exchanged.
    """

    all_reduce_operand: int
    all_gather_operand: int
    values_bytes: int
    mask_bytes: int
    dense_bytes: int
    dense_total_bytes: int
    density: float

    @property
    def total_bytes(self) -> int:
        return self.values_bytes + self.mask_bytes + self.dense_bytes

    @property
    def ratio(self) -> float:
        """Times fewer bytes than the dense float32 all-reduce; infinite where nothing is sent."""
        return self.dense_total_bytes / self.total_bytes if self.total_bytes else float("inf")


def ring_all_reduce_bytes(operand_bytes: int, num_workers: int) -> int:
    return round(2 * (num_workers - 1) * operand_bytes / num_workers)


def ring_all_gather_bytes(operand_bytes: int, num_workers: int) -> int:
    return (num_workers - 1) * operand_bytes


def wire_bytes(
    params: Any,
    *,
    num_workers: int,
    step: int | None = None,
    method: Literal["scape", "all_reduce", "topk"] = "scape",
    **options: Any,
) -> WireBytes:
    """Bytes that one worker sends in a step, in closed form; nothing is run.

    Args:
      params: the parameters or their ShapeDtypeStructs.
      num_workers: W.
      step: step number from 1 (step 1 is dense, warm-up steps have their own densities); None: after all warm-up, in a
        step that gathers a mask.
      method: "scape", "all_reduce" (`adams`, `adamw`) or "topk".
      **options: those of `scape` that matter here: density, selection, block_size, codec, payload_dtype, dense,
        density_warmup_steps, mask_every. "all_reduce" takes payload_dtype, "topk" density and block_size.

    Raises:
      ValueError: num_workers or step below 1, or an option outside its range.

    Example:
      >>> import jax, jax.numpy as jnp, scape_jax
      >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
      >>> sent = scape_jax.wire_bytes(params, num_workers=64, density=0.01)
      >>> round(sent.ratio)
      80
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be >= 1, got {num_workers}.")
    if step is not None and step < 1:
        raise ValueError(f"step counts from 1, got {step}.")
    total = sum(int(np.prod(jnp.shape(p), dtype=np.int64)) for p in jax.tree.leaves(params))
    dense_total = ring_all_reduce_bytes(4 * total, num_workers)
    if method == "scape":
        # Only what shapes the exchange is looked at, so a caller may pass the keyword arguments of `scape` as they are.
        names = {f.name for f in dataclasses.fields(ScapeOptions)}
        opts = ScapeOptions(**{k: v for k, v in options.items() if k in names and v is not None})
        kept, dense, gathered = _scape_parts(params, opts, num_workers, step)
        value_width = jnp.dtype(opts.payload_dtype).itemsize
        operand = (kept + dense) * value_width
        values, mask = (
            ring_all_reduce_bytes(kept * value_width, num_workers),
            ring_all_gather_bytes(gathered, num_workers),
        )
    elif method == "all_reduce":
        width = jnp.dtype(options.get("payload_dtype") or jnp.float32).itemsize
        kept, dense, gathered, operand, values, mask = 0, total, 0, total * width, 0, 0
    elif method == "topk":
        density = options.get("density") or 0.1
        check_density(density)
        layouts, _ = leaf_layouts(
            params,
            density=density,
            block_size=options.get("block_size") or 4096,
            selection="block",
            dense=None,
            num_workers=1,
        )
        kept = sum(keep_of(lay.size, density) for lay in layouts if lay.sparse)
        dense = sum(lay.size for lay in layouts if not lay.sparse)
        gathered, operand = kept * 8, dense * 4
        values, mask = ring_all_gather_bytes(gathered, num_workers), 0
    else:
        raise ValueError(f"method must be 'scape', 'all_reduce' or 'topk', got {method!r}.")
    reduced = ring_all_reduce_bytes(operand + CONTROL_BYTES, num_workers)
    dense_bytes = reduced - values if method == "scape" else reduced
    if num_workers == 1:
        operand = gathered = dense_bytes = values = mask = 0
    return WireBytes(
        all_reduce_operand=operand + CONTROL_BYTES if num_workers > 1 else 0,
        all_gather_operand=gathered,
        values_bytes=values,
        mask_bytes=mask,
        dense_bytes=dense_bytes,
        dense_total_bytes=dense_total,
        density=(kept + dense) / max(total, 1),
    )


def _scape_parts(params, opts: ScapeOptions, num_workers: int, step: int | None) -> tuple[int, int, int]:
    """(kept entries, entries of dense leaves, bytes put into the all-gather) of a step."""
    layouts, _ = leaf_layouts(params, num_workers=num_workers, **opts.layout_arguments())
    levels = density_levels(opts.density, opts.density_warmup_steps)
    last = len(levels) - 1
    level, fresh = last, True
    if step is not None:
        level = level_of(step - 1, len(levels), opts.density_warmup_steps, opts.mask_every)
        fresh = (step - 2) % opts.mask_every == 0
    sparse = [lay for lay in layouts if lay.sparse]
    dense = sum(lay.size for lay in layouts if not lay.sparse)
    if level == 0:
        kept = sum(lay.size for lay in sparse)
    else:
        kept = sum(lay.kept(levels[level])[2] for lay in sparse)
    gathered = 0
    if sparse and fresh:
        codec = opts.resolved_codec(layouts)
        # The gather of the final codec stands outside the choice of level, so that it can overlap with the backward
        # pass; a warm-up level whose mask it cannot hold adds a bitmap.
        gathered = opts.own_mask_bytes(layouts, codec, opts.density)
        if codec == "index" and 0 < level < last:
            gathered += opts.own_mask_bytes(layouts, "bitmap", 1.0)
    return kept, dense, gathered


def collective_operand_bytes(fn: Callable, *args: Any, level: int | None = None) -> dict[str, int]:
    """Bytes that one worker puts into each kind of collective, counted from the jaxpr of `fn(*args)`.

    Args:
      fn: a function that holds shard_map'ped collectives, e.g. one update.
      *args: its arguments or their ShapeDtypeStructs.
      level: which branch to count of a conditional with an all-reduce in each, None: the last one. Of a conditional
        with collectives in one branch only, that branch counts.

    Returns:
      {"all_reduce": bytes, "all_gather": bytes, "num_all_reduce": count, "num_all_gather": count}.
    """
    closed = jax.make_jaxpr(fn)(*args)
    found = {"all_reduce": 0, "all_gather": 0, "num_all_reduce": 0, "num_all_gather": 0}
    _walk(closed.jaxpr, found, 1, level)
    return found


def _nbytes(atom: Any) -> int:
    aval = atom.aval
    return int(np.prod(aval.shape, dtype=np.int64)) * jnp.dtype(aval.dtype).itemsize


def _walk(jaxpr: Any, found: dict[str, int], times: int, level: int | None) -> None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        kind = (
            "all_reduce"
            if name.startswith("psum")
            else "all_gather"
            if name.startswith("all_gather")
            else None
        )
        if kind and not (kind == "all_reduce" and "scatter" in name):
            found[kind] += times * sum(_nbytes(v) for v in eqn.invars)
            found[f"num_{kind}"] += times
        elif eqn.params.get("branches_platforms"):  # an all-reduce, which on CPU is made of other collectives
            _walk(eqn.params["branches"][-1].jaxpr, found, times, level)
        elif name == "cond":
            counts = []
            for branch in eqn.params["branches"]:
                counts.append(dict.fromkeys(found, 0))
                _walk(branch.jaxpr, counts[-1], times, level)
            if all(c["num_all_reduce"] for c in counts):  # the choice of the density level
                chosen = counts[-1 if level is None else level]
            else:  # gather or keep
                chosen = max(counts, key=lambda c: c["num_all_reduce"] + c["num_all_gather"])
            for key, n in chosen.items():
                found[key] += n
        else:
            inner_times = times * eqn.params.get("length", 1) if name == "scan" else times
            for value in eqn.params.values():
                for sub in value if isinstance(value, tuple | list) else (value,):
                    inner = getattr(sub, "jaxpr", sub)
                    if hasattr(inner, "eqns"):
                        _walk(inner, found, inner_times, level)
