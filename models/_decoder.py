"""The decoder as a flax.nnx module: embedding, stacked layers run by one scan, final norm, output head.

Sources: Radford et al. 2019 (GPT-2); Touvron et al. 2023 (Llama). Stacking one layer's parameters on a
leading axis keeps compile time independent of depth.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models._config import Config, GPTConfig, LlamaConfig
from models._layers import Embedding, Layer, make_norm, rotary_tables


class Head(nnx.Module):
    """Output projection of shape (D, V), its own parameter when the head is not tied."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        shape = (config.width, config.vocab_size)
        self.kernel = nnx.Param(config.init_std * jax.random.normal(rngs.params(), shape, jnp.float32))


class Decoder(nnx.Module):
    """Tokens (B, L) to logits (B, L, V).

    Parameters are float32 under paths such as ``layers/attention/query/kernel``, with every array below
    ``layers`` stacked on a leading axis of n_layers.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.width, config.init_std, rngs)
        if isinstance(config, GPTConfig):
            self.positions = Embedding(config.max_length, config.width, config.init_std, rngs)
        # Each layer draws from its own key; the result is one Layer whose arrays have a leading layer axis.
        make = nnx.split_rngs(splits=config.n_layers)(
            nnx.vmap(lambda r: Layer(config, r), in_axes=0, out_axes=0)
        )
        self.layers = make(rngs)
        self.final_norm = make_norm(config)
        if not config.tied_head:
            self.head = Head(config, rngs)

    def features(self, tokens_BxL: Array) -> Array:
        """Activations (B, L, D) after the final norm: what the head is applied to."""
        config, length = self.config, _checked_length(self.config, tokens_BxL)
        x_BxLxD = self.embed(tokens_BxL, config.dtype)
        rotary = None
        if isinstance(config, LlamaConfig):
            rotary = rotary_tables(config, length)
        else:
            x_BxLxD += self.positions.embedding[...][None, :length].astype(config.dtype)

        graphdef, stacked = nnx.split(self.layers)

        def run(x: Array, one_layer: nnx.State) -> tuple[Array, None]:
            return nnx.merge(graphdef, one_layer)(x, rotary), None

        if config.remat:
            # Inside a loop XLA cannot undo the recomputation by common-subexpression elimination; in
            # unrolled code it can.
            run = jax.checkpoint(run, prevent_cse=config.scan_unroll > 1)
        x_BxLxD, _ = jax.lax.scan(run, x_BxLxD, stacked, unroll=min(config.scan_unroll, config.n_layers))
        return self.final_norm(x_BxLxD)

    def logits(self, x_BxLxD: Array) -> Array:
        """Head applied to `features`: operands in the compute dtype, sums and result in float32."""
        dtype = jnp.dtype(self.config.dtype)
        if self.config.tied_head:
            kernel, contract = self.embed.embedding[...], ((1,), (1,))
        else:
            kernel, contract = self.head.kernel[...], ((1,), (0,))
        # Without the named algorithm the backward pass would multiply its float32 cotangent with a
        # bfloat16 kernel, which falls off the fast path of tensor cores.
        precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if dtype == jnp.bfloat16 else None
        y_NxV = jax.lax.dot_general(
            x_BxLxD.reshape(-1, self.config.width).astype(dtype),
            kernel.astype(dtype),
            (contract, ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return y_NxV.reshape(*x_BxLxD.shape[:-1], self.config.vocab_size)

    def __call__(self, tokens_BxL: Array) -> Array:
        return self.logits(self.features(tokens_BxL))


def _checked_length(config: Config, tokens_BxL: Array) -> int:
    if tokens_BxL.ndim != 2 or not jnp.issubdtype(tokens_BxL.dtype, jnp.integer):
        raise ValueError(
            f"tokens must be integers of shape (batch, length), got {tokens_BxL.dtype} of shape "
            f"{tokens_BxL.shape}."
        )
    length = int(tokens_BxL.shape[1])
    if not 1 <= length <= config.max_length:
        raise ValueError(
            f"the input length must be between 1 and max_length, got {length} tokens with max_length "
            f"{config.max_length}. "
            "Shorten the sequences or raise max_length in the model config."
        )
    return length


def build(config: Config, rngs: nnx.Rngs | int = 0) -> Decoder:
    """A freshly initialised module. `rngs` is an nnx.Rngs or a seed."""
    if not isinstance(config, GPTConfig | LlamaConfig):
        raise ValueError(
            f"config must be a GPTConfig or LlamaConfig, got {config!r}. models.preset(name) gives one."
        )
    return Decoder(config, nnx.Rngs(rngs) if isinstance(rngs, int) else rngs)
