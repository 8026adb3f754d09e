"""Parts of a decoder layer: norms, rotary positions, attention, feed-forward; float32 where sums are long.

Sources: Ba et al. 2016 (LayerNorm); Zhang & Sennrich 2019 (RMSNorm); Su et al. 2021 (rotary); Shazeer 2020
(SwiGLU). Names end in their axes: B batch, L length, D width, H query heads, K key/value heads, E entries of
a head, N flattened batch and length, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models._config import Config, GPTConfig, LlamaConfig, RopeScaling

Rotary = tuple[Array, Array]


class LayerNorm(nnx.Module):
    """Zero mean, unit variance, scale and bias, in float32; returns the dtype it was given."""

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32))
        self.eps = eps

    def __call__(self, x_BxLxD: Array) -> Array:
        x = x_BxLxD.astype(jnp.float32)
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = (
            centred * jax.lax.rsqrt(variance + self.eps) * self.scale[...][None, None]
            + self.bias[...][None, None]
        )
        return y.astype(x_BxLxD.dtype)


class RMSNorm(nnx.Module):
    """Unit mean square and a scale, in float32; returns the dtype it was given."""

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.eps = eps

    def __call__(self, x_BxLxD: Array) -> Array:
        x = x_BxLxD.astype(jnp.float32)
        y = (
            x
            * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
            * self.scale[...][None, None]
        )
        return y.astype(x_BxLxD.dtype)


def make_norm(config: Config) -> LayerNorm | RMSNorm:
    norm = LayerNorm if isinstance(config, GPTConfig) else RMSNorm
    return norm(config.width, config.norm_eps)


class Embedding(nnx.Module):
    """A table of vectors. The gather reads the float32 table, so its gradient is summed in float32 too."""

    def __init__(self, entries: int, width: int, std: float, rngs: nnx.Rngs):
        self.embedding = nnx.Param(std * jax.random.normal(rngs.params(), (entries, width), jnp.float32))

    def __call__(self, ids: Array, dtype: str) -> Array:
        # An id outside the table gives NaN: loud in the loss, where clipping would train on the wrong token.
        return jnp.take(self.embedding[...], ids, axis=0, mode="fill", fill_value=jnp.nan).astype(dtype)


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angle per position of each of the head_dim / 2 pairs, float64."""
    freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return freq
    turns = scaling.original_length * freq / (2 * math.pi)  # full turns over the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)  # 1: fast, unchanged; 0: slow, divided by the factor
    return freq * kept + freq / scaling.factor * (1.0 - kept)


def rotary_tables(config: LlamaConfig, length: int) -> Rotary:
    """cos and sin of shape (1, L, 1, E/2), float32."""
    freq = rotary_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
    angle_LxE = jnp.arange(length, dtype=jnp.float32)[:, None] * jnp.asarray(freq, jnp.float32)[None, :]
    return jnp.cos(angle_LxE)[None, :, None, :], jnp.sin(angle_LxE)[None, :, None, :]


def rotate(x_BxLxHxE: Array, rotary: Rotary) -> Array:
    """Turns entry i with entry i + E/2 (the pairing of published Llama weights), in float32."""
    cos, sin = rotary
    a, b = jnp.split(x_BxLxHxE.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BxLxHxE.dtype)


def attention_implementation(config: Config) -> Literal["xla", "cudnn"]:
    """What None stands for: cuDNN where it can run, XLA elsewhere. A named one is kept: it runs or raises."""
    if config.attention is not None:
        return config.attention
    # cuDNN's flash attention: bfloat16, head sizes up to 128 in steps of 8, Ampere or later.
    fits = config.dtype == "bfloat16" and config.head_size % 8 == 0 and config.head_size <= 128
    return "cudnn" if fits and jax.default_backend() == "gpu" and _gpu_generation() >= 8 else "xla"


def _gpu_generation() -> int:
    """Major compute capability of an NVIDIA GPU, 0 for other makers."""
    major = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")[0]
    return int(major) if major.isdigit() else 0


class Linear(nnx.Module):
    """x @ kernel (+ bias) in the compute dtype; the kernel is (in, out).

    Leading axes are flattened first. The weight gradient then contracts one axis, which XLA:CPU turns into
    one matrix product; contracting batch and length as two axes makes it write transposed copies of the
    activations (twice the time of an MLP).
    """

    def __init__(self, fan_in: int, fan_out: int, config: Config, std: float, rngs: nnx.Rngs):
        self.dtype = config.dtype
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (fan_in, fan_out), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(fan_out, jnp.float32)) if isinstance(config, GPTConfig) else None

    def __call__(self, x: Array) -> Array:
        y = x.reshape(-1, x.shape[-1]).astype(self.dtype) @ self.kernel[...].astype(self.dtype)
        if self.bias is not None:
            y = y + self.bias[...].astype(self.dtype)[None]
        return y.reshape(*x.shape[:-1], -1)


def _residual_std(config: Config) -> float:
    return config.init_std / math.sqrt(2 * config.n_layers)


class Attention(nnx.Module):
    """Causal self-attention; K key/value heads shared by groups of H / K query heads."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        kv_heads = config.kv_heads if isinstance(config, LlamaConfig) else config.n_heads
        inner, inner_kv = config.n_heads * config.head_size, kv_heads * config.head_size
        self.query = Linear(config.width, inner, config, config.init_std, rngs)
        self.key = Linear(config.width, inner_kv, config, config.init_std, rngs)
        self.value = Linear(config.width, inner_kv, config, config.init_std, rngs)
        self.out = Linear(inner, config.width, config, _residual_std(config), rngs)

    def __call__(self, x_BxLxD: Array, rotary: Rotary | None) -> Array:
        batch, length, _ = x_BxLxD.shape
        heads = (batch, length, -1, self.config.head_size)
        q_BxLxHxE = self.query(x_BxLxD).reshape(heads)
        k_BxLxKxE = self.key(x_BxLxD).reshape(heads)
        v_BxLxKxE = self.value(x_BxLxD).reshape(heads)
        if rotary is not None:
            q_BxLxHxE, k_BxLxKxE = rotate(q_BxLxHxE, rotary), rotate(k_BxLxKxE, rotary)
        y_BxLxHxE = jax.nn.dot_product_attention(
            q_BxLxHxE,
            k_BxLxKxE,
            v_BxLxKxE,
            is_causal=True,
            implementation=attention_implementation(self.config),
        )
        return self.out(y_BxLxHxE.reshape(batch, length, -1))


class GeluMLP(nnx.Module):
    """down(gelu(up(x))) with the tanh form of GELU that GPT-2 was trained with."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.up = Linear(config.width, config.ff_width, config, config.init_std, rngs)
        self.down = Linear(config.ff_width, config.width, config, _residual_std(config), rngs)

    def __call__(self, x_BxLxD: Array) -> Array:
        return self.down(jax.nn.gelu(self.up(x_BxLxD), approximate=True))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.gate = Linear(config.width, config.ff_width, config, config.init_std, rngs)
        self.up = Linear(config.width, config.ff_width, config, config.init_std, rngs)
        self.down = Linear(config.ff_width, config.width, config, _residual_std(config), rngs)

    def __call__(self, x_BxLxD: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x_BxLxD)) * self.up(x_BxLxD))


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = make_norm(config)
        self.mlp = GeluMLP(config, rngs) if isinstance(config, GPTConfig) else SwiGLU(config, rngs)

    def __call__(self, x_BxLxD: Array, rotary: Rotary | None) -> Array:
        x_BxLxD = x_BxLxD + self.attention(self.attention_norm(x_BxLxD), rotary)
        return x_BxLxD + self.mlp(self.mlp_norm(x_BxLxD))
