"""The settings of SCAPE's exchange, checked once, when the transformation is built."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels import IMPLEMENTATIONS, MAX_KERNEL_BLOCK
from scape_jax import _checks as check
from scape_jax._adams import BIAS_CORRECTIONS
from scape_jax._exchange import AxisName
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
    "implementation",
)


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
    skip_spike: Any = None
    finite_check: Literal["all", "kept"] = "all"
    implementation: Literal["xla", "pallas", "triton"] | None = None

    def __post_init__(self):
        check.check_density(self.density)
        check.check_hyperparameters(self.b1, self.b2, self.eps)
        check.check_one_of("bias_correction", self.bias_correction, BIAS_CORRECTIONS)
        check.check_one_of("clip_order", self.clip_order, ("before", "paper"))
        check.check_one_of("selection", self.selection, ("block", "leaf"))
        check.check_one_of("codec", self.codec, ("auto", "bitmap", "index"))
        check.check_whole_number("block_size", self.block_size, 32, "Typical: 4096.")
        if self.block_size % 32:
            raise ValueError(f"block_size must be a multiple of 32, got {self.block_size}. Typical: 4096.")
        check.check_whole_number("mask_every", self.mask_every, 1, "Use 1 for a new mask in every step.")
        check.check_whole_number(
            "density_warmup_steps", self.density_warmup_steps, 0, "0 switches the warm-up off."
        )
        if self.density_warmup_steps >= 1 << 24:
            raise ValueError(
                f"density_warmup_steps must be below 2**24, got {self.density_warmup_steps}. Use fewer."
            )
        check.check_static_number("staleness_power", self.staleness_power)
        check.check_number(
            "staleness_power", self.staleness_power, "in [0, 4]", lambda p: 0 <= p <= 4, "0 switches it off."
        )
        check.check_clip_norm(self.clip_norm)
        check.check_skip_spike(self.skip_spike)
        check.check_payload_dtype(self.payload_dtype)

        check.check_one_of("finite_check", self.finite_check, ("all", "kept"))
        if self.implementation is not None:
            check.check_one_of("implementation", self.implementation, IMPLEMENTATIONS)
        if self.implementation in ("pallas", "triton") and (reason := self.no_kernel()):
            raise NotImplementedError(
                f"implementation={self.implementation!r}: there is no kernel for {reason}. Use None."
            )

    @property
    def checks_all(self) -> bool:
        """Every entry of the gradients is looked at before the exchange."""
        return self.skip_nonfinite and self.finite_check == "all"

    @property
    def drops_nonfinite(self) -> bool:
        """An entry that is not kept counts as zero where its gradient is not finite, so that no residual is spoilt."""
        return self.skip_nonfinite and self.finite_check == "kept"

    def no_kernel(self) -> str | None:
        """Why no kernel takes leaves cut like this, or None if they do."""
        if self.selection != "block":
            return f"selection={self.selection!r}, whose rows may have any length"
        if self.block_size & (self.block_size - 1) or self.block_size > MAX_KERNEL_BLOCK:
            return f"block_size={self.block_size}, no power of two up to {MAX_KERNEL_BLOCK}"
        return None

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
