"""AdamS and SCAPE for optax: sparse data-parallel training with one small all-reduce a step (arXiv 2607.01678)."""

from scape_jax._adams import ScaleByAdamSState, adams_rule, scale_by_adams
from scape_jax._baselines import (
    AllReduceState,
    TopKState,
    adams,
    adamw,
    all_reduce_gradients,
    topk,
    topk_gradients,
)
from scape_jax._chain import Optimizer
from scape_jax._elastic import resize_workers
from scape_jax._exchange import StepStats
from scape_jax._options import STATIC_ARGS
from scape_jax._preflight import check_equal_on_workers
from scape_jax._scape import ScaleByScapeState, scale_by_scape, scape
from scape_jax._telemetry import telemetry
from scape_jax._train_step import TrainStep, make_train_step, state_specs
from scape_jax._wire import WireBytes, collective_operand_bytes, wire_bytes
from scape_jax._worker_step import loss_and_grads

__all__ = [
    "STATIC_ARGS",
    "AllReduceState",
    "Optimizer",
    "ScaleByAdamSState",
    "ScaleByScapeState",
    "StepStats",
    "TopKState",
    "TrainStep",
    "WireBytes",
    "adams",
    "adams_rule",
    "adamw",
    "all_reduce_gradients",
    "check_equal_on_workers",
    "collective_operand_bytes",
    "loss_and_grads",
    "make_train_step",
    "resize_workers",
    "scale_by_adams",
    "scale_by_scape",
    "scape",
    "state_specs",
    "telemetry",
    "topk",
    "topk_gradients",
    "wire_bytes",
]
