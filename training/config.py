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
from training._outer_section import OuterConfig
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
from training.token_file import replace_atomically

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OuterConfig",
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
    outer: OuterConfig = dataclasses.field(default_factory=OuterConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    def check(self) -> None:
        """What must hold between sections, as far as their own values make sense."""
        if self.mesh.sound and self.data.sound:
            accumulate, batch = self.data.accumulate, self.data.global_batch
            if min(self.mesh.worker, self.mesh.data, accumulate, batch) >= 1:
                parts = self.mesh.devices * accumulate
                names, numbers = "mesh.data x data.accumulate", f"{self.mesh.data} x {accumulate}"
                if self.mesh.worker > 1:
                    names, numbers = f"mesh.worker x {names}", f"{self.mesh.worker} x {numbers}"
                require(
                    batch % parts == 0,
                    f"data.global_batch must be divisible by {names} = {numbers}, got {batch}. Use "
                    f"{max(parts, round(batch / parts) * parts)}.",
                )
        if self.mesh.sound and self.outer.sound and self.run.sound:
            self._check_rounds()
        shape = self.model.shape()
        if shape is not None and self.data.sound:
            require(
                self.data.length <= shape.max_length,
                f"data.length must be at most the model's max_length {shape.max_length}, got "
                f"{self.data.length}. Shorten it, or raise --model.max_length.",
            )

        if shape is not None and self.outer.sound and self.outer.name != "none":
            require(
                self.outer.fragments <= shape.n_layers,
                f"outer.fragments must be at most the model's {shape.n_layers} layers, got {self.outer.fragments}. Use "
                f"{shape.n_layers} or fewer.",
            )

    def _check_rounds(self) -> None:
        outer, workers = self.outer, self.mesh.worker
        if outer.name == "none":
            vain = outer.given_in_vain()
            default = type(outer)()
            require(
                not vain,
                f"{', '.join(f'outer.{key}' for key in vain)} must be left out without an outer optimizer, got "
                f"{', '.join(str(getattr(outer, key)) for key in vain)}. Set --outer.name gasloc, or go back to "
                f"{' '.join(f'--outer.{key} {getattr(default, key)}' for key in vain)}.",
            )
            require(
                workers == 1,
                f"mesh.worker must be 1 without an outer optimizer, got {workers}. Set outer.name gasloc, or use "
                f"mesh.data {workers} for workers that exchange in every step.",
            )
            return
        if not isinstance(outer.local_steps, int):
            require(
                len(outer.local_steps) == workers,
                f"outer.local_steps must be one number or a list of mesh.worker = {workers} numbers, got "
                f"{len(outer.local_steps)}. Give each worker its own.",
            )
            if not outer.local_steps:
                return
        if outer.steps_per_round >= 1 and self.run.steps >= 1:
            problem = outer.last_round_problem(0, self.run.steps)
            require(problem is None, problem or "")

    @property
    def tokens_per_step(self) -> int:
        return self.data.global_batch * self.data.length

    def save(self, path: str | Path) -> None:
        with replace_atomically(Path(path)) as file:
            file.write((json.dumps(to_dict(self), indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Config:
        return update(cls(), read_values(path))


def preset(name: str) -> Config:
    """A named configuration: demo, gasloc-demo, tiny, gpt345m, llama500m, llama1p8b, llama134m, llama551m,
    gasloc134m, gasloc551m.
    """
    from training.presets import PRESETS  # presets are built from the classes above

    if name not in PRESETS:
        hint = did_you_mean(name, tuple(PRESETS)) or " Use one of these."
        raise ValueError(f"--config must be one of {', '.join(PRESETS)}, got {name!r}.{hint}")
    return PRESETS[name]()
