"""A run's state for another number of workers: some leave or join between two rounds, and the mean model stays.

Source of what must stay: GASLoC (arXiv 2606.11081), whose mixing keeps the mean over the workers. From W to W' workers, for
parameters, anchors, and what compression still owes:

    W' > W    x^i as it was for i <= W; who joins starts at mean_i x
    W' < W    x^i + (mean of all W - mean of the first W') for i <= W': the drift of those that leave is merged

A worker that joins takes the mean of the outer state, and the inner optimizer's state and counters of worker i mod W: a
second moment or SCAPE's masks and residual belong together, and have no mean.
"""

from typing import Any

import jax
import jax.numpy as jnp

from gasloc_jax._worker_round import RoundState
from pallas_kernels.resized import resized


def resized_state(state: RoundState, like: RoundState) -> RoundState:
    """`state` of W workers for those of `like`, whose arrays or ShapeDtypeStructs give the shapes.

    Raises:
      ValueError: the state stands between the halves of a round.
    """
    if state.arrival is not None:
        raise ValueError(
            "a state must be between two rounds, got one between their halves. Finish the round."
        )
    num_workers = like.round.shape[0]
    whole = {name: _resized(getattr(state, name), num_workers) for name in ("params", "anchor")}
    twins = {
        name: _twins(getattr(state, name), num_workers) for name in ("inner", "round", "steps", "skipped")
    }
    return RoundState(**whole, **twins, outer=_outer(state.outer, like.outer, num_workers), arrival=None)


def _resized(tree: Any, num_workers: int) -> Any:
    return jax.tree.map(lambda x: resized(x, num_workers), tree)


def _twins(tree: Any, num_workers: int) -> Any:
    return jax.tree.map(lambda x: x[jnp.arange(num_workers) % x.shape[0]], tree)


def _outer(state: Any, like: Any, num_workers: int) -> Any:
    """Fields that a type names `per_worker` are what compression owes: their length depends on the workers, too."""
    owned = lambda x: bool(getattr(type(x), "per_worker", ()))  # noqa: E731

    def one(node: Any, wanted: Any) -> Any:
        if not owned(node):
            return _joined(node, num_workers)
        fields = {}
        for name, value in node._asdict().items():
            if name in type(node).per_worker:
                fields[name] = _owed_of_all(value, getattr(wanted, name), num_workers)
            else:
                fields[name] = _outer(value, getattr(wanted, name), num_workers)
        return type(node)(**fields)

    return jax.tree.map(one, state, like, is_leaf=owned)


def _joined(x: jax.Array, num_workers: int) -> jax.Array:
    """Of the outer state: who stays keeps its own, who joins takes the mean; whole numbers are those of a twin."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or num_workers <= x.shape[0]:
        return _twins(x, num_workers)
    return resized(x, num_workers)


def _owed_of_all(pieces: Any, like: Any, num_workers: int) -> Any:
    """One worker sends nothing, and so owes nothing."""
    if pieces is None or like is None:
        return jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), like)
    return jax.tree.map(lambda x, w: _owed(x, w, num_workers), pieces, like)


def _owed(x: jax.Array, like: Any, num_workers: int) -> jax.Array:
    """(W, [F,] devices, entries): of a piece that is padded for W workers, zeros behind its end."""
    x, wanted = resized(x, num_workers), like.shape[-2] * like.shape[-1]
    whole = x.reshape(*x.shape[:-2], -1)
    fitted = whole[..., :wanted]
    fitted = jnp.pad(fitted, [(0, 0)] * (fitted.ndim - 1) + [(0, wanted - fitted.shape[-1])])
    return fitted.reshape(like.shape)
