"""The sections of a run's settings: what each holds, and what must hold of it.

The model's has a file of its own; the tree of all, its files and its presets are in config.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

from training._fields import Settings
from training._problems import require

OptimizerName = Literal["scape", "adams", "adamw", "topk_adamw", "topk_adams"]
SPARSE: tuple[str, ...] = ("scape", "topk_adamw", "topk_adams")


@dataclasses.dataclass(frozen=True)
class RunConfig(Settings):
    """What is run, for how long, and where its results go."""

    section: ClassVar[str] = "run"

    name: str = "demo"
    """Name of the run; also the start of its folder's name."""
    folder: str = ""
    """Folder of the results; empty: the first free one of runs/NAME-1, runs/NAME-2, ..."""
    steps: int = 100
    """Optimizer steps; with an outer optimizer the nominal inner steps of each worker."""
    seed: int = 0
    """Seed of the parameters and of the order of the data."""
    compare_every: int = 1000
    """Steps between comparisons of what must be equal on all devices, at 4 bytes a leaf and device; 0: never."""
    most_skipped: int = 100
    """Steps or rounds in a row that may be skipped, for gradients that are not finite or by optimizer.skip_spike: then the
    run goes back (run.rollbacks), or saves and ends with exit code 1. 0: any number."""
    rollbacks: int = 0
    """How often a run may go back to its last checkpoint from before too many skipped steps, and on with the data after
    them."""
    hang_secs: float = 120.0
    """A run that makes no progress for so long, and for 20 of its own longest recent steps, ends with exit code 75, its
    threads' stacks printed. 0: never."""

    def check(self) -> None:
        require(self.steps >= 1, f"run.steps must be at least 1, got {self.steps}. Give the steps to train.")
        require(
            0 <= self.seed < 2**31,
            f"run.seed must be in [0, 2**31), got {self.seed}. Any number there will do, such as 0.",
        )
        require(
            self.compare_every >= 0,
            f"run.compare_every must be at least 0, got {self.compare_every}. 1000 is the default, 0 never compares.",
        )
        require(
            self.most_skipped >= 0,
            f"run.most_skipped must be at least 0, got {self.most_skipped}. 100 is the default, 0 allows any number.",
        )
        require(
            self.rollbacks >= 0,
            f"run.rollbacks must be at least 0, got {self.rollbacks}. 3 is a start, 0 ends the run instead.",
        )
        require(
            0 <= self.hang_secs < math.inf,
            f"run.hang_secs must be at least 0, got {self.hang_secs}. 120 is the default, 0 waits for ever.",
        )
        bad = sorted(set(self.name) & set("/\\ "))
        require(
            bool(self.name) and not bad,
            f"run.name must be a word without slashes or blanks, got {self.name!r}. Use one such as demo; "
            "run.folder takes a path.",
        )


@dataclasses.dataclass(frozen=True)
class DataConfig(Settings):
    """What is read and in which portions."""

    section: ClassVar[str] = "data"

    source: str = "stdlib"
    """"stdlib" (the running Python's own sources), or a folder with train.tokens and validation.tokens."""
    cache: str = ""
    """Folder for the token files of a built-in corpus; empty: $XDG_CACHE_HOME/scape-gasloc, or else ./data.
    """
    global_batch: int = 16
    """Sequences per optimizer step, all workers together."""
    accumulate: int = 1
    """Micro-batches per worker and step; their gradients are averaged before the one exchange."""
    length: int = 128
    """Tokens per sequence that are predicted."""

    def check(self) -> None:
        require(
            bool(self.source),
            "data.source must be 'stdlib' or a folder of token files, got nothing. Name one.",
        )
        for key, least in (
            ("global_batch", "Give the sequences of all workers together"),
            ("accumulate", "1 takes the batch in one go"),
            ("length", "Give the tokens to predict in a sequence"),
        ):
            value = getattr(self, key)
            require(value >= 1, f"data.{key} must be at least 1, got {value}. {least}.")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Settings):
    """The optimizer and its exchange; see scape_jax.scape for each argument."""

    section: ClassVar[str] = "optimizer"

    name: OptimizerName = "scape"
    """scape; adams and adamw behind a dense all-reduce; topk_*: top-k of the raw gradient with error
    feedback.
    """
    density: float = 0.1
    """Fraction of the entries that is exchanged in a step, in (0, 1]; sparsity = 1 - density."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    clip_norm: float = 1.0
    """Largest global norm of the averaged gradient; 0: no clipping."""
    clip_order: Literal["before", "paper"] = "before"
    """Clip before the moment is rebuilt, or where the paper's listing does."""
    bias_correction: Literal["both", "none", "momentum"] = "both"
    """Which moments are bias-corrected."""
    selection: Literal["block", "leaf"] = "block"
    """Choose the kept entries per block of entries, or per leaf as in the paper."""
    block_size: int = 4096
    """Entries per block."""
    codec: Literal["auto", "bitmap", "index"] = "auto"
    """How masks travel; auto takes the cheaper."""
    payload_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the exchanged values."""
    density_warmup_fraction: float = 0.0
    """Fraction of the run in which the density falls from 1 to its value."""
    mask_every: int = 1
    """Steps for which one mask is used."""
    staleness_power: float = 0.0
    """Divide the gradient of an entry that waited t steps by t**power in the second moment."""
    skip_nonfinite: bool = True
    """Skip a step on all workers where any gradient is not finite."""
    skip_spike: float = 0.0
    """Skip a step on all workers where the loss is so many nats above its recent mean; 0: none."""
    finite_check: Literal["all", "kept"] = "all"
    """Look for that at all gradients, or, with scape, only at those sent: it costs nothing; others count as zero."""
    implementation: Literal["auto", "xla", "pallas", "triton"] = "auto"
    """How scape's update runs: plain JAX (xla) or GPU kernels; auto takes kernels on GPUs where they fit."""
    dense: tuple[str, ...] = ("norm", "bias", "scale")
    """Leaves whose path contains one of these words are always exchanged in full."""
    no_decay: tuple[str, ...] = ("norm", "bias", "scale")
    """Leaves whose path contains one of these words have no weight decay."""

    @property
    def is_sparse(self) -> bool:
        return self.name in SPARSE

    def check(self) -> None:
        require(
            0 < self.density <= 1,
            f"optimizer.density must be in (0, 1], got {self.density}. Use 1.0 for a dense exchange.",
        )
        for key, usual in (("b1", 0.9), ("b2", 0.95)):
            value = getattr(self, key)
            require(
                0 <= value < 1,
                f"optimizer.{key} must be in [0, 1), got {value}. {usual} is usual; 0 keeps no memory.",
            )
        require(
            0 < self.eps < math.inf,
            f"optimizer.eps must be positive and finite, got {self.eps}. 1e-8 is usual.",
        )
        for key, zero in (
            ("weight_decay", "no decay"),
            ("clip_norm", "no clipping"),
            ("staleness_power", "nothing is divided"),
            ("skip_spike", "no step is skipped for that"),
        ):
            value = getattr(self, key)
            require(
                0 <= value < math.inf,
                f"optimizer.{key} must be finite and not negative, got {value}. 0: {zero}.",
            )
        require(
            self.block_size >= 32,
            f"optimizer.block_size must be at least 32, got {self.block_size}. 4096 is usual.",
        )
        require(
            self.mask_every >= 1,
            f"optimizer.mask_every must be at least 1, got {self.mask_every}. 1: a new mask in every step.",
        )
        _fraction("optimizer.density_warmup_fraction", self.density_warmup_fraction)


@dataclasses.dataclass(frozen=True)
class ScheduleConfig(Settings):
    """The learning rate over the run, in fractions of run.steps so that a shorter run keeps its shape."""

    section: ClassVar[str] = "schedule"

    name: Literal["cosine", "constant", "wsd"] = "cosine"
    """cosine; constant; wsd: constant, then linear decay."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    end_learning_rate: float = 3e-5
    """Learning rate of the last step (cosine, wsd)."""
    warmup_fraction: float = 0.02
    """Fraction of the run with linear warm-up from 0."""
    decay_fraction: float = 0.2
    """Fraction of the run in the final decay (wsd)."""

    def check(self) -> None:
        peak, end = self.learning_rate, self.end_learning_rate
        if require(
            0 < peak < math.inf,
            f"schedule.learning_rate must be positive and finite, got {peak}. Try 1e-3, less for a large model.",
        ):
            require(
                0 <= end <= peak,
                f"schedule.end_learning_rate must be in [0, learning_rate = {peak}], got {end}. A tenth of the "
                f"peak, {peak / 10:g}, is usual.",
            )
        _fraction("schedule.warmup_fraction", self.warmup_fraction)
        _fraction("schedule.decay_fraction", self.decay_fraction)


@dataclasses.dataclass(frozen=True)
class MeshConfig(Settings):
    """The devices."""

    section: ClassVar[str] = "mesh"

    data: int = 1
    """Workers that average their gradients; on a CPU they are virtual devices."""
    worker: int = 1
    """Islands of mesh.data devices each, joined by outer.name over slow links; each then counts as one worker."""
    platform: Literal["auto", "cpu", "gpu"] = "auto"
    """Which devices to use; auto: what JAX finds."""

    @property
    def devices(self) -> int:
        return self.worker * self.data

    def check(self) -> None:
        require(self.data >= 1, f"mesh.data must be at least 1, got {self.data}. 1: a single worker.")
        require(self.worker >= 1, f"mesh.worker must be at least 1, got {self.worker}. 1: a single island.")


@dataclasses.dataclass(frozen=True)
class EvalConfig(Settings):
    """Validation loss during the run; it is always measured at the end."""

    section: ClassVar[str] = "eval"

    every: int = 100
    """Steps between evaluations; 0: only at the end."""
    batches: int = 8
    """Most batches of held-out text per evaluation; 0: all of it."""
    final_batches: int = 32
    """The same for the evaluation at the end."""

    def check(self) -> None:
        for key in ("every", "batches", "final_batches"):
            value, zero = getattr(self, key), "only at the end" if key == "every" else "all held-out text"
            require(value >= 0, f"eval.{key} must not be negative, got {value}. 0: {zero}.")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Settings):
    """What is kept to go on from."""

    section: ClassVar[str] = "checkpoint"

    every: int = 1000
    """Steps between checkpoints; 0: only at the end and on a signal."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    keep_every: int = 0
    """Those of multiples of so many steps are kept too; 0: none."""
    parameters_from: str = ""
    """Start from the parameters (only) in this other run's newest checkpoint."""
    parameters_worker: int | None = None
    """Of a run in rounds take this worker's, counted from 0; None: the mean of all (parameters_from)."""

    def check(self) -> None:
        require(
            self.every >= 0,
            f"checkpoint.every must not be negative, got {self.every}. 0: only at the end and on a signal.",
        )
        require(self.keep >= 1, f"checkpoint.keep must be at least 1, got {self.keep}. 1: the newest alone.")
        require(
            self.keep_every >= 0,
            f"checkpoint.keep_every must not be negative, got {self.keep_every}. 0 keeps the newest alone.",
        )
        worker = self.parameters_worker
        if worker is not None and require(
            worker >= 0, f"checkpoint.parameters_worker must not be negative, got {worker}. Count from 0."
        ):
            require(
                bool(self.parameters_from),
                f"checkpoint.parameters_worker must come with checkpoint.parameters_from, got {worker} alone. Name the "
                "run in rounds to start from.",
            )


@dataclasses.dataclass(frozen=True)
class LogConfig(Settings):
    """What is written down."""

    section: ClassVar[str] = "log"

    every: int = 10
    """Steps between lines of metrics.jsonl and between updates of the progress line."""
    telemetry: bool = True
    """Also measure mask overlap, residual norm and kept norm at each logged step."""
    tensorboard: bool = True
    """Write TensorBoard files beside metrics.jsonl."""

    def check(self) -> None:
        require(self.every >= 1, f"log.every must be at least 1, got {self.every}. 1: a line for each step.")


def _fraction(name: str, value: float) -> None:
    require(
        0 <= value <= 1,
        f"{name} must be a fraction of the run in [0, 1], got {value}. 0.1 is a tenth of run.steps; 0: none.",
    )
