"""GASLoC for JAX: workers that meet now and then over random graphs, with any optax chain outside (arXiv 2606.11081)."""

from gasloc_jax._adapt import AdaptiveLocalSteps
from gasloc_jax._baselines import NoLoCoState, dadam, diloco, local_dadam, local_sgd, noloco
from gasloc_jax._fragments import layers_are_stacked
from gasloc_jax._gasloc import GaslocState, NesterovGossipState, gasloc, nesterov_gossip
from gasloc_jax._graphs import Graph, Pool
from gasloc_jax._inputs import make_mesh
from gasloc_jax._local_step import LocalStep, make_local_step
from gasloc_jax._make_round import make_round
from gasloc_jax._outer import STATIC_ARGS, OuterOptimizer
from gasloc_jax._payload import Payload, make_payload
from gasloc_jax._round import Round
from gasloc_jax._topology import (
    Topology,
    complete,
    exponential,
    mixing_matrix,
    random_pairs,
    random_ring,
    ring,
)
from gasloc_jax._worker_round import RoundState

__all__ = [
    "STATIC_ARGS",
    "AdaptiveLocalSteps",
    "GaslocState",
    "Graph",
    "LocalStep",
    "NesterovGossipState",
    "NoLoCoState",
    "OuterOptimizer",
    "Payload",
    "Pool",
    "Round",
    "RoundState",
    "Topology",
    "complete",
    "dadam",
    "diloco",
    "exponential",
    "gasloc",
    "layers_are_stacked",
    "local_dadam",
    "local_sgd",
    "make_local_step",
    "make_mesh",
    "make_payload",
    "make_round",
    "mixing_matrix",
    "nesterov_gossip",
    "noloco",
    "random_pairs",
    "random_ring",
    "ring",
]
