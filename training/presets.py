"""Named configurations: the papers' runs, the demonstrations, and a tiny one for tests.

Hyper-parameters of gpt345m, llama500m and llama1p8b: SCAPE, arXiv 2607.01678 (100k steps; betas, decay,
clipping, warm-up and batch as published). llama134m and llama551m: GASLoC, arXiv 2606.11081, which gives the
sizes and the data (FineWeb) but no table of hyper-parameters; theirs are our choice, in the proportions of
llama500m. gasloc134m and gasloc551m are these in rounds of the published H = 30. `accumulate` is ours: it
keeps four sequences (eight of length 1024) per worker in memory with eight workers.
"""

from __future__ import annotations

import dataclasses

from training.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
)


def demo() -> Config:
    """Eight virtual workers train a byte-level Llama on the standard library's sources: minutes on two CPU
    cores.
    """
    return Config(
        run=RunConfig(name="demo", steps=1000),
        model=ModelConfig(preset="demo"),
        data=DataConfig(global_batch=8, length=128),
        optimizer=OptimizerConfig(density=0.1, staleness_power=1.0, density_warmup_fraction=0.1),
        schedule=ScheduleConfig(learning_rate=1e-3, end_learning_rate=1e-4, warmup_fraction=0.05),
        mesh=MeshConfig(data=8, platform="cpu"),
        eval=EvalConfig(every=200, batches=16, final_batches=64),
        checkpoint=CheckpointConfig(every=400),
        log=LogConfig(every=20),
    )


def gasloc_demo() -> Config:
    """Eight virtual islands of one device, which meet in random pairs every ten steps: minutes on two CPU cores."""
    base = demo()
    return dataclasses.replace(
        base,
        run=RunConfig(name="gasloc-demo", steps=1000),
        optimizer=OptimizerConfig(name="adamw"),
        outer=OuterConfig(name="gasloc", local_steps=10),
        mesh=MeshConfig(worker=8, platform="cpu"),
    )


def tiny() -> Config:
    """Seconds: for tests and for trying an option."""
    return Config(
        run=RunConfig(name="tiny", steps=20),
        model=ModelConfig(preset="tiny", vocab_size=257),
        data=DataConfig(global_batch=8, length=32),
        optimizer=OptimizerConfig(density=0.1),
        schedule=ScheduleConfig(learning_rate=3e-3, end_learning_rate=3e-4, warmup_fraction=0.1),
        mesh=MeshConfig(data=4, platform="cpu"),
        eval=EvalConfig(every=10, batches=2, final_batches=2),
        checkpoint=CheckpointConfig(every=10),
        log=LogConfig(every=5),
    )


def gpt345m() -> Config:
    """GPT-2 medium on OpenWebText."""
    return _large(
        "gpt345m",
        DataConfig(source="data/openwebtext-gpt2", global_batch=512, accumulate=8, length=1024),
        OptimizerConfig(density=0.1, b2=0.999, weight_decay=0.01),
        ScheduleConfig(learning_rate=1.5e-4, end_learning_rate=1e-5, warmup_fraction=0.05),
    )


def llama500m() -> Config:
    """H2O-Danube3-500M shape on SlimPajama-6B."""
    return _large("llama500m", _danube_data())


def llama1p8b() -> Config:
    """H2O-Danube-1.8B shape on SlimPajama-6B."""
    return _large("llama1p8b", _danube_data())


def llama134m() -> Config:
    """Llama-3-style decoder of 134 M parameters on FineWeb."""
    return _large("llama134m", _fineweb_data())


def llama551m() -> Config:
    """Llama-3-style decoder of 551 M parameters on FineWeb."""
    return _large("llama551m", _fineweb_data())


def gasloc134m() -> Config:
    """llama134m as eight islands that meet in random pairs every 30 steps."""
    return _islands("gasloc134m", llama134m())


def gasloc551m() -> Config:
    """llama551m as eight islands that meet in random pairs every 30 steps."""
    return _islands("gasloc551m", llama551m())


def _islands(name: str, base: Config) -> Config:
    return dataclasses.replace(
        base,
        run=dataclasses.replace(base.run, name=name),
        optimizer=dataclasses.replace(base.optimizer, name="adamw"),
        outer=OuterConfig(name="gasloc", local_steps=30),
        mesh=MeshConfig(worker=8),
        eval=dataclasses.replace(base.eval, final_batches=256),  # for nine models
    )


def _danube_data() -> DataConfig:
    return DataConfig(source="data/slimpajama-6b-llama", global_batch=1024, accumulate=32, length=4096)


def _fineweb_data() -> DataConfig:
    return DataConfig(source="data/fineweb-llama", global_batch=512, accumulate=16, length=2048)


def _large(
    name: str,
    data: DataConfig,
    optimizer: OptimizerConfig = OptimizerConfig(density=0.1, b2=0.95, weight_decay=0.1),
    schedule: ScheduleConfig = ScheduleConfig(
        learning_rate=3e-4, end_learning_rate=3e-5, warmup_fraction=0.02
    ),
) -> Config:
    return Config(
        run=RunConfig(name=name, steps=100_000),
        model=ModelConfig(preset=name),
        data=data,
        optimizer=optimizer,
        schedule=schedule,
        mesh=MeshConfig(data=8),  # GPUs where there are any
        eval=EvalConfig(every=1000, batches=32, final_batches=0),
        checkpoint=CheckpointConfig(every=1000, keep=3),
        log=LogConfig(every=20),
    )


_ALL = (
    demo,
    gasloc_demo,
    tiny,
    gpt345m,
    llama500m,
    llama1p8b,
    llama134m,
    llama551m,
    gasloc134m,
    gasloc551m,
)
PRESETS = {f.__name__.replace("_", "-"): f for f in _ALL}
