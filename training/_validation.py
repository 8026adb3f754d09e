"""Validation within a run: the loss on held-out text, and the line that tells it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from training.data import EvalBatches, eval_batches
from training.evaluate import Evaluation, evaluate
from training.metrics import MetricsWriter, NoWriter
from training.progress import Progress, quantity

if TYPE_CHECKING:
    from training.train import Setup, State


def validate(
    setup: Setup, state: State, batches: int, should_stop: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """Loss on up to `batches` batches of held-out text (0: all of it); None if a signal came in between.

    In rounds it is that of the mean over workers, and their disagreement stands beside it.
    """
    method, own = setup.method, (jax.process_index(), jax.process_count())
    held_out = _held_out(setup, batches, *own)
    params = method.model(state.params, state.opt_state)
    result = evaluate(setup.model, params, held_out, setup.mesh, setup.batch_axes, should_stop=should_stop)
    if result is None:
        return None
    del params
    held_out = _held_out(setup, batches, 0, 1)
    found = method.disagreement(state.params, state.opt_state, held_out, should_stop)
    if found is None:
        return None
    return dataclasses.replace(result, disagreement=found)


def _held_out(setup: Setup, batches: int, process_index: int, process_count: int) -> EvalBatches:
    config = setup.config
    return eval_batches(
        setup.data.validation,
        config.data.global_batch // config.data.accumulate,
        config.data.length,
        batches or None,
        num_workers=config.mesh.devices,
        vocab_size=setup.model.vocab_size,
        process_index=process_index,
        process_count=process_count,
    )


def record_validation(
    setup: Setup,
    state: State,
    result: Evaluation | None,
    writer: MetricsWriter | NoWriter,
    progress: Progress,
) -> None:
    if result is None:  # a signal cut it short: half an average is not a result
        return
    record = {"step": state.step, "validation_loss": result.loss, "validation_perplexity": result.perplexity}
    if setup.data.validation.tokenizer_name == "byte":
        record["bits_per_byte"] = result.bits_per_token
    apart = result.disagreement
    writer.write({**record, **apart, **bytes_so_far(state)})
    told = f"step {state.step}  validation loss {result.loss:.4f} ({quantity(result.tokens)} tokens)"
    if apart:
        progress.consensus_distance = apart["consensus_distance"]
        told += " of the mean model"
        if "validation_loss_worker_min" in apart:
            lowest, highest = apart["validation_loss_worker_min"], apart["validation_loss_worker_max"]
            told += f", single workers {lowest:.4f} to {highest:.4f}"
        told += f", consensus distance {apart['consensus_distance']:.3g}"
    progress.note(told)


def bytes_so_far(state: State) -> dict[str, float]:
    """For a line of metrics.jsonl."""
    return {"bytes_sent_total": state.totals["bytes_sent"], "dense_bytes_total": state.totals["dense_bytes"]}
