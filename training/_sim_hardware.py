"""What a step costs on a device that nobody has measured: arithmetic of a token, bytes of an update, and stated guesses."""

from __future__ import annotations

import dataclasses

import models
from training._problems import did_you_mean


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator, by its data sheet.

    Attributes:
      flops: peak dense bfloat16 operations a second.
      memory_bytes_per_sec: peak of its memory.
    """

    flops: float
    memory_bytes_per_sec: float


DEVICES = {
    "gh200": Device(989e12, 4.0e12),
    "h200": Device(989e12, 4.8e12),
    "h100": Device(989e12, 3.35e12),
    "a100": Device(312e12, 2.0e12),
}
UTILISATION = 0.4  # of the peak, by the model's own arithmetic: what well-kept training code reaches
_MEMORY_SHARE = 0.8  # of the peak memory rate, in passes over all parameters

# Read and written for each parameter in float32, at least: gradient, state and parameters. SCAPE's is what its compiled
# program moves at d = 0.1 (README, "On a GPU"). Outer: anchor, momentum, what arrived and the parameters.
_UPDATE_BYTES = {"adamw": 28.0, "adams": 20.0, "scape": 27.6}
_OUTER_BYTES = 24.0


def device_of(name: str) -> Device:
    """Raises ValueError for an unknown name; it tells the nearest."""
    if name not in DEVICES:
        raise ValueError(
            f"--device must be one of {', '.join(DEVICES)}, got {name!r}.{did_you_mean(name, tuple(DEVICES))} For others "
            "give --tokens-per-sec or --step-secs."
        )
    return DEVICES[name]


def flops_per_token(model: models.Config, length: int) -> float:
    """Of forward and backward: 6 for each parameter that is multiplied, and causal attention over `length` tokens.

    What is computed a second time to save memory does not count; it lowers the utilisation.
    """
    multiplied = models.num_params(model)
    if not model.tied_head:
        multiplied -= model.vocab_size * model.width  # looked up only
    return 6.0 * multiplied + 6.0 * model.n_layers * model.n_heads * model.head_size * length


def update_secs(device: Device, optimizer: str, parameters: int) -> float:
    """Of one update, by "adamw", "adams" or "scape"; "outer" is that of a round."""
    moved = _OUTER_BYTES if optimizer == "outer" else _UPDATE_BYTES[optimizer]
    return moved * parameters / (_MEMORY_SHARE * device.memory_bytes_per_sec)
