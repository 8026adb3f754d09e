"""JAX code and NumPy reference on the same gradients; masks and buffers read out of a state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scape_jax
from scape_jax import reference
from scape_jax._layout import leaf_layouts
from tests.helpers import TOLERANCES, make_mesh

BLOCK = 64

# Two sparse leaves (each costs a second to compile), both in rows of 64 with a short last row, no multiple of
# 32 long; the second has fewer rows than workers. The rest is dense: by rank, by name, by size.
SHAPES = {
    "embedding/table": (37, 19),
    "layer/bias": (70,),
    "layer/v": (3, 33),
    "norm/kernel": (4, 32),
    "small": (3, 5),
    "temperature": (),
}
# Whole rows: more than workers, fewer than workers, exactly one.
WHOLE_ROWS = {"a": (12, 64), "b": (5, 64), "c": (8, 8)}


def linear_loss(params: Any, batch: Any) -> jax.Array:
    """Its gradient is the mean of the batch's rows: a worker's gradient is fed as its part of the batch."""
    parts = jax.tree.map(lambda p, rows: jnp.sum(jnp.mean(rows, 0) * p), params, batch)
    return sum(jax.tree.leaves(parts))


def make_params(seed: int = 0, shapes: dict[str, tuple] = SHAPES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {path: rng.standard_normal(shape).astype(np.float32) for path, shape in shapes.items()}


def make_batches(rows: int, steps: int, seed: int = 1, shapes: dict[str, tuple] = SHAPES) -> list[dict]:
    """One batch a step; entries have very different sizes, so that masks overlap but are not constant.

    A worker's gradient with all of SHAPES has a norm of about 4.
    """
    rng = np.random.default_rng(seed)
    size = {path: np.exp(rng.standard_normal(shape)) / 30 for path, shape in shapes.items()}
    drift = {path: rng.standard_normal(shape) for path, shape in shapes.items()}
    draw = lambda path, shape: (drift[path] + rng.standard_normal((rows, *shape))) * size[path]  # noqa: E731
    return [{p: draw(p, shape).astype(np.float32) for p, shape in shapes.items()} for _ in range(steps)]


def worker_gradients(batch: dict, num_workers: int) -> list[dict]:
    """The float64 gradients that the workers get from a batch with `linear_loss`, for any accumulation."""
    mean = lambda x: x.astype(np.float64).reshape(num_workers, -1, *x.shape[1:]).mean(1)  # noqa: E731
    means = {path: mean(x) for path, x in batch.items()}
    return [{path: x[n] for path, x in means.items()} for n in range(num_workers)]


def make_step(tx: Any, num_workers: int, accumulate: int = 1) -> scape_jax.TrainStep:
    return scape_jax.make_train_step(linear_loss, tx, make_mesh(num_workers), accumulate=accumulate)


def one_program(tx: Any) -> Any:
    """Keeps the program that chooses the density by the step count, instead of compiling a second one."""
    tx.final_level = 0
    return tx


def on_host(tree: Any) -> Any:
    """A copy that donation cannot invalidate."""
    return jax.tree.map(lambda x: np.array(x), tree)


def run(step: scape_jax.TrainStep, params: dict, batches: list[dict]) -> list[tuple[dict, Any, dict]]:
    """(params, optimizer state, metrics) after every step."""
    opt_state = step.init(params)
    out = []
    for batch in batches:
        params, opt_state, metrics = step(params, opt_state, batch)
        out.append(on_host((params, opt_state, metrics)))
    return out


def state_of(opt_state: Any, kind: type) -> Any:
    """The state of that type inside an optax state."""
    found = [
        x for x in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind)) if isinstance(x, kind)
    ]
    assert len(found) == 1, f"{len(found)} states of type {kind.__name__}"
    return found[0]


def bits(words: np.ndarray, size: int) -> np.ndarray:
    """Packed uint32 words, lowest bit first -> bool (size,)."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")[:size].astype(bool)


def mask_in_use(state: scape_jax.ScaleByScapeState, params: dict) -> dict[str, np.ndarray]:
    """M of the last step, whole for dense leaves."""
    return {
        path: np.ones(p.shape, bool)
        if state.mask[path] is None
        else bits(state.mask[path], p.size).reshape(p.shape)
        for path, p in params.items()
    }


def next_mask(state: scape_jax.ScaleByScapeState, params: dict, num_workers: int, **layout: Any) -> dict:
    """The mask that the workers' own parts, put together, say for the next step."""
    arguments = {"density": 0.5, "block_size": BLOCK, "selection": "block", "dense": None} | layout
    layouts, _ = leaf_layouts(params, num_workers=num_workers, **arguments)
    out = {}
    for lay in layouts:
        own = state.next_mask[lay.path]
        whole = np.ones(lay.shape, bool)
        out[lay.path] = whole if own is None else bits(own.reshape(-1), lay.size).reshape(lay.shape)
    return out


def assert_near_ties(
    got: np.ndarray, want: np.ndarray, scores: list[np.ndarray], s: reference.Settings
) -> int:
    """Two masks of one leaf may differ only where an owner's scores tie to float32. Returns how many do."""
    got, want = got.reshape(-1), want.reshape(-1)
    rtol, atol = TOLERANCES["params"]
    for n, rows in enumerate(reference.owned_rows(got.size, s)):
        score = scores[n].reshape(-1)
        for row in rows:
            extra, missing = score[row][got[row] & ~want[row]], score[row][want[row] & ~got[row]]
            assert extra.size == missing.size, (
                f"row {row} of worker {n}: {extra.size} kept for {missing.size}"
            )
            if extra.size:
                gap = missing.max() - extra.min()
                assert gap <= atol + rtol * missing.max(), f"row {row} of worker {n}: no tie, gap {gap}"
    return int(np.sum(got & ~want))
