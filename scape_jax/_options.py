"""The settings of SCAPE's exchange, checked once, when the transformation is built."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from scape_jax._adams import check_hyperparameters
from scape_jax._exchange import PAYLOAD_DTYPES, AxisName
from scape_jax._layout import INDEX16_MAX_ROW, LeafLayout

STATIC_ARGS = (
    "density",
    "selection",
    "block_size",
    "codec",
    "payload_dtype",
    "dense",
    "density_warmup_steps",
    "mask_every",
    "staleness_power",
    "axis_name",
)


def check_static_number(name: str, value: Any) -> None:
    """These numbers fix shapes, so they cannot be traced."""
    if isinstance(value, jax.Array | jax.core.Tracer):
        raise TypeError(
            f"{name} fixes the shapes of the exchange and must be a plain Python number, got {value!r}. "
            "With optax.inject_hyperparams pass static_args=scape_jax.STATIC_ARGS."
        )


def check_density(density: Any) -> None:
    check_static_number("density", density)
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density!r}. Use 1.0 for a dense exchange.")


def check_positive(name: str, value: Any, hint: str) -> None:
    """`value` may be None, traced, or a finite number > 0."""
    if isinstance(value, int | float) and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}. {hint}")


def check_payload_dtype(dtype: Any) -> None:
    if jnp.dtype(dtype) not in PAYLOAD_DTYPES:
        raise ValueError(f"payload_dtype must be float32 or bfloat16, got {jnp.dtype(dtype)}.")


@dataclasses.dataclass(frozen=True)
class ScapeOptions:
    """See `scape_jax.scape` for the meaning of each."""

    density: float = 0.1
    b1: Any = 0.9
    b2: Any = 0.95
    eps: Any = 1e-8
    clip_norm: Any = 1.0
    clip_order: Literal["before", "paper"] = "before"
    bias_correction: Literal["both", "none", "momentum"] = "both"
    axis_name: AxisName = None
    selection: Literal["block", "leaf"] = "block"
    block_size: int = 4096
    codec: Literal["auto", "bitmap", "index"] = "auto"
    payload_dtype: Any = jnp.float32
    dense: Callable[[str], bool] | None = None
    density_warmup_steps: int = 0
    mask_every: int = 1
    staleness_power: float = 0.0
    skip_nonfinite: bool = True

    def __post_init__(self):
        check_density(self.density)
        for name in ("block_size", "density_warmup_steps", "mask_every", "staleness_power"):
            check_static_number(name, getattr(self, name))
        check_hyperparameters(self.b1, self.b2, self.eps, self.bias_correction)
        for name, allowed in (
            ("clip_order", ("before", "paper")),
            ("selection", ("block", "leaf")),
            ("codec", ("auto", "bitmap", "index")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}.")
        if not isinstance(self.block_size, int) or self.block_size < 32 or self.block_size % 32:
            raise ValueError(f"block_size must be a multiple of 32, at least 32, got {self.block_size!r}.")
        if not isinstance(self.mask_every, int) or self.mask_every < 1:
            raise ValueError(f"mask_every must be a whole number >= 1, got {self.mask_every!r}.")
        if not isinstance(self.density_warmup_steps, int) or not 0 <= self.density_warmup_steps < 2**24:
            raise ValueError(f"density_warmup_steps must be a whole number >= 0, got {self.density_warmup_steps!r}.")
        if not 0 <= self.staleness_power <= 4:
            raise ValueError(f"staleness_power must be in [0, 4], got {self.staleness_power!r}. 0 switches it off.")
        check_positive("clip_norm", self.clip_norm, "Use None for no clipping.")
        check_payload_dtype(self.payload_dtype)

    def layout_arguments(self) -> dict[str, Any]:
        return {
            "density": self.density,
            "block_size": self.block_size,
            "selection": self.selection,
            "dense": self.dense,
        }

    def index_dtype(self, layouts: Sequence[LeafLayout]) -> Any:
        """16 bits hold a column of a row of up to 65536 entries."""
        widest = max((lay.row for lay in layouts if lay.sparse), default=0)
        return jnp.uint16 if widest <= INDEX16_MAX_ROW else jnp.uint32

    def own_mask_bytes(self, layouts: Sequence[LeafLayout], codec: str, density: float) -> int:
        """Bytes that one worker contributes to the all-gather of masks."""
        sparse = [lay for lay in layouts if lay.sparse]
        if codec == "bitmap":
            return sum(lay.owned_rows * lay.row_words * 4 for lay in sparse)
        width = jnp.dtype(self.index_dtype(layouts)).itemsize
        return sum(lay.owned_rows * lay.kept(density)[0] * width for lay in sparse)

    def resolved_codec(self, layouts: Sequence[LeafLayout]) -> str:
        """The cheaper codec at the final density, or the one asked for."""
        if self.codec != "auto":
            return self.codec
        sizes = {c: self.own_mask_bytes(layouts, c, self.density) for c in ("bitmap", "index")}
        return min(sizes, key=lambda c: sizes[c])
