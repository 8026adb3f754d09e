"""Next-token cross-entropy in nats, float32, with optional weights and logits made chunk by chunk.

Uses -log p(t) = logsumexp(logits) - logits[t], so no array of log-probabilities is ever written.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from models._decoder import Decoder


def token_losses(logits_BxLxV: Array, targets_BxL: Array) -> Array:
    """-log p(target) of each position in nats, shape (B, L), float32."""
    logits_BxLxV = logits_BxLxV.astype(jnp.float32)
    # A masked sum instead of a gather: it fuses into the reduction, and its gradient is elementwise
    # instead of a scatter.
    ids_V = jax.lax.broadcasted_iota(targets_BxL.dtype, logits_BxLxV.shape, 2)
    picked_BxL = jnp.sum(jnp.where(ids_V == targets_BxL[..., None], logits_BxLxV, 0.0), axis=-1)
    return jax.nn.logsumexp(logits_BxLxV, axis=-1) - picked_BxL


def loss_sums(model: Decoder, tokens_BxL1: Array, weight: Array | None = None) -> tuple[Array, Array]:
    """Sum of weighted losses and sum of weights over a batch of L + 1 tokens a row.

    Kept apart from the mean so that evaluation can add batches of unequal weight before dividing.
    """
    if tokens_BxL1.ndim != 2 or tokens_BxL1.shape[1] < 2:
        raise ValueError(
            "batch['tokens'] must have shape (batch, length + 1) with length at least 1, got "
            f"{tokens_BxL1.shape}. "
            "Each row holds the input and, one to the right, its targets."
        )
    inputs_BxL, targets_BxL = tokens_BxL1[:, :-1], tokens_BxL1[:, 1:]
    weight_BxL = _weights(weight, targets_BxL.shape)
    x_BxLxD = model.features(inputs_BxL)

    def part(x: Array, targets: Array, weights: Array) -> Array:
        return jnp.sum(token_losses(model.logits(x), targets) * weights)

    chunk, length = model.config.loss_chunk, targets_BxL.shape[1]
    if chunk is None or chunk >= length:
        return part(x_BxLxD, targets_BxL, weight_BxL), jnp.sum(weight_BxL)

    # Chunks run along the length, so a batch axis that is sharded stays sharded. Padding carries weight 0.
    # The checkpoint makes the backward pass recompute one chunk's logits instead of keeping all of them.
    pieces = -(-length // chunk)

    def split(a: Array) -> Array:
        a = jnp.pad(a, [(0, 0), (0, pieces * chunk - length)] + [(0, 0)] * (a.ndim - 2))
        return jnp.moveaxis(a.reshape(a.shape[0], pieces, chunk, *a.shape[2:]), 1, 0)

    run = jax.checkpoint(lambda parts: part(*parts), prevent_cse=False)
    sums = jax.lax.map(run, (split(x_BxLxD), split(targets_BxL), split(weight_BxL)))
    return jnp.sum(sums), jnp.sum(weight_BxL)


def _weights(weight: Array | None, shape: tuple[int, ...]) -> Array:
    if weight is None:
        return jnp.ones(shape, jnp.float32)
    if weight.shape not in ((shape[0],), (shape[0], 1), shape):
        raise ValueError(
            f"batch['weight'] must have shape {(shape[0],)} (one per row) or {shape} (one per target), got "
            f"{weight.shape}."
        )
    column = weight[:, None] if weight.ndim == 1 else weight
    return jnp.broadcast_to(column.astype(jnp.float32), shape)
