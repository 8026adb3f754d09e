"""What a run needs and this machine lacks: memory and data, found out before anything is compiled.

The estimate counts what one worker must hold during a step. It is meant to be right within a third: enough to
refuse a run that cannot fit and to say how much more it would take, not to plan the last gigabyte.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax

import models
from training.config import Config, dotted, update
from training.corpus import prepare_stdlib
from training.optimizers import make_optimizer
from training.progress import amount
from training.token_file import TokenFile, open_tokens

_TRUSTED = 0.8  # of the memory, for what is advised: the estimate is not exact
_STATE_BYTES_PER_PARAMETER = {"scape": 4.25, "adams": 4, "adamw": 8, "topk_adams": 8, "topk_adamw": 12}


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one worker holds in a step, by part."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    update_bytes: int
    activations_bytes: int
    outer_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(dataclasses.astuple(self))

    def __str__(self) -> str:
        parts = (
            f"{f.name.removesuffix('_bytes')} {amount(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name)
        )
        return f"{amount(self.total_bytes)} per worker ({', '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class Data:
    """The opened token files."""

    train: TokenFile
    validation: TokenFile


def estimate_memory(config: Config, *, on_gpu: bool | None = None) -> MemoryEstimate:
    """From shapes alone; nothing is allocated. `on_gpu` None: on the kind of device that this process has."""
    on_gpu = jax.default_backend() != "cpu" if on_gpu is None else on_gpu
    model = config.model.build()
    parameters = models.num_params(model)
    state = _STATE_BYTES_PER_PARAMETER[config.optimizer.name] + (config.optimizer.staleness_power > 0)
    narrow = model.dtype == "bfloat16"
    sequences = config.data.global_batch // (config.mesh.devices * config.data.accumulate)
    tokens = sequences * config.data.length
    # Values kept for the backward pass, fitted to XLA's own figures: about ten of the model's width and four of
    # the feed-forward part (GELU: six) per token and layer; with remat one per layer and those of one layer.
    per_layer = 10 * model.width + (6 if model.family == "gpt" else 4) * model.ff_width
    values = model.n_layers * (model.width if model.remat else per_layer) + (per_layer if model.remat else 0)
    activations = tokens * values * (2 if narrow and on_gpu else 4)  # XLA:CPU computes bfloat16 in float32
    if not on_gpu:  # no flash attention: scores, exponentials, probabilities and their gradient stay
        activations += (
            4 * 4 * tokens * config.data.length * model.n_heads * (1 if model.remat else model.n_layers)
        )
    chunk = min(model.loss_chunk or config.data.length, config.data.length)
    logits = 3 * sequences * chunk * model.vocab_size * 4
    return MemoryEstimate(
        parameters_bytes=parameters * (6 if narrow else 4),  # float32 masters and the copy to compute with
        gradients_bytes=parameters * 4 * (2 if config.data.accumulate > 1 else 1),
        optimizer_bytes=int(parameters * state),
        update_bytes=parameters * 4,
        activations_bytes=activations + logits,
        outer_bytes=0 if config.outer.name == "none" else parameters * _outer_bytes_per_parameter(config),
    )


def _outer_bytes_per_parameter(config: Config) -> int:
    """Momentum, anchors (the parameters before the round), the proposal with what arrives, and the residual."""
    outer = config.outer
    momentum = 0 if outer.name in ("local_sgd", "dadam", "local_dadam") else 4
    return momentum + 4 + 8 + (4 if outer.payload_dtype != "float32" else 0)


def available_bytes() -> int:
    """Memory a process may still take on this machine: what is free, or its control group's limit."""
    free = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    except OSError:  # not Linux: the size of the machine has to do
        free.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            free.append(int(limit) - used)
    except (OSError, ValueError):
        pass  # no control group, or an old one: the machine's own number stands
    return min(free)


def memory_problem(config: Config) -> str | None:
    """What to say where the run does not fit into this machine's memory."""
    on_cpu = jax.default_backend() == "cpu"
    available = available_bytes() if on_cpu else _device_bytes()
    if available is None or _needed_bytes(config) <= available:
        return None
    estimate, workers = estimate_memory(config), config.mesh.devices
    have = f"{amount(available)} are available"
    if on_cpu:
        here = min(workers, jax.local_device_count())
        lines = [f"memory: {here} workers on one CPU need about {amount(_needed_bytes(config))}, {have}."]
    else:
        lines = [f"memory: each GPU needs about {amount(estimate.total_bytes)}, {have} on one."]
    lines.append(f"Estimated: {estimate}.")
    fitting = what_fits(config, _TRUSTED * available)
    if fitting is None:
        lines.append("Here it cannot fit, whatever the workers and micro-batches: take a smaller --config.")
    else:
        flags = " ".join(f"--{key} {value}" for key, value in fitting.items())
        need = amount(_needed_bytes(update(config, fitting)))
        lines.append(f"Here it fits with {flags} (about {need}), or take a smaller --config.")
    if on_cpu:
        gpu = 1.1 * estimate_memory(config, on_gpu=True).total_bytes
        platform = " and --mesh.platform auto" if config.mesh.platform == "cpu" else ""
        lines.append(
            f"As it is set it needs a machine with {workers} GPUs of {amount(gpu)} or more{platform}."
        )
    return "\n    ".join(lines)


def what_fits(config: Config, available: float) -> dict[str, Any] | None:
    """The settings to change so that the run fits into `available` bytes: as many workers as now if that can be,
    then without recomputation, then with the fewest micro-batches; None where nothing helps.
    """
    batch = config.data.global_batch
    counts = [config.mesh.data]
    while jax.default_backend() == "cpu" and counts[-1] % 2 == 0:  # they share the memory; a GPU has its own
        counts.append(counts[-1] // 2)
    for workers in counts:
        for remat in sorted({config.model.build().remat, True}):
            devices = workers * config.mesh.worker
            for accumulate in range(config.data.accumulate, batch // devices + 1):
                if batch % (devices * accumulate):
                    continue
                wanted = {"mesh.data": workers, "data.accumulate": accumulate, "model.remat": remat}
                changed = update(config, wanted)
                if _needed_bytes(changed) <= available:
                    now = dotted(config) | {"model.remat": config.model.build().remat}
                    return {key: value for key, value in wanted.items() if value != now[key]}
    return None


def _needed_bytes(config: Config) -> int:
    """Of this machine's memory on a CPU, which all workers share; of each device's elsewhere."""
    sharing = min(config.mesh.devices, jax.local_device_count()) if jax.default_backend() == "cpu" else 1
    return estimate_memory(config).total_bytes * sharing


def _device_bytes() -> int | None:
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def missing_data(config: Config) -> str | None:
    """What to say where the token files of `data.source` are not there."""
    if config.data.source == "stdlib":
        return None
    folder = Path(config.data.source)
    missing = [name for name in ("train.tokens", "validation.tokens") if not (folder / name).is_file()]
    if not missing:
        return None
    vocabulary = config.model.build().vocab_size
    lacks = f"{missing[0]} is missing" if len(missing) == 1 else "both are missing"
    return (
        f"data: {folder} must hold train.tokens and validation.tokens, but {lacks}.\n    "
        "Write each from your tokenized text with training.token_file.write_tokens(path, arrays_of_ids, "
        f"vocab_size={vocabulary}, tokenizer_name=...).\n    "
        "Or point --data.source to a folder that has them; --data.source stdlib takes the built-in bytes."
    )


def missing_kernel(config: Config) -> str | None:
    """What to say where the settings name a kind of kernel that cannot run on these devices or with them."""
    name, platform = config.optimizer.implementation, jax.default_backend()
    if name in ("auto", "xla"):
        return None
    asked = f"optimizer.implementation: {name} "
    if config.optimizer.name != "scape":
        return f"{asked}is for scape, this run has {config.optimizer.name}. Leave it at auto."
    if platform != "gpu":
        return f"{asked}needs CUDA devices, this run has {platform} devices. Leave it at auto."
    try:
        make_optimizer(config, lambda step: 0.0, "data")
    except NotImplementedError as error:
        return f"{asked}cannot run with these settings: {error}"
    return None


def check(config: Config) -> None:
    """Raises one ValueError that lists everything missing; call it once the devices exist."""
    found = memory_problem(config), missing_data(config), missing_kernel(config)
    problems = [problem for problem in found if problem]
    if problems:
        raise ValueError(f"{config.run.name} cannot run here as set:\n  " + "\n  ".join(problems))


def open_data(config: Config) -> Data:
    """The token files of the run, checked against the model's vocabulary."""
    if config.data.source == "stdlib":
        corpus = prepare_stdlib(config.data.cache or None)
        data = Data(corpus.train, corpus.validation)
    else:
        folder = Path(config.data.source)
        data = Data(*(open_tokens(folder / name) for name in ("train.tokens", "validation.tokens")))
    train, validation = data.train, data.validation
    if train.tokenizer_name != validation.tokenizer_name:
        raise ValueError(
            f"training and validation tokens must come from one tokenizer, got {train.tokenizer_name!r} in "
            f"{train.path} "
            f"and {validation.tokenizer_name!r} in {validation.path}. Make both again with one."
        )
    vocabulary = config.model.build().vocab_size
    if train.vocab_size > vocabulary:
        raise ValueError(
            f"the model's vocabulary must cover that of the tokens, got {vocabulary} ids in the model and "
            f"{train.vocab_size} in {train.path} (tokenizer {train.tokenizer_name!r}). Set --model.vocab_size "
            f"{train.vocab_size}, or use tokens made for this model."
        )
    return data
