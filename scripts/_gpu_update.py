"""Time of a whole optimizer update on one device: SCAPE on an axis of size 1 against optax.adamw (scripts/gpu_check.py)."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import scape_jax

BASE = "optax.adamw"
DENSITIES = (0.1, 0.01)
FEW = ("layers/mlp/up/kernel", "final_norm/scale")
# Updates between two looks at the clock, so that their dispatch hides behind the one before.
IN_A_ROW = 5
# Entries read and written for each parameter, 4 bytes each: adamw g, m, v, p and m, v, p; SCAPE g, h, p and h, p. A worker
# alone also selects in all rows, for which h and g are read once more: at the same bandwidth at least 28 bytes.
FLOOR_BYTES = {BASE: 28, "optax.clip + adamw": 32}
SCAPE_FLOOR_BYTES = 20

Row = dict[str, Any]


def llama500m(parameters: int, few: bool = False) -> dict[str, tuple[int, ...]]:
    """The leaves of models.preset("llama500m"), 513.6 M parameters, or of the largest model of its form that is not larger.

    Width, layers and vocabulary shrink together, in sixteenths; the smallest one is taken where nothing fits. few: only
    two of its leaves, since compiling is what takes time on a CPU.
    """
    for part in range(16, 0, -1):
        shapes = _shapes(width=1536 * part // 16, layers=part, vocab=32000 * part // 16)
        if sum(int(np.prod(shape)) for shape in shapes.values()) <= parameters:
            break
    return {name: shapes[name] for name in FEW} if few else shapes


def _shapes(width: int, layers: int, vocab: int) -> dict[str, tuple[int, ...]]:
    wide = width * 8 // 3
    return {
        "embed/embedding": (vocab, width),
        "final_norm/scale": (width,),
        "head/kernel": (width, vocab),
        "layers/attention/key/kernel": (layers, width, width // 2),
        "layers/attention/out/kernel": (layers, width, width),
        "layers/attention/query/kernel": (layers, width, width),
        "layers/attention/value/kernel": (layers, width, width // 2),
        "layers/attention_norm/scale": (layers, width),
        "layers/mlp/down/kernel": (layers, wide, width),
        "layers/mlp/gate/kernel": (layers, width, wide),
        "layers/mlp/up/kernel": (layers, width, wide),
        "layers/mlp_norm/scale": (layers, width),
    }


def normal(shapes: dict[str, tuple[int, ...]], seed: int, std: float) -> dict[str, jax.Array]:
    @jax.jit
    def make(key):
        keys = jax.random.split(key, len(shapes))
        return {n: std * jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}

    return make(jax.random.key(seed))


class Updater:
    """One optimizer with parameters and state of its own, which every update replaces in place."""

    def __init__(self, tx: Any, params: Any, grads: list[Any]):
        self.grads, self.count = grads, 0
        self.params = jax.tree.map(jnp.copy, params)
        if getattr(tx, "apply", None) is None:
            self.state = jax.jit(tx.init)(params)

            def update(params, state, grads, **_):
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            self.run = jax.jit(update, donate_argnums=(0, 1))
            self.take(2)
            return
        mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))

        def over(function, into, out, donate=()):
            mapped = jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out, check_vma=False)
            return jax.jit(mapped, donate_argnums=donate)

        def step(params, state, grads):
            return tx.apply(grads, state, params, level=tx.final_level)

        specs = scape_jax.state_specs(jax.eval_shape(over(tx.init, (P(),), P()), params), axis_name="data")
        self.state = over(tx.init, (P(),), specs)(params)
        # The program that a run uses after its first step, which is dense. Masks are empty at first and full from the
        # second step on.
        self.run = over(step, (P(), specs, P()), (P(), specs), donate=(0, 1))
        self.take(3)

    def take(self, times: int) -> float:
        """Seconds of one update."""
        start = time.perf_counter()
        for _ in range(times):
            grads = self.grads[self.count % len(self.grads)]
            self.params, self.state = self.run(self.params, self.state, grads)
            self.count += 1
        jax.block_until_ready((self.params, self.state))
        return (time.perf_counter() - start) / times


def methods(implementation: str, few: bool = False) -> dict[str, Callable[[], Any]]:
    """Name -> optimizer; the first is what the others are compared with. few: without the variants."""
    settings: dict[str, Any] = {"weight_decay": 0.1, "clip_norm": 1.0}
    adamw = lambda: optax.adamw(1e-3, weight_decay=0.1)  # noqa: E731
    kind: dict[str, Any] = {} if implementation == "default" else {"implementation": implementation}
    found: dict[str, Callable[[], Any]] = {BASE: adamw}
    if not kind:
        found["optax.clip + adamw"] = lambda: optax.chain(optax.clip_by_global_norm(1.0), adamw())
    scape = functools.partial(scape_jax.scape, 1e-3, axis_name="data", **settings, **kind)
    for density in DENSITIES:
        name = f"scape d={density}" + (f", {implementation}" if kind else "")
        found[name] = functools.partial(scape, density)
        if not kind and not few:  # one read of the gradient less
            found[f"{name}, finite_check=kept"] = functools.partial(scape, density, finite_check="kept")
    return found


def time_updates(
    implementation: str, parameters: int, repeats: int, over: Callable[[], bool], few: bool = False
) -> Iterator[Row]:
    """Methods take turns, and each ratio is that of neighbouring runs.

    Args:
      implementation: of SCAPE, or "default".
      parameters: about how many.
      repeats: timed turns of each method, IN_A_ROW updates each.
      over: whether the time is over; ends after three turns at the earliest.
      few: leaves and methods.
    """
    shapes = llama500m(parameters, few)
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    params, grads = normal(shapes, 0, 0.02), [normal(shapes, seed, 1e-3) for seed in (1, 2)]
    updaters: dict[str, Updater] = {}
    for name, make in methods(implementation, few).items():
        row, start = {"method": name, "params": size}, time.perf_counter()
        try:
            updaters[name] = Updater(make(), params, grads)
            yield row | {"status": "compiled", "secs": round(time.perf_counter() - start, 1)}
        except Exception as error:  # the others must be timed nevertheless
            yield row | {"status": "error", "detail": f"{type(error).__name__}: {error}"[:600]}
    del params
    secs: dict[str, list[float]] = {name: [] for name in updaters}
    for i in range(repeats):
        if i >= 3 and over():
            break
        for name, updater in updaters.items():
            secs[name].append(updater.take(IN_A_ROW))
    for name, times in secs.items():
        ratio = np.array(times) / np.array(secs.get(BASE, times))
        floor = FLOOR_BYTES.get(name, SCAPE_FLOOR_BYTES)
        yield {
            "method": name,
            "params": size,
            "status": "timed",
            "median_ms": float(np.median(times) * 1e3),
            "ratio_median": float(np.median(ratio)) if BASE in secs else None,
            "ratio_min": float(ratio.min()) if BASE in secs else None,
            "ratio_max": float(ratio.max()) if BASE in secs else None,
            "floor_bytes_per_param": floor,
            "floor_gb_per_sec": floor * size / float(np.median(times)) / 1e9,
            "repeats": len(times),
        }
