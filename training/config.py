"""The settings of a run: one tree of frozen dataclasses, checked at construction, written beside the results.

    config = training.config.preset("demo")                          # training/presets.py
    config = training.config.update(config, {"optimizer.density": 0.01})
    config.save(folder / "config.json");  Config.load(folder / "config.json")

The command line spells the same names with dots: --optimizer.density 0.01 --mesh.data 4.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from training._fields import Settings, dotted, read_values, to_dict, update
from training._model_section import ModelConfig
from training._problems import did_you_mean, gathered, require
from training._sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "ScheduleConfig",
    "dotted",
    "gathered",
    "preset",
    "read_values",
    "to_dict",
    "update",
]


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """All settings of a run."""

    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    def check(self) -> None:
        """What must hold between sections, as far as their own values make sense."""
        if self.mesh.sound and self.data.sound:
            workers, accumulate, batch = self.mesh.data, self.data.accumulate, self.data.global_batch
            if min(workers, accumulate, batch) >= 1:
                parts = workers * accumulate
                require(
                    batch % parts == 0,
                    f"data.global_batch must be divisible by mesh.data x data.accumulate = {workers} x "
                    f"{accumulate}, got {batch}. Use {max(parts, round(batch / parts) * parts)}.",
                )
        shape = self.model.shape()
        if shape is not None and self.data.sound:
            require(
                self.data.length <= shape.max_length,
                f"data.length must be at most the model's max_length {shape.max_length}, got "
                f"{self.data.length}. Shorten it, or raise --model.max_length.",
            )

    @property
    def tokens_per_step(self) -> int:
        return self.data.global_batch * self.data.length

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(to_dict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Config:
        return update(cls(), read_values(path))


def preset(name: str) -> Config:
    """A named configuration: demo, tiny, gpt345m, llama500m, llama1p8b, llama134m, llama551m."""
    from training.presets import PRESETS  # presets are built from the classes above

    if name not in PRESETS:
        hint = did_you_mean(name, tuple(PRESETS)) or " Use one of these."
        raise ValueError(f"--config must be one of {', '.join(PRESETS)}, got {name!r}.{hint}")
    return PRESETS[name]()
