"""GPT and Llama forward passes in NumPy float64, position by position and head by head; imports numpy only.

Written from the papers' formulas, not from models/: rotary as a complex product, attention as explicit sums.
"""

import numpy as np


def as_float64(tree):
    return {k: as_float64(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()}


def one_layer(stacked, i):
    return {k: one_layer(v, i) if isinstance(v, dict) else v[i] for k, v in stacked.items()}


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def layer_norm(x, p, eps):
    return (x - x.mean()) / np.sqrt(x.var() + eps) * p["scale"] + p["bias"]


def rms_norm(x, p, eps):
    return x / np.sqrt((x**2).mean() + eps) * p["scale"]


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def linear(x, p):
    y = x @ p["kernel"]
    return y + p["bias"] if "bias" in p else y


def llama_frequency(i, head_dim, theta, scaling):
    """Rotary frequency of pair i, by the three cases of the Llama 3.1 rule written out."""
    freq = theta ** (-2 * i / head_dim)
    if scaling is None:
        return freq
    wavelength = 2 * np.pi / freq
    if wavelength < scaling.original_length / scaling.high_freq_factor:
        return freq
    if wavelength > scaling.original_length / scaling.low_freq_factor:
        return freq / scaling.factor
    smooth = (scaling.original_length / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * freq / scaling.factor + smooth * freq


def rotate(v, position, config):
    """Pairs (v[i], v[i + half]) as complex numbers times exp(i * position * frequency)."""
    half = len(v) // 2
    angles = np.array(
        [position * llama_frequency(i, len(v), config.rope_theta, config.rope_scaling) for i in range(half)]
    )
    z = (v[:half] + 1j * v[half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag])


def attention(xs, p, config, n_kv_heads, rotary):
    hd, group = config.head_dim, config.n_heads // n_kv_heads
    q, k, v = ([linear(x, p[name]).reshape(-1, hd) for x in xs] for name in ("query", "key", "value"))
    assert len(k[0]) == n_kv_heads
    if rotary:
        q, k = ([[rotate(h, t, config) for h in heads] for t, heads in enumerate(x)] for x in (q, k))
    out = []
    for t in range(len(xs)):
        heads = []
        for h in range(config.n_heads):
            kv = h // group
            weights = softmax(np.array([q[t][h] @ k[s][kv] for s in range(t + 1)]) / np.sqrt(hd))
            heads.append(sum(w * v[s][kv] for s, w in enumerate(weights)))
        out.append(linear(np.concatenate(heads), p["out"]))
    return out


def logits(config, params, tokens):
    """Logits (L, V) of one sequence."""
    p, gpt = as_float64(params), config.family == "gpt"
    norm = layer_norm if gpt else rms_norm
    xs = [p["embed"]["embedding"][token].copy() for token in tokens]
    if gpt:
        xs = [x + p["positions"]["embedding"][t] for t, x in enumerate(xs)]
    for i in range(config.n_layers):
        layer = one_layer(p["layers"], i)
        normed = [norm(x, layer["attention_norm"], config.norm_eps) for x in xs]
        n_kv_heads = config.n_heads if gpt else config.n_kv_heads
        mixed = attention(normed, layer["attention"], config, n_kv_heads, rotary=not gpt)
        xs = [x + a for x, a in zip(xs, mixed, strict=True)]
        mlp = layer["mlp"]
        for t, x in enumerate(xs):
            y = norm(x, layer["mlp_norm"], config.norm_eps)
            hidden = (
                gelu_tanh(linear(y, mlp["up"]))
                if gpt
                else silu(linear(y, mlp["gate"])) * linear(y, mlp["up"])
            )
            xs[t] = x + linear(hidden, mlp["down"])
    head = p["head"]["kernel"] if "head" in p else p["embed"]["embedding"].T
    return np.stack([norm(x, p["final_norm"], config.norm_eps) @ head for x in xs])


def token_losses(config, params, row):
    """-log p of each next token of a row of L + 1 tokens."""
    z = logits(config, params, row[:-1])
    return np.array([-np.log(softmax(z[t])[row[t + 1]]) for t in range(len(row) - 1)])
