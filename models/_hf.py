"""Reads and writes Hugging Face model folders: config.json and model.safetensors of GPT-2 and Llama models.

Tensor names and layouts are those of transformers' GPT2LMHeadModel and LlamaForCausalLM; nothing here needs
that package.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from models._config import Config, GPTConfig
from models._functional import Params, abstract_params, merge
from models._hf_config import config_from_hf, config_to_hf

# (tensor in the file, our paths concatenated on the last axis, stored transposed). "{}" is the layer.
Entry = tuple[str, tuple[str, ...], bool]

_LLAMA: list[Entry] = [
    ("model.embed_tokens.weight", ("embed/embedding",), False),
    ("model.layers.{}.input_layernorm.weight", ("layers/attention_norm/scale",), False),
    ("model.layers.{}.self_attn.q_proj.weight", ("layers/attention/query/kernel",), True),
    ("model.layers.{}.self_attn.k_proj.weight", ("layers/attention/key/kernel",), True),
    ("model.layers.{}.self_attn.v_proj.weight", ("layers/attention/value/kernel",), True),
    ("model.layers.{}.self_attn.o_proj.weight", ("layers/attention/out/kernel",), True),
    ("model.layers.{}.post_attention_layernorm.weight", ("layers/mlp_norm/scale",), False),
    ("model.layers.{}.mlp.gate_proj.weight", ("layers/mlp/gate/kernel",), True),
    ("model.layers.{}.mlp.up_proj.weight", ("layers/mlp/up/kernel",), True),
    ("model.layers.{}.mlp.down_proj.weight", ("layers/mlp/down/kernel",), True),
    ("model.norm.weight", ("final_norm/scale",), False),
    ("lm_head.weight", ("head/kernel",), True),
]
_QKV = ("query", "key", "value")
_GPT: list[Entry] = [
    ("transformer.wte.weight", ("embed/embedding",), False),
    ("transformer.wpe.weight", ("positions/embedding",), False),
    ("transformer.h.{}.ln_1.weight", ("layers/attention_norm/scale",), False),
    ("transformer.h.{}.ln_1.bias", ("layers/attention_norm/bias",), False),
    ("transformer.h.{}.attn.c_attn.weight", tuple(f"layers/attention/{n}/kernel" for n in _QKV), False),
    ("transformer.h.{}.attn.c_attn.bias", tuple(f"layers/attention/{n}/bias" for n in _QKV), False),
    ("transformer.h.{}.attn.c_proj.weight", ("layers/attention/out/kernel",), False),
    ("transformer.h.{}.attn.c_proj.bias", ("layers/attention/out/bias",), False),
    ("transformer.h.{}.ln_2.weight", ("layers/mlp_norm/scale",), False),
    ("transformer.h.{}.ln_2.bias", ("layers/mlp_norm/bias",), False),
    ("transformer.h.{}.mlp.c_fc.weight", ("layers/mlp/up/kernel",), False),
    ("transformer.h.{}.mlp.c_fc.bias", ("layers/mlp/up/bias",), False),
    ("transformer.h.{}.mlp.c_proj.weight", ("layers/mlp/down/kernel",), False),
    ("transformer.h.{}.mlp.c_proj.bias", ("layers/mlp/down/bias",), False),
    ("transformer.ln_f.weight", ("final_norm/scale",), False),
    ("transformer.ln_f.bias", ("final_norm/bias",), False),
]
# Buffers of old files that hold constants, not parameters.
_CONSTANTS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def _table(config: Config) -> list[Entry]:
    if isinstance(config, GPTConfig):
        return _GPT
    return [entry for entry in _LLAMA if entry[0] != "lm_head.weight" or not config.tied_head]


def _leaf(tree: Any, path: str) -> Any:
    for key in path.split("/"):
        tree = tree[key]
    return tree


def export_hf(config: Config, params: Params, folder: str | os.PathLike[str], dtype: str = "float32") -> None:
    """Writes config.json and model.safetensors into `folder`; `dtype` is that of the stored tensors."""
    merge(config, params)  # params of another model are an error here, not a wrong file
    tensors: dict[str, np.ndarray] = {}
    for name, paths, transposed in _table(config):
        stacked = np.concatenate([np.asarray(_leaf(params, path)) for path in paths], axis=-1)
        for layer, array in enumerate(stacked) if "{}" in name else [(0, stacked)]:
            # Contiguous, because the file is written from the raw buffer.
            tensors[name.format(layer)] = np.ascontiguousarray(
                array.T if transposed else array, jnp.dtype(dtype)
            )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    # Replaced in one go: a reader never sees half a file.
    safetensors.numpy.save_file(tensors, target / "model.safetensors.tmp", metadata={"format": "pt"})
    (target / "model.safetensors.tmp").replace(target / "model.safetensors")
    text = json.dumps({**config_to_hf(config), "torch_dtype": dtype}, indent=2, sort_keys=True) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")


def import_hf(folder: str | os.PathLike[str], **settings: Any) -> tuple[Config, Params]:
    """The config and float32 parameters of the model in `folder`.

    Args:
      folder: holds config.json and one or several .safetensors files.
      **settings: fields of the config to set differently, such as ``dtype="float32"`` or ``remat=True``.
    """
    source = Path(folder)
    if not (source / "config.json").is_file():
        raise ValueError(
            f"a model folder must hold config.json, got {source} without one. Give the folder of the model."
        )
    config = config_from_hf(json.loads((source / "config.json").read_text(encoding="utf-8")), settings)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"a model folder must hold .safetensors files, got none in {source}. Save the model in that "
            "format."
        )
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        try:
            tensors.update(safetensors.numpy.load_file(file))
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{file} must be a whole safetensors file, got: {error}. Save it again."
            ) from error
    if isinstance(config, GPTConfig):  # files of the bare GPT2Model have no prefix
        tensors = {
            k if k.startswith(("transformer.", "lm_head.")) else f"transformer.{k}": v
            for k, v in tensors.items()
        }
    tensors = {k: v for k, v in tensors.items() if not k.endswith(_CONSTANTS)}
    _settle_head(config, tensors)
    return config, _params_from(config, tensors)


def _settle_head(config: Config, tensors: dict[str, np.ndarray]) -> None:
    """Holds the tied flag against the file; drops a second copy of a tied head."""
    head = tensors.get("lm_head.weight")
    if not config.tied_head:
        if head is None:
            raise ValueError(
                "with tie_word_embeddings false the file must hold lm_head.weight, got none. "
                "Set tie_word_embeddings to true in config.json if the head is the embedding, or save the "
                "head."
            )
        return
    if head is not None:
        embedding = tensors[_table(config)[0][0]]
        if head.shape != embedding.shape or not np.array_equal(head, embedding):
            raise ValueError(
                "with tie_word_embeddings true the file must hold no lm_head.weight that differs from the "
                "embedding, got one "
                f"of shape {head.shape}. Set tie_word_embeddings to false in config.json to use it, or "
                "remove the tensor."
            )
        del tensors["lm_head.weight"]


def _params_from(config: Config, tensors: dict[str, np.ndarray]) -> Params:
    abstract = abstract_params(config)
    params: Params = {}
    for name, paths, transposed in _table(config):
        per_layer = "{}" in name
        parts = []
        widths = [_leaf(abstract, path).shape[-1] for path in paths]
        wanted = (*_leaf(abstract, paths[0]).shape[int(per_layer) : -1], sum(widths))
        for layer in range(config.n_layers if per_layer else 1):
            array = tensors.pop(name.format(layer), None)
            if array is None:
                raise ValueError(
                    f"the file must hold {name.format(layer)}, which config.json calls for, got no such "
                    "tensor."
                )
            array = array.T if transposed else array
            if array.shape != wanted:
                stored, expected = (array.shape[::-1], wanted[::-1]) if transposed else (array.shape, wanted)
                raise ValueError(
                    f"{name.format(layer)} must have shape {expected} by config.json, got {stored}. "
                    "Config and tensors are of different models."
                )
            parts.append(array.astype(np.float32))
        whole = np.stack(parts) if per_layer else parts[0]
        for path, piece in zip(paths, np.split(whole, np.cumsum(widths)[:-1], axis=-1), strict=True):
            *parents, last = path.split("/")
            node = params
            for key in parents:
                node = node.setdefault(key, {})
            node[last] = jnp.asarray(piece)
    if tensors:
        raise ValueError(
            f"the file must hold only tensors of a {config.family} decoder with {config.n_layers} layers, "
            "got also "
            f"{sorted(tensors)[:4]}. The model has parts that this package does not implement."
        )
    return params
