"""Before a run: the expected step of its method beside the alternatives, which to take, and how they scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

import models
from training._sim_hardware import Device, flops_per_token, update_secs
from training._sim_links import Machine, Network
from training._sim_methods import METHODS, Method, scape_method
from training.config import Config
from training.optimizers import make_optimizer
from training.outer import make_outer
from training.simulate import Prediction, predict

DENSE = METHODS["adams"]  # what the others are compared with
TOLERATED = 0.1  # share of a step in exposed communication at which nothing is left to gain
MOST_WORKERS = 16384  # about 20 s for a plan; twice as many were seen to take three times as long
CURVES = ("adams", "adams_bf16", "scape_d0.1", "scape_d0.01", "gasloc_1peer", "diloco")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a run before it starts.

    Attributes:
      config: its settings; the mesh in them is not looked at.
      workers: W.
      network: between them.
      token_secs: seconds of a token in forward and backward of one worker.
      device: by which the update is estimated; None: `token_secs` holds the whole step.
      local_steps: H of the methods of rounds.
    """

    config: Config
    workers: int
    network: Network
    token_secs: float
    device: Device | None = None
    local_steps: int = 30

    def tokens(self, workers: int | None = None) -> float:
        """Of one worker's step."""
        return self.config.tokens_per_step / (workers or self.workers)

    def machine(self, optimizer: str, tokens: float) -> Machine:
        """A worker with that many tokens in a step."""
        secs, parameters = tokens * self.token_secs, models.num_params(self.config.model.build())
        update = outer = 0.0
        if self.device is not None:
            update, outer = (update_secs(self.device, name, parameters) for name in (optimizer, "outer"))
        return Machine(
            forward_secs=secs / 3, backward_secs=secs * 2 / 3, update_secs=update, outer_secs=outer
        )

    def predict(self, method: Method, workers: int | None = None, tokens: float | None = None) -> Prediction:
        """Of a step with W workers and that many tokens on each; None: the plan's."""
        inner = "adamw" if method.in_rounds else method.name.partition("_")[0]
        return self._predict(method, inner, workers or self.workers, tokens)

    def predict_own(self) -> Prediction:
        """Of a step by the method that the settings name."""
        name = self.config.optimizer.name.removeprefix("topk_")
        return self._predict(configured(self.config), name, self.workers, None, self.config.outer.delay)

    def _predict(
        self, method: Method, inner: str, workers: int, tokens: float | None, delay: int = 0
    ) -> Prediction:
        machine = self.machine(inner, tokens or self.tokens(workers))
        params = models.abstract_params(self.config.model.build())
        return predict(
            method, params, workers, self.network, machine, local_steps=self.local_steps, delay=delay
        )

    def curve(
        self, methods: Sequence[Method], workers: Sequence[int], *, strong: bool
    ) -> Iterator[tuple[str, list[Prediction]]]:
        """(name, a prediction for each number of workers) of each method.

        strong: the global batch stays and is divided; else what one worker has in the plan stays for each.
        """
        for method in methods:
            yield method.name, [self.predict(method, w, None if strong else self.tokens()) for w in workers]


def secs_per_token(config: Config, device: Device, utilisation: float) -> float:
    """Of forward and backward on `device` at that share of its peak."""
    return flops_per_token(config.model.build(), config.data.length) / (utilisation * device.flops)


def configured(config: Config) -> Method:
    """The method that the settings name."""
    if config.outer.name != "none":
        return Method(f"config: {config.outer.name}", lambda: make_outer(config), config.outer.fragments)
    optimizer = config.optimizer
    density = f" d={optimizer.density:g}" if optimizer.is_sparse else ""
    return Method(
        f"config: {optimizer.name}{density}", lambda: make_optimizer(config, lambda step: 0.0, "data")
    )


def alternatives(densities: Sequence[float], layers: int = 4) -> list[Method]:
    """From the least to the most different from dense training: narrower numbers, fewer entries, fewer meetings.

    Four fragments need a model of four layers.
    """
    sparse: list[Method] = []
    for density in sorted(densities, reverse=True):
        sparse.append(scape_method(f"scape_d{density:g}", density))
        sparse.append(scape_method(f"scape_d{density:g}_bf16", density, payload_dtype=jnp.bfloat16))
    names = ("diloco", "gasloc_2peer", "gasloc_1peer", "gasloc_1peer_int8", "gasloc_1peer_fragments4")
    rounds = (METHODS[name] for name in names if METHODS[name].fragments <= layers)
    return [METHODS["adamw"], DENSE, METHODS["adams_bf16"], *sparse, *rounds]


def curve_methods() -> list[Method]:
    """Those of `CURVES`."""
    known = {method.name: method for method in alternatives((0.1, 0.01))}
    return [known[name] for name in CURVES]


def advice(rows: Sequence[Prediction]) -> tuple[Prediction, str]:
    """(the method to take, why) among rows from the least to the most different from dense training.

    The first whose exposed communication is a tenth of its step or less: what comes after it has little left to save, and
    moves training further from the dense one. Where there is none, the fastest.
    """
    dense = next(row for row in rows if row.method == DENSE.name)
    share = lambda row: row.exposed_secs / row.step_secs if row.step_secs else 0.0  # noqa: E731
    fastest = min(rows, key=lambda row: row.step_secs)
    among = rows[rows.index(dense) :]
    chosen = next((row for row in among if share(row) <= TOLERATED), None)
    told = f"communication is {share(dense):.0%} of the dense step"
    if chosen is dense:
        return dense, f"{told}: sparser or rarer exchanges have little to save"
    if chosen is None:
        return fastest, f"{told}, and with every method more than {TOLERATED:.0%}; this one is the fastest"
    left = chosen.step_secs / fastest.step_secs - 1
    return chosen, (
        f"{told} and {share(chosen):.0%} of this one's, the first in the table at {TOLERATED:.0%} or less; the fastest, "
        f"{fastest.method}, would save {left / (1 + left):.0%} more and is further from dense training"
        if fastest is not chosen
        else f"{told} and {share(chosen):.0%} of this one's, which is also the fastest"
    )


def as_dict(row: Prediction) -> dict[str, Any]:
    """Plain numbers for JSON."""
    found: dict[str, Any] = {
        key: value for key, value in dataclasses.asdict(row).items() if key != "idle_share"
    }
    return found | {"step_secs": row.step_secs}
