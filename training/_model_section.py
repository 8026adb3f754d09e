"""The model's section of a run's settings: a preset of `models` and what is changed in it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import models
from training._fields import Settings


@dataclasses.dataclass(frozen=True)
class ModelConfig(Settings):
    """A preset of `models` and what to change in it; None keeps the preset's own value."""

    section: ClassVar[str] = "model"

    preset: str = "demo"
    """Name of a model preset (models.PRESETS)."""
    vocab_size: int | None = None
    """Tokens in the vocabulary."""
    max_length: int | None = None
    """Longest sequence in tokens."""
    n_layers: int | None = None
    """Decoder layers."""
    width: int | None = None
    """Width of the residual stream."""
    n_heads: int | None = None
    """Attention heads."""
    n_kv_heads: int | None = None
    """Key/value heads (Llama only)."""
    ff_width: int | None = None
    """Width of the feed-forward part."""
    tie_embeddings: bool | None = None
    """Use the embedding as output head (Llama only; GPT always does)."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What matrix products compute in; parameters stay float32."""
    attention: Literal["xla", "cudnn"] | None = None
    """Attention implementation; None chooses by device."""
    remat: bool | None = None
    """Recompute activations in the backward pass instead of keeping them."""
    loss_chunk: int | None = None
    """Positions whose logits exist at one time."""

    def check(self) -> None:
        self.build()

    def build(self) -> models.Config:
        """The shape to build; raises ValueError where its numbers do not fit together."""
        base = models.preset(self.preset)
        changes = {k: v for k, v in dataclasses.asdict(self).items() if k != "preset" and v is not None}
        known = {field.name for field in dataclasses.fields(base)}
        replaced = {}
        for key, value in changes.items():
            field = "tied_head" if key == "tie_embeddings" else key
            if field not in known:
                raise ValueError(
                    f"model.{key} must be left out for {self.preset}, got {value}. {type(base).__name__} "
                    "has no such choice."
                )
            replaced[field] = value
        if {"width", "n_heads"} & set(replaced):
            replaced["head_dim"] = None  # derived from the two again, not kept from the preset
        return dataclasses.replace(base, **replaced)
