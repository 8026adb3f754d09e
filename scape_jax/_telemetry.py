"""What SCAPE's state says about the run, on demand: nothing of this is computed in a step unless asked for."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bits import popcount, unpack
from scape_jax import _exchange as ex
from scape_jax._scape import ScaleByScapeState


def telemetry(opt_state: Any, axis_name: ex.AxisName = None) -> dict[str, jax.Array]:
    """Figures of the last step, from an optax state that holds a SCAPE state; runs inside shard_map as `update` does.

    Communicates a few scalars.

    Returns:
      float32 scalars, {} without a SCAPE state:
      density: fraction of all entries exchanged in the last step.
      mask_overlap: fraction of the next mask that was in the last one, over sparse leaves.
      residual_norm: sqrt of the mean over workers of |e^n|^2.
      kept_norm: |m| over the entries exchanged.
      max_age: steps since the entry that waited longest was sent (only with staleness_power > 0; saturates at 255).
    """
    states = [s for s in ex.communicating_states(opt_state) if isinstance(s, ScaleByScapeState)]
    if not states:
        return {}
    num_workers = ex.axis_size(axis_name)
    worker = ex.worker_index(axis_name, num_workers)
    size, sent, residual, kept_sq = 0, 0, 0.0, 0.0
    overlap, selected, ages = 0, 0, []
    for state in states:
        h, treedef = jax.tree.flatten(state.h)
        up = treedef.flatten_up_to
        for x, mask, own in zip(h, up(state.mask), up(state.next_mask), strict=True):
            x = x.reshape(-1)
            size += x.size
            if mask is None:
                sent += x.size
                kept_sq += jnp.sum(jnp.square(x))
                continue
            kept = unpack(mask, x.size)
            sent += popcount(mask)
            kept_sq += jnp.sum(jnp.where(kept, jnp.square(x), 0.0))
            residual += jnp.sum(jnp.where(kept, 0.0, jnp.square(x)))
            own = own.reshape(-1)
            padded = jnp.pad(mask, (0, max(0, own.size * num_workers - mask.size)))
            overlap += popcount(own & lax.dynamic_slice(padded, (worker * own.size,), (own.size,)))
            selected += popcount(own)
        ages += [jnp.max(a) for a in jax.tree.leaves(state.age)]
    sums = jnp.stack([jnp.asarray(v, jnp.float32) for v in (residual, overlap, selected)])
    if num_workers > 1:
        sums = lax.psum(sums, axis_name)
    out = {
        "density": jnp.asarray(sent, jnp.float32) / max(size, 1),
        "mask_overlap": sums[1] / jnp.maximum(sums[2], 1.0),
        "residual_norm": jnp.sqrt(sums[0] / num_workers),
        "kept_norm": jnp.sqrt(jnp.asarray(kept_sq, jnp.float32)),
    }
    if ages:
        out["max_age"] = jnp.max(jnp.stack(ages)).astype(jnp.float32)
    return out
