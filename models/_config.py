"""Shapes and numeric settings of the GPT and Llama decoders, checked when they are made.

Sources: Radford et al. 2019 (GPT-2); Touvron et al. 2023 (Llama); Ainslie et al. 2023 (grouped-query
attention); Llama 3.1 model card (rotary scaling for long contexts).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any, ClassVar, Literal

DTYPES = ("float32", "bfloat16")
ATTENTION = (None, "xla", "cudnn")


def _positive_int(owner: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{owner}.{name} must be an integer of at least 1, got {value!r}. Set {name} to a positive count."
        )


def _positive_float(owner: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise ValueError(
            f"{owner}.{name} must be a finite number above 0, got {value!r}. Set {name} to a positive number."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3 rescaling of rotary frequencies for contexts longer than those first trained on.

    Frequencies whose wavelength is below ``original_length / high_freq_factor`` stay, those above
    ``original_length / low_freq_factor`` are divided by ``factor``, those between are blended linearly.
    """

    kind: str = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        if self.kind != "llama3":
            raise ValueError(
                f"RopeScaling.kind must be 'llama3', got {self.kind!r}. Other kinds are not implemented and "
                "ignoring one "
                "would change every logit; leave rope_scaling at None for plain rotary embeddings."
            )
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _positive_float("RopeScaling", name, getattr(self, name))
        _positive_int("RopeScaling", "original_length", self.original_length)
        if self.factor < 1:
            raise ValueError(
                f"RopeScaling.factor must be at least 1, got {self.factor}. Use None for no scaling."
            )
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "RopeScaling.high_freq_factor must be above low_freq_factor, got high "
                f"{self.high_freq_factor} "
                f"and low {self.low_freq_factor}. Llama 3 uses low 1 and high 4."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What GPT and Llama share.

    Attributes:
      vocab_size: number of token ids V.
      max_length: longest input in tokens; GPT has a learned position for each.
      n_layers, width, n_heads, ff_width: depth, D, H, F.
      head_dim: entries per head, ``width // n_heads`` when None.
      norm_eps: added to the variance in every norm.
      init_std: standard deviation of initial weights; the two projections that write into the residual
        stream use ``init_std / sqrt(2 * n_layers)`` (Radford et al. 2019, section 2.3).
      dtype: what matrix products compute in. Parameters, norms, softmax and loss are always float32.
      attention: implementation of ``jax.nn.dot_product_attention``: "xla", "cudnn" (flash attention; runs
        or raises), or None: cuDNN on a GPU where dtype and head size allow it, XLA elsewhere.
      remat: recompute each layer's inner activations in the backward pass instead of keeping them.
      scan_unroll: layers per iteration of the scan; n_layers removes the loop, for a slower compile.
      loss_chunk: positions whose logits exist at one time in the loss; None: those of all positions.
    """

    family: ClassVar[str] = ""
    head_multiple: ClassVar[int] = 1  # what head_dim must be a multiple of

    vocab_size: int
    max_length: int
    n_layers: int
    width: int
    n_heads: int
    ff_width: int
    head_dim: int | None = None
    norm_eps: float = 1e-5
    init_std: float = 0.02
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    attention: Literal["xla", "cudnn"] | None = None
    remat: bool = False
    scan_unroll: int = 1
    loss_chunk: int | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name in ("vocab_size", "max_length", "n_layers", "width", "n_heads", "ff_width", "scan_unroll"):
            _positive_int(owner, name, getattr(self, name))
        for name in ("norm_eps", "init_std"):
            _positive_float(owner, name, getattr(self, name))
        if self.loss_chunk is not None:
            _positive_int(owner, "loss_chunk", self.loss_chunk)
        if not isinstance(self.remat, bool):
            raise ValueError(f"{owner}.remat must be True or False, got {self.remat!r}. Set one of the two.")
        if self.dtype not in DTYPES:
            raise ValueError(f"{owner}.dtype must be one of {DTYPES}, got {self.dtype!r}. Use one of these.")
        if self.attention not in ATTENTION:
            raise ValueError(
                f"{owner}.attention must be one of {ATTENTION}, got {self.attention!r}. None chooses by device."
            )
        if self.head_dim is None:
            self._check_width(owner)
            object.__setattr__(self, "head_dim", self.width // self.n_heads)
        _positive_int(owner, "head_dim", self.head_dim)

    def _check_width(self, owner: str) -> None:
        """Called where each head gets `width // n_heads` entries."""
        unit = self.n_heads * self.head_multiple
        if self.width % unit:
            of, why = "n_heads", ""
            if self.head_multiple > 1:
                of, why = (
                    f"{self.head_multiple} x n_heads",
                    " Rotary embeddings turn pairs of a head's entries.",
                )
            raise ValueError(
                f"{owner}.width must be a multiple of {of}, got width {self.width} and n_heads {self.n_heads}."
                f"{why} Use {unit * max(1, round(self.width / unit))}, or other heads."
            )

    @property
    def head_size(self) -> int:
        """`head_dim` as an int: construction has filled it in."""
        assert self.head_dim is not None
        return self.head_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `config_from_dict` is the inverse."""
        return {"family": self.family, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(DecoderConfig):
    """GPT-2: LayerNorm, tanh-GELU, learned positions, biases everywhere, head tied to the embedding."""

    family: ClassVar[str] = "gpt"

    @property
    def n_kv_heads(self) -> int:
        return self.n_heads

    @property
    def tied_head(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Llama: RMSNorm, SwiGLU, rotary positions, grouped-query attention, no biases.

    Attributes:
      n_kv_heads: key/value heads, each shared by ``n_heads // n_kv_heads`` query heads; n_heads when None.
      tied_head: use the embedding as the output head.
      rope_theta: base of the rotary frequencies.
      rope_scaling: rescaling for long contexts, None for none.
    """

    family: ClassVar[str] = "llama"
    head_multiple: ClassVar[int] = 2

    n_kv_heads: int | None = None
    tied_head: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        _positive_int("LlamaConfig", "n_kv_heads", self.n_kv_heads)
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"LlamaConfig.n_kv_heads must divide n_heads, got n_heads {self.n_heads} and n_kv_heads "
                f"{self.n_kv_heads}. Each key/value head serves an equal group of query heads: use one of "
                f"{[k for k in range(1, self.n_heads + 1) if self.n_heads % k == 0]}."
            )
        if self.head_size % self.head_multiple:
            raise ValueError(
                f"LlamaConfig.head_dim must be even, got {self.head_dim}. Rotary embeddings turn pairs of "
                f"entries: use {self.head_size + 1}."
            )
        if not isinstance(self.tied_head, bool):
            raise ValueError(
                f"LlamaConfig.tied_head must be True or False, got {self.tied_head!r}. Set one of the two."
            )
        _positive_float("LlamaConfig", "rope_theta", self.rope_theta)
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ValueError(
                f"LlamaConfig.rope_scaling must be a models.RopeScaling or None, got {self.rope_scaling!r}. "
                "Use models.config_from_dict to read a config from plain values."
            )

    @property
    def kv_heads(self) -> int:
        """`n_kv_heads` as an int: construction has filled it in."""
        assert self.n_kv_heads is not None
        return self.n_kv_heads


Config = GPTConfig | LlamaConfig
FAMILIES: dict[str, type[GPTConfig] | type[LlamaConfig]] = {"gpt": GPTConfig, "llama": LlamaConfig}


def _known_fields(cls: type[Any], values: dict[str, Any], where: str) -> dict[str, Any]:
    known = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {known}."
            raise ValueError(
                f"{where} must hold only fields of {cls.__name__}, got the unknown key {key!r}. {hint}"
            )
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in values
    ]
    if missing:
        raise ValueError(
            f"{where} must give every required field of {cls.__name__}, got none for {missing}. Add them."
        )
    return values


def config_from_dict(values: dict[str, Any]) -> Config:
    """The config that `to_dict` wrote; unknown and missing keys are errors."""
    values = dict(values)
    family = values.pop("family", None)
    if family not in FAMILIES:
        raise ValueError(
            f"a model config's 'family' must be one of {sorted(FAMILIES)}, got {family!r}. Use one of these."
        )
    cls = FAMILIES[family]
    scaling = values.get("rope_scaling")
    if isinstance(scaling, dict):
        values["rope_scaling"] = RopeScaling(**_known_fields(RopeScaling, scaling, "rope_scaling"))
    return cls(**_known_fields(cls, values, "the model config"))
