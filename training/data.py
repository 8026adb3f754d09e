"""Batches of token windows: a deterministic, resumable grain pipeline, and fixed windows for evaluation.

A token file of N tokens is cut into (N - 1) // L windows of L + 1 tokens; neighbours share one token, which
is the last target of one and the first input of the next, so every token but the first is a target once per
epoch. Each epoch visits the windows in a new order given by the seed, and leaves out the remainder that fills
no global batch (other windows each epoch). The whole sequence is a function of (file, length, global
batch, seed) alone: the number of workers, processes, threads and prefetched batches only decides who reads
what and when. Row block w of a global batch is worker w's.
"""

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from numpy.typing import NDArray

from training.token_file import TokenFile

_log = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]


def make_loader(
    token_file: TokenFile,
    *,
    global_batch: int,
    length: int,
    seed: int,
    num_workers: int = 1,
    start_step: int = 0,
    vocab_size: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
    prefetch_batches: int = 4,
    num_threads: int = 1,
) -> "BatchLoader":
    """Returns an endless iterator of `{"tokens": int32 (global_batch, length + 1)}`.

    Args:
      token_file: the training tokens.
      global_batch: windows per batch, all workers together; a multiple of `num_workers`.
      length: tokens per window that the model reads; a window has one more, the last target.
      seed: of the order; any non-negative integer.
      num_workers: data-parallel workers; worker w has the w-th of `num_workers` equal blocks of rows.
      start_step: number of batches to start after, as if they had been read.
      vocab_size: the model's; if given, an error unless every id of the file is below it.
      process_index: this process reads only the rows of its own workers: the `process_index`-th of
        `process_count` equal blocks.
      process_count: number of processes that share the workers.
      prefetch_batches: batches read ahead; 0 reads on demand.
      num_threads: threads that read ahead; 0 reads on demand.
    """
    rows = _own_rows(global_batch, length, num_workers, process_index, process_count)
    _check_vocab(token_file, vocab_size)
    if seed < 0 or start_step < 0:
        raise ValueError(
            f"seed and start_step must be >= 0, got seed={seed} and start_step={start_step}. Use 0."
        )
    if prefetch_batches < 0 or num_threads < 0:
        raise ValueError(
            f"prefetch_batches and num_threads must be >= 0, got {prefetch_batches} and {num_threads}. "
            "Use 0 to read on demand."
        )
    windows = max(0, len(token_file) - 1) // length
    if windows < global_batch:
        raise ValueError(
            f"training needs at least one global batch of {global_batch} sequences ({num_workers} workers x "
            f"{global_batch // num_workers}), got {windows} sequences of {length} + 1 tokens in the "
            f"{len(token_file)} tokens of {token_file.path}. Use a smaller batch or length, or more text."
        )
    if windows >= 2**32:
        raise ValueError(
            f"the shuffle takes fewer than 2**32 sequences, got {windows} in {token_file.path}. "
            "Use a longer length."
        )
    return BatchLoader(
        token_file, global_batch, length, seed, rows, start_step, prefetch_batches, num_threads
    )


class BatchLoader(Iterator[Batch]):
    """The iterator of `make_loader`; close it, or use it in a `with`, to end its threads early."""

    def __init__(
        self,
        token_file: TokenFile,
        global_batch: int,
        length: int,
        seed: int,
        rows: slice,
        start_step: int,
        prefetch_batches: int,
        num_threads: int,
    ):
        self.sequences = (len(token_file) - 1) // length
        self.batches_per_epoch = self.sequences // global_batch
        self.unused_per_epoch = self.sequences % global_batch
        self._identity = {
            "checksum": token_file.header.checksum,
            "count": len(token_file),
            "length": int(length),
            "global_batch": int(global_batch),
            "seed": int(seed),
        }
        # grain shuffles epoch e with seed + e, so neighbouring seeds would share orders: mix them first.
        shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])

        def read(indices: NDArray[np.integer]) -> Batch:
            return {"tokens": token_file.read_windows(indices[rows].astype(np.int64) * length, length + 1)}

        # Only indices go through grain, a batch at a time; the tokens of a batch are read in one call.
        dataset = (
            grain.MapDataset.range(self.sequences)
            .shuffle(seed=shuffle_seed)
            .batch(global_batch, drop_remainder=True)
            .repeat()
            .map(read)
        )
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch_batches)
        self._batches = iter(dataset.to_iter_dataset(options))
        self._step = 0
        self._seek(start_step)
        _log.info(
            "%s: %d sequences, %d batches an epoch, %d sequences left out of each epoch",
            token_file.path, self.sequences, self.batches_per_epoch, self.unused_per_epoch,
        )  # fmt: skip

    @property
    def step(self) -> int:
        """Number of batches handed out since the first of the sequence."""
        return self._step

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        return self._step // self.batches_per_epoch

    def __next__(self) -> Batch:
        try:
            batch = next(self._batches)
        except BaseException:
            # Ctrl-C or a read error may strike after grain took the batch from its queue and before it
            # counted it: go back, so that the position is again that of the last batch handed out.
            self._seek(self._step)
            raise
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch handed out (not the last read ahead), as plain JSON."""
        return {"step": self._step, "data": dict(self._identity)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the batch at which `state` was taken, in this or another process.

        Workers, processes, threads and prefetching may differ; data, length, global batch and seed must not.
        """
        step, saved = state.get("step"), state.get("data")
        if not isinstance(step, int) or step < 0 or not isinstance(saved, dict):
            raise ValueError(
                f"a data position has a step >= 0, got {step!r}, and its data, got {saved!r}. Pass what get_state returned."
            )
        if saved != self._identity:
            names = sorted(saved.keys() | self._identity.keys())
            changed = [
                f"{name} was {saved.get(name)!r}, is {self._identity.get(name)!r}"
                for name in names
                if saved.get(name) != self._identity.get(name)
            ]
            raise ValueError(
                "a data position is valid only for the data and settings it was saved with; "
                f"{'; '.join(changed)}. Resume with the saved settings, or start a new run."
            )
        self._seek(step)

    def _seek(self, step: int) -> None:
        self._batches.set_state({"next_index": step})
        self._step = step

    def close(self) -> None:
        """Ends the threads; the loader cannot be read afterwards."""
        self._batches.close()

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def eval_batches(
    token_file: TokenFile,
    global_batch: int,
    length: int,
    max_batches: int | None = None,
    *,
    num_workers: int = 1,
    vocab_size: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> "EvalBatches":
    """Returns the fixed batches of an evaluation, the same ones each time it is iterated over.

    A batch is `{"tokens": int32 (global_batch, length + 1), "weight": float32 (global_batch, length)}`;
    `weight` is 1 for each target to be counted and 0 for padding. Without `max_batches` every token but the
    first is a target exactly once, the tail included: the weights sum to N - 1. With it, that many full
    batches are spread evenly over the file.
    """
    rows = _own_rows(global_batch, length, num_workers, process_index, process_count)
    _check_vocab(token_file, vocab_size)
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"max_batches must be >= 1, got {max_batches}. Leave it out to use the whole file.")
    if len(token_file) < 2:
        raise ValueError(
            f"evaluation needs at least 2 tokens (one to read, one to predict), got {len(token_file)} in "
            f"{token_file.path}. Use more held-out text."
        )
    return EvalBatches(token_file, global_batch, length, max_batches, rows)


@dataclasses.dataclass(frozen=True)
class EvalBatches:
    """The batches of `eval_batches`; iterate as often as needed."""

    token_file: TokenFile
    global_batch: int
    length: int
    max_batches: int | None
    rows: slice

    def _starts(self) -> NDArray[np.int64]:
        windows = -(-(len(self.token_file) - 1) // self.length)  # The last one may be short.
        chosen = windows
        if self.max_batches is not None:
            chosen = min(windows, self.max_batches * self.global_batch)
        return np.arange(chosen, dtype=np.int64) * windows // chosen * self.length

    def __len__(self) -> int:
        return -(-len(self._starts()) // self.global_batch)

    def __iter__(self) -> Iterator[Batch]:
        starts = self._starts()
        for first in range(0, len(starts), self.global_batch):
            own = starts[first : first + self.global_batch][self.rows]
            size = self.rows.stop - self.rows.start
            tokens = np.zeros((size, self.length + 1), np.int32)
            weight = np.zeros((size, self.length), np.float32)
            targets = np.minimum(self.length, len(self.token_file) - 1 - own)
            for count in np.unique(
                targets
            ):  # One group of full windows, and at most one of a single short one.
                which = np.flatnonzero(targets == count)
                tokens[which, : count + 1] = self.token_file.read_windows(own[which], int(count) + 1)
                weight[which, :count] = 1
            yield {"tokens": tokens, "weight": weight}


def _own_rows(
    global_batch: int, length: int, num_workers: int, process_index: int, process_count: int
) -> slice:
    """Returns the rows of a global batch that this process reads."""
    if min(global_batch, length, num_workers, process_count) < 1:
        raise ValueError(
            f"global_batch, length, num_workers and process_count must be >= 1, got {global_batch}, "
            f"{length}, {num_workers} and {process_count}. Use 1 or more of each."
        )
    if global_batch % num_workers:
        raise ValueError(
            f"global_batch must be a multiple of the number of workers, got {global_batch} sequences for "
            f"{num_workers} workers. Use {max(1, global_batch // num_workers) * num_workers}."
        )
    if num_workers % process_count:
        raise ValueError(
            f"the number of workers must be a multiple of the number of processes, got {num_workers} "
            f"workers in {process_count} processes. Give every process the same number of workers."
        )
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index must be in [0, {process_count}), got {process_index}. Pass jax.process_index()."
        )
    size = global_batch // process_count
    return slice(process_index * size, (process_index + 1) * size)


def _check_vocab(token_file: TokenFile, vocab_size: int | None) -> None:
    if vocab_size is not None and token_file.vocab_size > vocab_size:
        raise ValueError(
            f"the model's vocabulary must cover that of the tokens, got {vocab_size} ids in the model and "
            f"{token_file.vocab_size} in {token_file.path} (tokenizer {token_file.tokenizer_name!r}). "
            "Use a model with at least that vocabulary, or tokens made for this model."
        )
