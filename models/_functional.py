"""The decoders as functions of a plain pytree: nested dicts of arrays in, logits or loss out.

Optimizers, checkpoints and collectives see only the pytree; each call merges it with the module's static
structure, so there is one forward pass for nnx users and for everybody else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models._config import Config
from models._decoder import Decoder, build
from models._loss import loss_sums

Params = dict[str, Any]
Batch = dict[str, Array]


def params_of(model: Decoder) -> Params:
    """A module's parameters as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@functools.lru_cache(maxsize=64)
def _structure(config: Config) -> tuple[Any, Params]:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build(config)))
    return graphdef, nnx.to_pure_dict(state)


def abstract_params(config: Config) -> Params:
    """Shapes and dtypes of `init_params`, without allocating."""
    return jax.tree.map(lambda leaf: leaf, _structure(config)[1])


def num_params(config: Config) -> int:
    """Number of parameters, each counted once; a tied head adds none."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))


@functools.lru_cache(maxsize=64)
def _initialiser(config: Config) -> Callable[[Array], Params]:
    return jax.jit(lambda key: params_of(build(config, nnx.Rngs(key))))


def init_params(config: Config, seed: int = 0) -> Params:
    """Initial parameters: nested dicts of float32 arrays, equal to `params_of(build(config, seed))`."""
    return _initialiser(config)(jax.random.key(seed))


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(p, simple=True, separator="/"): tuple(x.shape)
            for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]}  # fmt: skip


def merge(config: Config, params: Params) -> Decoder:
    """The module that holds `params`."""
    graphdef, abstract = _structure(config)
    given, wanted = _shapes(params), _shapes(abstract)
    if given != wanted:
        problems = [f"missing {path} {wanted[path]}" for path in wanted if path not in given]
        problems += [f"unexpected {path} {given[path]}" for path in given if path not in wanted]
        problems += [
            f"{p} has shape {given[p]}, not {wanted[p]}"
            for p in wanted
            if p in given and given[p] != wanted[p]
        ]
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(
            f"params must fit the {config.family} config, got: {'; '.join(problems[:4])}{more}. "
            "Use params and config of one model."
        )
    return nnx.merge(graphdef, params)


def apply(config: Config, params: Params, tokens: Array) -> Array:
    """Logits (B, L, V) in float32 of tokens (B, L)."""
    return merge(config, params)(tokens)


@functools.lru_cache(maxsize=64)
def loss_fn(config: Config) -> Callable[[Params, Batch], Array]:
    """The function ``(params, batch) -> mean cross-entropy in nats``.

    ``batch["tokens"]`` is (B, L + 1); ``batch["weight"]``, if there, has shape (B,) or (B, L) and makes
    the mean a weighted one (0 when all weights are 0). Equal configs give the same function object, so jit
    compiles it once.
    """
    sums = loss_sums_fn(config)

    def loss(params: Params, batch: Batch) -> Array:
        total, weight = sums(params, batch)
        return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)

    return loss


@functools.lru_cache(maxsize=64)
def loss_sums_fn(config: Config) -> Callable[[Params, Batch], tuple[Array, Array]]:
    """The function ``(params, batch) -> (sum of weighted losses, sum of weights)``, for sums over batches."""

    def sums(params: Params, batch: Batch) -> tuple[Array, Array]:
        return loss_sums(merge(config, params), batch["tokens"], batch.get("weight"))

    return sums
