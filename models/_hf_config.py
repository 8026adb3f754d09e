"""config.json of Hugging Face GPT-2 and Llama models, to and from our configs.

Key names are those of transformers' GPT2Config and LlamaConfig; nothing here needs that package. A setting
that the decoders do not have is an error on import, never dropped: dropping one changes every logit silently.
"""

from __future__ import annotations

import json
from typing import Any

from models._config import Config, GPTConfig, LlamaConfig, RopeScaling

# How to compute, not what: kept under a key of our own so that a round trip gives the same config back.
_COMPUTE_KEY = "scape_gasloc_compute"
_COMPUTE = ("dtype", "attention", "remat", "scan_unroll", "loss_chunk")

# key in config.json -> our field
_GPT = {
    "vocab_size": "vocab_size",
    "n_positions": "max_length",
    "n_embd": "width",
    "n_layer": "n_layers",
    "n_head": "n_heads",
    "n_inner": "ff_width",
    "layer_norm_epsilon": "norm_eps",
    "initializer_range": "init_std",
}
_LLAMA = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_length",
    "hidden_size": "width",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ff_width",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tied_head",
}
_ROPE = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_length",
}
# What the decoders do; what transformers assumes when a key is absent is the same.
_GPT_FIXED = {
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_LLAMA_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
# Defaults of transformers' config classes that are not ours.
_GPT_DEFAULTS = {"n_inner": None, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02}
_LLAMA_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}


def config_to_hf(config: Config) -> dict[str, Any]:
    """The content of config.json, without the dtype of the tensors."""
    compute = {_COMPUTE_KEY: {name: getattr(config, name) for name in _COMPUTE}}
    if isinstance(config, GPTConfig):
        if config.head_size * config.n_heads != config.width:
            raise ValueError(
                f"GPT-2 files need head_dim * n_heads equal to width, got {config.head_dim} * "
                f"{config.n_heads} "
                f"and {config.width}. Leave head_dim at None."
            )
        own = {key: getattr(config, field) for key, field in _GPT.items()}
        return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **_GPT_FIXED, **own, **compute}
    own = {key: getattr(config, field) for key, field in _LLAMA.items()}
    own["rope_scaling"] = None
    if config.rope_scaling is not None:
        numbers = {key: getattr(config.rope_scaling, field) for key, field in _ROPE.items()}
        own["rope_scaling"] = {"rope_type": config.rope_scaling.kind, **numbers}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_LLAMA_FIXED, **own, **compute}


def config_from_hf(hf: dict[str, Any], settings: dict[str, Any]) -> Config:
    """Our config for the content of config.json; `settings` are fields to set differently."""
    compute = {k: v for k, v in (hf.get(_COMPUTE_KEY) or {}).items() if k in _COMPUTE}
    kind = hf.get("model_type")
    if kind == "gpt2":
        _require(hf, _GPT_FIXED)
        own = _fields(hf, _GPT, _GPT_DEFAULTS)
        own["ff_width"] = own["ff_width"] or 4 * own["width"]
        return GPTConfig(**{**own, **compute, **settings})
    if kind == "llama":
        _require(hf, _LLAMA_FIXED)
        window = hf.get("sliding_window")
        if window is not None and window < hf.get("max_position_embeddings", 0):
            raise ValueError(
                f"config.json must have no sliding_window below max_position_embeddings, got {window}. Every "
                f"position here sees all before it: set max_position_embeddings to {window} or less."
            )
        theta, scaling = _rope_from_hf(hf)
        own = _fields({**hf, "rope_theta": theta}, _LLAMA, _LLAMA_DEFAULTS)
        return LlamaConfig(**{**own, "rope_scaling": scaling, **compute, **settings})
    raise ValueError(
        f"config.json must have model_type 'gpt2' or 'llama', got {kind!r}. Other families are not "
        "implemented."
    )


def _fields(hf: dict[str, Any], keys: dict[str, str], defaults: dict[str, Any]) -> dict[str, Any]:
    missing = [key for key in keys if key not in hf and key not in defaults]
    if missing:
        raise ValueError(
            f"config.json of a {hf['model_type']} model must have {missing}, got none. The file is "
            "incomplete."
        )
    return {field: hf.get(key, defaults.get(key)) for key, field in keys.items()}


def _require(hf: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if hf.get(key, value) != value:
            raise ValueError(
                f"config.json must have {key} = {json.dumps(value)}, got {json.dumps(hf[key])}. "
                "This package implements no other value and would compute other logits."
            )


def _rope_from_hf(hf: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling: `rope_theta` and `rope_scaling`, or the newer `rope_parameters` that joins them."""
    found = [dict(hf[key]) for key in ("rope_scaling", "rope_parameters") if hf.get(key)]
    thetas = [d.pop("rope_theta") for d in found if "rope_theta" in d]
    thetas += [hf["rope_theta"]] if hf.get("rope_theta") is not None else []
    if any(d != found[0] for d in found) or any(t != thetas[0] for t in thetas):
        raise ValueError(
            f"config.json must give one rotary setting, got rope_theta {thetas} and scalings {found}. "
            "Remove the wrong one."
        )
    theta = float(thetas[0]) if thetas else 10000.0
    scaling = found[0] if found else {}
    old_kind = scaling.pop("type", "default")  # name of the key before rope_type
    kind = scaling.pop("rope_type", old_kind)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(
            f"config.json's rope scaling type must be 'llama3' or 'default', got {kind!r}. Other types are "
            "not "
            "implemented, and ignoring one would change every logit."
        )
    if set(scaling) != set(_ROPE):
        raise ValueError(
            f"llama3 rope scaling must give exactly {sorted(_ROPE)}, got {sorted(scaling)}. Correct "
            "config.json."
        )
    return theta, RopeScaling(kind="llama3", **{_ROPE[key]: value for key, value in scaling.items()})
