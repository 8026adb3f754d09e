"""What a run needs and this machine lacks: memory and data, found out before anything is compiled.

The estimate counts what one worker must hold during a step. It is meant to be right within a third: enough to
refuse a run that cannot fit and to say how much more it would take, not to plan the last gigabyte.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax

import models
from training.config import Config
from training.corpus import prepare_stdlib
from training.progress import amount
from training.token_file import TokenFile, open_tokens

_STATE_BYTES_PER_PARAMETER = {"scape": 4.25, "adams": 4, "adamw": 8, "topk_adams": 8, "topk_adamw": 12}


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one worker holds in a step, by part."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    update_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(dataclasses.astuple(self))

    def __str__(self) -> str:
        parts = (
            f"{f.name.removesuffix('_bytes')} {amount(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
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
    sequences = config.data.global_batch // (config.mesh.data * config.data.accumulate)
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
    )


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
    estimate, workers = estimate_memory(config), config.mesh.data
    if jax.default_backend() == "cpu":
        here = min(workers, jax.local_device_count())
        needed, available, where = estimate.total_bytes * here, available_bytes(), "this machine's memory"
        if needed <= available:
            return None
        total = f"{here} workers on one CPU need about {amount(needed)}"
    else:
        stats = jax.local_devices()[0].memory_stats() or {}
        available, where = stats.get("bytes_limit", 0), "each device"
        if not available or estimate.total_bytes <= available:
            return None
        total = f"each device needs about {amount(estimate.total_bytes)}"
    gpu = estimate_memory(config, on_gpu=True)
    advice = [f"use {workers} GPUs with {amount(1.1 * gpu.total_bytes)} or more, one for each worker"]
    if estimate.activations_bytes > estimate.total_bytes / 3:
        if config.data.global_batch > workers * config.data.accumulate:
            advice.append(f"raise --data.accumulate (now {config.data.accumulate}) to shrink the activations")
        if not config.model.build().remat:
            advice.append("set --model.remat True")
    if jax.default_backend() == "cpu" and workers > 1:
        advice.append(f"use fewer workers than --mesh.data {workers}")
    have = f"{amount(available)} are available in {where}"
    advice.append("take a smaller --config")
    return f"memory: {total}, {have}. That is {estimate}. To run it: {'; or '.join(advice)}."


def missing_data(config: Config) -> str | None:
    """What to say where the token files of `data.source` are not there."""
    if config.data.source == "stdlib":
        return None
    folder = Path(config.data.source)
    missing = [name for name in ("train.tokens", "validation.tokens") if not (folder / name).is_file()]
    if not missing:
        return None
    vocabulary = config.model.build().vocab_size
    return (
        f"data: {folder} must hold train.tokens and validation.tokens, but {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} missing. Write each with "
        "training.token_file.write_tokens(path, arrays_of_ids, "
        f"vocab_size={vocabulary}, tokenizer_name=...) from your tokenized text, or point --data.source to "
        "a folder that has "
        "them; --data.source stdlib trains on the built-in byte-level corpus."
    )


def check(config: Config) -> None:
    """Raises one ValueError that lists everything missing; call it once the devices exist."""
    problems = [problem for problem in (memory_problem(config), missing_data(config)) if problem]
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
