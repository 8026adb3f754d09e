"""How long a step or round will take, before it is run: any method, number of workers, links and machines.

    from training import simulate
    network = simulate.Network(upload_bits=1e8)
    machine = simulate.Machine(forward_secs=0.1, backward_secs=0.2, update_secs=0.01)
    found = simulate.predict("scape_d0.01_index", params, 64, network, machine)

Every message is followed over its sender's and its receiver's link (_sim_links.py, _sim_collectives.py), workers that
differ are followed one by one, and who waits for whom comes out (_sim_run.py). Bytes are the libraries' closed forms
(_sim_methods.py). `compare` holds all this against measured cells; scripts/plan.py prints it before a run.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from training._links import MTU_BYTES
from training._sim_links import Links, Machine, Network, tcp_share
from training._sim_methods import METHODS, ROUNDS, Exchange, Method, exchange_of, method_of
from training._sim_run import Run, Segment, run_rounds, run_steps

__all__ = [
    "METHODS",
    "SOCKETS",
    "Comparison",
    "Exchange",
    "Links",
    "Machine",
    "Method",
    "Network",
    "Prediction",
    "Run",
    "Segment",
    "compare",
    "exchange_of",
    "predict",
    "simulate",
    "tcp_share",
]

_STEPS = 3  # simulated, as ROUNDS are; the first tells how long the start takes, the others the long run


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one inner step, in a method of rounds its share of a round; seconds, means over the workers.

    Attributes:
      method: its name.
      workers: W.
      local_steps: inner steps between two exchanges, the mean over the workers.
      compute_secs: forward and backward.
      exposed_secs: communication and waiting that nothing hides.
      update_secs: optimizer, in a method of rounds also the outer one.
      sent_bytes: by a worker, the closed form.
      idle_share: float64 (W,), of each worker's time: neither computing nor moving its bytes as fast as its own links could.
    """

    method: str
    workers: int
    local_steps: float
    compute_secs: float
    exposed_secs: float
    update_secs: float
    sent_bytes: float
    idle_share: np.ndarray = dataclasses.field(repr=False, compare=False)

    @property
    def step_secs(self) -> float:
        return self.compute_secs + self.exposed_secs + self.update_secs


def simulate(
    method: str | Method,
    params: Any,
    workers: int,
    network: Network,
    machine: Machine,
    *,
    local_steps: int | Sequence[int] = 10,
    delay: int = 0,
    repeats: int | None = None,
    record: bool = False,
) -> Run:
    """Steps or rounds of a method, from a start of all workers at once.

    Args:
      method: a name in `METHODS`, or a Method of your own.
      params: parameters or their ShapeDtypeStructs.
      workers: W.
      network, machine: of all workers, or with a tuple of W numbers of each.
      local_steps: H of a method of rounds, or H_i of each worker.
      delay: D of a method of rounds: the exchange runs beside the next round's first D steps.
      repeats: steps or rounds to simulate; None: 3 steps or 16 rounds.
      record: also note who did what when, for a picture.

    Returns:
      A Run.

    Raises:
      ValueError: an unknown method, or a number that does not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from training.simulate import Machine, Network, simulate
      >>> params = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
      >>> run = simulate("adams", params, 4, Network(upload_bits=1e8), Machine(backward_secs=0.1))
      >>> round(run.secs, 3)  # 0.1 s and 1.5 * 32 Mbit
      0.58
    """
    method = method_of(method)
    exchange = exchange_of(method, params, _checked(workers))
    return _run(method, exchange, workers, network, machine, local_steps, delay, repeats, record)


def _checked(workers: int) -> int:
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers must be a whole number >= 1, got {workers!r}. One worker sends nothing.")
    return workers


def _run(
    method: Method,
    exchange: Exchange,
    workers: int,
    network: Network,
    machine: Machine,
    local_steps: int | Sequence[int],
    delay: int,
    repeats: int | None = None,
    record: bool = False,
) -> Run:
    repeats = (ROUNDS if method.in_rounds else _STEPS) if repeats is None else repeats
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}. None takes enough for the long run.")
    links = Links(network, workers, machine)
    if not method.in_rounds:
        if delay:
            raise ValueError(
                f"delay must be 0 for {method.name}, which exchanges in every step, got {delay}."
            )
        return run_steps(links, machine, exchange, repeats, record=record)
    steps = [local_steps] * workers if isinstance(local_steps, int) else list(local_steps)
    if len(steps) != workers or min(steps) < 1:
        raise ValueError(
            f"local_steps must be a whole number >= 1, or one for each of {workers} workers, got {local_steps}. 10 to 30 "
            "are usual."
        )
    if not 0 <= delay < min(steps):
        raise ValueError(f"delay must be in [0, fewest local steps = {min(steps)}), got {delay}. 0: at once.")
    return run_rounds(links, machine, exchange, steps, repeats, delay=delay, record=record)


def predict(
    method: str | Method,
    params: Any,
    workers: int,
    network: Network,
    machine: Machine,
    *,
    local_steps: int | Sequence[int] = 10,
    delay: int = 0,
) -> Prediction:
    """Seconds and bytes of a step in the long run; arguments and errors of `simulate`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from training.simulate import Machine, Network, predict
      >>> params = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
      >>> found = predict("gasloc_1peer", params, 4, Network(upload_bits=1e8), Machine(backward_secs=0.1), local_steps=4)
      >>> round(found.exposed_secs, 3), found.sent_bytes  # 32 Mbit in four steps
      (0.08, 1000000.0)
    """
    method = method_of(method)
    exchange = exchange_of(method, params, _checked(workers))
    run = _run(method, exchange, workers, network, machine, local_steps, delay)
    steps = float(np.mean(local_steps)) if method.in_rounds else 1.0
    steps_taken = len(run.ends) * steps
    compute, update = (float(x.mean()) / steps_taken for x in (run.compute_secs, run.update_secs))
    secs = run.secs / steps
    exposed = secs - compute - update
    if abs(exposed) < 1e-12 * secs:  # what rounding leaves of nothing
        exposed = 0.0
    sent = exchange.sent_bytes / steps
    return Prediction(method.name, workers, steps, compute, exposed, update, sent, run.idle_share)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One measured cell beside what was predicted for it; seconds of what the cell calls a step."""

    method: str
    bandwidth: float
    predicted_secs: float
    measured_secs: float

    @property
    def error(self) -> float:
        """Relative: positive where the prediction is too slow."""
        return self.predicted_secs / self.measured_secs - 1.0


_CELL = ("method", "bandwidth", "step_secs", "compute_secs", "update_secs", "bytes_per_step")
SOCKETS = Network(upload_bits=1.0, payload_fraction=tcp_share(MTU_BYTES))
WITHOUT_OVERLAP = Machine(overlap=False)


def compare(
    cells: Iterable[Mapping[str, Any]],
    params: Any,
    workers: int,
    *,
    network: Network = SOCKETS,
    machine: Machine = WITHOUT_OVERLAP,
) -> list[Comparison]:
    """Measured step times beside predicted ones. Compute and update are taken from the cell, communication is predicted.

    Args:
      cells: mappings with method (a name in `METHODS`), bandwidth (bit/s of every link), step_secs, compute_secs,
        update_secs and bytes_per_step; other keys are not looked at. A cell of a method of rounds may be of a round or of an
        inner step: its bytes tell.
      params: parameters of the measured model or their ShapeDtypeStructs.
      workers: W.
      network: all but the bandwidth. `SOCKETS`: gloo over the links of scripts/launch_local.py.
      machine: costs of messages, and whether masks are gathered beside the compute; its other numbers are the cell's.

    Raises:
      ValueError: a cell lacks a key, its number is none, or its bytes are no whole part of what the method sends.
    """
    rows = []
    for cell in cells:
        missing = [key for key in _CELL if key not in cell]
        if missing:
            raise ValueError(
                f"a cell must hold {', '.join(_CELL)}, lacks {', '.join(missing)}: {dict(cell)}."
            )
        for key in _CELL[1:]:
            if isinstance(cell[key], bool) or not isinstance(cell[key], numbers.Real):
                raise ValueError(f"{key} of a cell must be a number, got {cell[key]!r}: {dict(cell)}.")
        method = method_of(str(cell["method"]))
        sent, measured_bytes = exchange_of(method, params, workers).sent_bytes, float(cell["bytes_per_step"])
        if not (math.isfinite(cell["step_secs"]) and cell["step_secs"] > 0):
            raise ValueError(
                f"step_secs of a cell must be finite and > 0, got {cell['step_secs']}: {dict(cell)}."
            )
        units = sent / measured_bytes if measured_bytes > 0 else 1.0
        steps = round(units)  # of the cell's units in one exchange
        if steps < 1 or abs(units / steps - 1) > 0.1:
            raise ValueError(
                f"{method.name} sends {sent:,} bytes an exchange, which must be a whole number of the cell's "
                f"bytes_per_step, got {measured_bytes:,.0f}. Give the parameters and workers that were measured."
            )
        found = _secs_of_cell(cell, method, params, workers, steps, network, machine)
        rows.append(Comparison(method.name, float(cell["bandwidth"]), found, float(cell["step_secs"])))
    return rows


def _secs_of_cell(
    cell: Mapping[str, Any],
    method: Method,
    params: Any,
    workers: int,
    steps: int,
    network: Network,
    machine: Machine,
) -> float:
    """Predicted seconds of what the cell calls a step, `steps` of which come between two exchanges."""
    network = dataclasses.replace(network, upload_bits=float(cell["bandwidth"]), download_bits=None)
    machine = dataclasses.replace(
        machine,
        forward_secs=0.0,
        # The update is the difference of two measurements, which noise may make negative where it is short.
        backward_secs=float(cell["compute_secs"]) + min(0.0, float(cell["update_secs"])),
        update_secs=max(0.0, float(cell["update_secs"])),
        outer_secs=0.0,
    )
    return simulate(method, params, workers, network, machine, local_steps=steps).secs / steps
