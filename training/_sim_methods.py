"""The methods that the model of step time knows, and what each exchanges, by the libraries' own closed forms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gasloc_jax
import scape_jax
from gasloc_jax._fragments import Fragments
from training._problems import did_you_mean


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train together.

    Attributes:
      name: as in tables.
      make: gives an optimizer of scape_jax, which exchanges in every step, or an outer one of gasloc_jax.
      fragments: of a round.
    """

    name: str
    make: Callable[[], Any] = dataclasses.field(repr=False)
    fragments: int = 1

    @functools.cached_property
    def optimizer(self) -> Any:
        return self.make()

    @property
    def in_rounds(self) -> bool:
        return isinstance(self.optimizer, gasloc_jax.OuterOptimizer)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What a worker sends in a step or round.

    Attributes:
      sent_bytes: the closed form, of the busiest worker.
      reduced_bytes: put into the all-reduce of a step.
      gathered_bytes: put into the all-gather that may run beside the compute, of masks.
      late_bytes: put into an all-gather after the all-reduce: what top-k kept.
      pool: the graphs of the rounds; None: a step.
      halves: an all-reduce as an all-to-all and an all-gather, as narrow payloads travel.
    """

    sent_bytes: int
    reduced_bytes: int = 0
    gathered_bytes: int = 0
    late_bytes: int = 0
    pool: gasloc_jax.Pool | None = None
    halves: bool = False


ROUNDS = 16  # simulated where nothing else is asked for


def exchange_of(method: Method, params: Any, workers: int) -> Exchange:
    """What `method` sends among W workers; `params` are parameters or their ShapeDtypeStructs, nothing is run."""
    optimizer = method.optimizer
    if not method.in_rounds:
        wire = optimizer.wire(params, num_workers=workers, step=None)
        gathers = (wire.all_gather_operand, 0) if wire.mask_bytes else (0, wire.all_gather_operand)
        return Exchange(wire.total_bytes, wire.all_reduce_operand, *gathers)
    part = params
    if method.fragments > 1:
        fragments = Fragments(method.fragments)
        fragments.check(params)
        part = jax.eval_shape(fragments.take, params, jax.ShapeDtypeStruct((), jnp.int32))
    return Exchange(
        optimizer.bytes_per_round(part, workers),
        pool=optimizer.pool(workers),
        halves=not optimizer.mixer.payload.lossless,
    )


def scape_method(name: str, density: float, **options: Any) -> Method:
    """SCAPE at a density; `options` are those of `scape_jax.scape`."""
    return Method(name, lambda: scape_jax.scape(1e-3, density, axis_name="data", **options))


def _gasloc(topology: Callable[[], gasloc_jax.Topology], payload_dtype: Any = None) -> Callable[[], Any]:
    chain = lambda: optax.sgd(0.7, momentum=0.9, nesterov=True)  # noqa: E731
    return lambda: gasloc_jax.gasloc(chain(), topology(), "worker", payload_dtype=payload_dtype)


def _all() -> tuple[Method, ...]:
    found = [
        Method("adamw", lambda: scape_jax.adamw(1e-3, axis_name="data")),
        Method("adams", lambda: scape_jax.adams(1e-3, axis_name="data")),
        Method("adams_bf16", lambda: scape_jax.adams(1e-3, axis_name="data", payload_dtype=jnp.bfloat16)),
    ]
    for density in (0.1, 0.01):
        for codec in ("bitmap", "index"):
            found.append(scape_method(f"scape_d{density:g}_{codec}", density, codec=codec))
        found.append(scape_method(f"scape_d{density:g}_bf16", density, payload_dtype=jnp.bfloat16))
    found.append(Method("diloco", lambda: gasloc_jax.diloco(axis_name="worker")))
    for peers, topology in ((1, gasloc_jax.random_pairs), (2, gasloc_jax.random_ring)):
        for suffix, dtype in (("", None), ("_bf16", jnp.bfloat16), ("_int8", jnp.int8)):
            found.append(Method(f"gasloc_{peers}peer{suffix}", _gasloc(topology, dtype)))
    found.append(Method("gasloc_1peer_fragments4", _gasloc(gasloc_jax.random_pairs), 4))
    return tuple(found)


METHODS: dict[str, Method] = {method.name: method for method in _all()}


def method_of(method: str | Method) -> Method:
    """A method by name.

    Raises:
      ValueError: there is none of that name; it tells the nearest.
    """
    if isinstance(method, Method):
        return method
    if method not in METHODS:
        raise ValueError(
            f"method must be one of {', '.join(METHODS)}, got {method!r}.{did_you_mean(method, tuple(METHODS))}"
        )
    return METHODS[method]
