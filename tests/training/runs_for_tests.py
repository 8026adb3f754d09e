"""Small runs for the tests of the trainer: token files of a learnable text, settings of a few seconds."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import quick_compile
from training import config as settings
from training.token_file import write_tokens

# .ci/run has two cores and 25 minutes.
long = pytest.mark.skipif("LONG" not in os.environ, reason="LONG=1 runs it; others cover the most of it")
ROOT = Path(__file__).parents[2]
PRETRAIN = ROOT / "scripts" / "pretrain.py"


def write_corpus(folder, *, vocab_size=61, tokens=20_000, tokenizer="test"):
    """A text in which each token mostly follows from the one before, so that a model learns within a few
    steps.
    """
    rng = np.random.default_rng(0)
    follows = rng.permutation(vocab_size)
    for name, count in (("train", tokens), ("validation", tokens // 10)):
        ids = np.zeros(count, np.int64)
        noise = rng.random(count) < 0.1
        random = rng.integers(0, vocab_size, count)
        for i in range(1, count):
            ids[i] = random[i] if noise[i] else follows[ids[i - 1]]
        write_tokens(folder / f"{name}.tokens", [ids], vocab_size, tokenizer)
    return folder


def tiny(corpus, **changes):
    """The tiny preset on `corpus`: 4 workers, density 0.1, 10 steps."""
    values = {
        "model.vocab_size": 61, "data.source": str(corpus), "run.steps": 10, "eval.every": 0,
        "eval.final_batches": 1, "checkpoint.every": 0, "log.every": 1, "log.tensorboard": False,
        "optimizer.block_size": 64,
    }  # fmt: skip
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return settings.update(settings.preset("tiny"), values)


def options(config):
    """The command line that gives `config` from the tiny preset."""
    base, arguments = settings.dotted(settings.preset("tiny")), ["--config", "tiny"]
    for key, value in settings.dotted(config).items():
        if value != base[key]:
            arguments += [f"--{key}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return arguments


def command(*arguments):
    return [sys.executable, str(PRETRAIN), *arguments]


def environment():
    """For a process of its own: CPU, the repository's packages, and JAX free to make its own number of
    devices.
    """
    changed = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        **quick_compile.ENVIRONMENT,
    }
    return {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")} | changed


def pretrain(*arguments, cwd, timeout=120):
    """Runs scripts/pretrain.py in a process of its own."""
    return subprocess.run(
        command(*arguments), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout
    )
