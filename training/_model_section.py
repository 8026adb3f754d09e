"""The model's section of a run's settings: a preset of `models` and what is changed in it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import models
from training._fields import Settings
from training._problems import did_you_mean, note, require

_FIELD = {"tie_embeddings": "tied_head"}  # of the models library, where the trainer's name is another
_LEAVE_OUT = "Leave it out to keep the preset's own."


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
        base = self._preset()
        if base is None:
            return
        known = {field.name for field in dataclasses.fields(base)}
        fine = True
        for key, value in self._changes().items():
            fine &= require(
                _FIELD.get(key, key) in known,
                f"model.{key} must be left out for {self.preset}, got {value}. A {base.family.upper()} has no such "
                "choice; take a Llama preset for it.",
            )
            if isinstance(value, int) and not isinstance(value, bool):
                fine &= require(value >= 1, f"model.{key} must be at least 1, got {value}. {_LEAVE_OUT}")
        if fine:
            try:
                self.build()
            except (
                ValueError
            ) as error:  # the library's own name for its class says nothing to the trainer's user
                note(str(error).replace(f"{type(base).__name__}.", "model."))

    def build(self) -> models.Config:
        """The shape to build; raises ValueError where its numbers do not fit together."""
        replaced: dict[str, Any] = {_FIELD.get(key, key): value for key, value in self._changes().items()}
        if {"width", "n_heads"} & set(replaced):
            replaced["head_dim"] = None  # derived from the two again, not kept from the preset
        return dataclasses.replace(models.preset(self.preset), **replaced)

    def shape(self) -> models.Config | None:
        """`build`, or None where that is an error, noted elsewhere."""
        try:
            return self.build() if self.sound else None
        except (ValueError, TypeError):
            return None

    def _preset(self) -> models.Config | None:
        known = self.preset in models.PRESETS
        hint = did_you_mean(self.preset, models.PRESETS) or " Use one of these."
        require(known, f"model.preset must be one of {', '.join(models.PRESETS)}, got {self.preset!r}.{hint}")
        return models.preset(self.preset) if known else None

    def _changes(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "preset" and v is not None}
