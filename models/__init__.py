"""GPT and Llama decoders in flax.nnx, as modules and as functions of a plain parameter pytree."""

from models._config import Config, GPTConfig, LlamaConfig, RopeScaling, config_from_dict
from models._decoder import Decoder, build
from models._functional import (
    abstract_params,
    apply,
    init_params,
    loss_fn,
    loss_sums_fn,
    merge,
    num_params,
    params_of,
)
from models._hf import export_hf, import_hf
from models._layers import rotary_frequencies
from models._loss import token_losses
from models._presets import PRESETS, preset
from models._tokens import check_tokens

__all__ = [
    "PRESETS",
    "Config",
    "Decoder",
    "GPTConfig",
    "LlamaConfig",
    "RopeScaling",
    "abstract_params",
    "apply",
    "build",
    "check_tokens",
    "config_from_dict",
    "export_hf",
    "import_hf",
    "init_params",
    "loss_fn",
    "loss_sums_fn",
    "merge",
    "num_params",
    "params_of",
    "preset",
    "rotary_frequencies",
    "token_losses",
]
