"""A state for another number of workers, in which nothing is lost that waits to be sent.

What SCAPE (arXiv 2607.01678) sends next of the residuals e^1 .. e^W is their mean over the workers, so that is what must
stay. From W to W' workers:

    W' > W    e^n as it was for n <= W; the new ones start at mean_n e
    W' < W    e^n + (mean of all W - mean of the first W') for n <= W'

On the mask all workers hold the same first moment, and go on with it. The rows of the next mask are dealt to their new
owners.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.bits import unpack
from pallas_kernels.resized import resized
from scape_jax._baselines import TopKState
from scape_jax._checks import check_one_of, check_whole_number
from scape_jax._scape import ScaleByScapeState


def resize_workers(
    opt_state: Any,
    num_workers: int,
    *,
    block_size: int = 4096,
    selection: Literal["block", "leaf"] = "block",
) -> Any:
    """The optimizer state of W workers for `num_workers` of them.

    Nothing is communicated by it; arrays that lie on several devices are gathered as their shardings ask.

    Args:
      opt_state: an optax state of any nesting, global: fields that differ between workers have a leading axis W.
      num_workers: W', at least 1.
      block_size, selection: as given to `scape`.

    Returns:
      The same tree; fields with the axis W have it with W'. `mean_n e` of each entry is the old one to a rounding.

    Raises:
      ValueError: num_workers is below 1, or selection is "leaf" and its rows, which depend on W, would be others.

    Example:
      >>> import jax.numpy as jnp, scape_jax
      >>> tx = scape_jax.topk(1e-3, 0.5, block_size=32)  # one worker
      >>> state = tx.init({"w": jnp.ones((8, 8))})
      >>> [x.shape for x in jax.tree.leaves(scape_jax.resize_workers(state, 4)) if x.ndim > 2]
      [(4, 8, 8)]
    """
    check_whole_number("num_workers", num_workers, 1, "One worker is an axis of size 1.")
    check_one_of("selection", selection, ("block", "leaf"))
    kinds = (ScaleByScapeState, TopKState)

    def one(node: Any) -> Any:
        if isinstance(node, TopKState):
            return node._replace(residual=jax.tree.map(lambda x: resized(x, num_workers), node.residual))
        if isinstance(node, ScaleByScapeState):
            return _scape(node, num_workers, block_size, selection)
        return node

    return jax.tree.map(one, opt_state, is_leaf=lambda x: isinstance(x, kinds))


def _scape(state: ScaleByScapeState, num_workers: int, block_size: int, selection: str) -> ScaleByScapeState:
    def buffer(h: jax.Array, mask: jax.Array | None) -> jax.Array:
        if mask is None:  # a dense leaf: m alone
            return jnp.broadcast_to(h[:1], (num_workers, *h.shape[1:]))
        has_m = unpack(mask, h[0].size).reshape(h.shape[1:])
        return jnp.where(has_m, h[:1], resized(jnp.where(has_m, 0.0, h), num_workers))

    def rows(own: jax.Array, h: jax.Array) -> jax.Array:
        if num_workers == own.shape[0]:
            return own
        if selection == "leaf":
            raise ValueError(
                f"the workers must be as many as before, {own.shape[0]}, with selection='leaf', got {num_workers}: its rows "
                "depend on their number. Go on with as many, or start from the parameters alone."
            )
        rows_of_leaf = math.ceil(h[0].size / block_size)
        words = math.ceil(rows_of_leaf / num_workers) * (block_size // 32)
        dealt = own.reshape(-1)[: words * num_workers]
        return jnp.pad(dealt, (0, words * num_workers - dealt.size)).reshape(num_workers, words)

    leaves, treedef = jax.tree.flatten(state.h)
    flat = lambda tree: treedef.flatten_up_to(tree)  # noqa: E731
    masks, own = flat(state.mask), flat(state.next_mask)
    return state._replace(
        h=treedef.unflatten([buffer(h, mask) for h, mask in zip(leaves, masks, strict=True)]),
        next_mask=treedef.unflatten(
            [None if x is None else rows(x, h) for x, h in zip(own, leaves, strict=True)]
        ),
    )
