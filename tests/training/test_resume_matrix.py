"""2n steps are n steps, a checkpoint, and n steps more, bit for bit, for every kind of state that a run has (case 15).

test_train.py and test_rounds.py have it of a transformer, in a new process, and with the data's position dropped.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import models
from tests import helpers
from tests.training.runs_for_tests import long, tiny, write_corpus
from training._leaves import by_path, like
from training.checkpoint import Checkpoints
from training.train import build, restore, save, start

SCAPE = {"mesh.data": 2, "optimizer.dense": ["norm", "embed"], "schedule.learning_rate": 1e-2}
ROUNDS = {
    "outer.name": "gasloc", "outer.local_steps": 2, "outer.measure": False, "mesh.worker": 4, "mesh.data": 1,
    "optimizer.name": "adams", "schedule.learning_rate": 1e-2,
}  # fmt: skip
INT8 = {"outer.payload_dtype": "int8", "outer.fragments": 2, "outer.delay": 1}
ISLANDS = {**ROUNDS, **SCAPE, "optimizer.name": "scape", "mesh.worker": 2}

# Settings, n, and the buffers without which the run goes on differently.
CASES = {
    "bitmap": (
        {**SCAPE, "optimizer.codec": "bitmap", "optimizer.staleness_power": 1.0},
        2,
        ["unsent", "next_mask", "age"],
    ),
    "bfloat16": ({**SCAPE, "optimizer.payload_dtype": "bfloat16"}, 2, ["unsent"]),
    "density warm-up": ({**SCAPE, "optimizer.density_warmup_fraction": 0.7}, 3, ["unsent", "count"]),
    "micro-batches": ({**SCAPE, "data.accumulate": 2}, 2, ["h"]),
    "old mask": ({**SCAPE, "optimizer.mask_every": 2}, 3, ["unsent", "mask"]),
    "top-k": ({**SCAPE, "optimizer.name": "topk_adamw"}, 2, ["residual"]),
    "gasloc": (ROUNDS, 6, ["trace", "m", "round"]),
    "fragments in flight": ({**ROUNDS, **INT8}, 4, ["residual", "anchor"]),
    "islands": (ISLANDS, 4, ["trace", "h"]),
    "diloco": ({**ROUNDS, "outer.name": "diloco"}, 4, ["trace"]),
}


@pytest.fixture(autouse=True, scope="module")
def three_leaves():
    """A model of three leaves in place of the transformer, each of whose twelve takes time to compile in every case."""

    def init_params(model, seed=0):
        keys = jax.random.split(jax.random.key(seed))
        return {
            "embed": 0.1 * jax.random.normal(keys[0], (model.vocab_size, 16)),
            "layers": {"kernel": 0.1 * jax.random.normal(keys[1], (2, 16, 16))},
            "norm": jnp.ones(16),
        }

    def loss(params, batch):
        x = params["embed"][batch["tokens"][:, :-1]]
        for kernel in params["layers"]["kernel"]:
            x += jnp.tanh(x @ kernel)
        logits = (x * jnp.broadcast_to(params["norm"], x.shape)) @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "init_params", init_params)
        patch.setattr(models, "abstract_params", lambda model: jax.eval_shape(lambda: init_params(model)))
        patch.setattr(models, "loss_fn", lambda model: loss)
        yield


def advance(setup, state, steps):
    """Takes so many steps, whole rounds of them, as the trainer does; returns the losses that it would log."""
    losses, end = [], state.step + steps
    while state.step < end:
        ahead = setup.method.steps_ahead(state.step)
        batch = setup.method.read(state.loader, ahead)
        state.params, state.opt_state, measured = setup.method.advance(
            state.params, state.opt_state, batch, ahead
        )
        losses += [float(found["loss"]) for found in setup.method.collect([measured])]
        state.step += ahead
    return losses


def without(opt_state, buffer):
    """With zeros in a buffer, as in a fresh state; "unsent" is what is off SCAPE's mask."""
    leaves = by_path(opt_state)
    if buffer == "unsent":
        words = leaves["mask/layers/kernel"]
        kept = np.unpackbits(np.asarray(words).view(np.uint8), bitorder="little").reshape(2, 16, 16)
        lost = {"h/layers/kernel": kept}
    else:
        lost = {path: 0 for path in leaves if buffer in path.split("/")}
    assert lost, f"no {buffer} in {list(leaves)}"
    changed = {path: (leaves[path] * kept).astype(leaves[path].dtype) for path, kept in lost.items()}
    return like(opt_state, leaves | changed)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=long) if c in ("bfloat16", "top-k", "diloco") else c for c in CASES]
)
def test_resume_is_bit_exact_and_needs_every_buffer(case, corpus, tmp_path):
    changes, n, buffers = CASES[case]
    setup = build(tiny(corpus, **changes, **{"run.steps": 2 * n}))
    whole = start(setup)
    with Checkpoints(tmp_path) as checkpoints:
        advance(setup, whole, n)
        save(setup, whole, checkpoints)
        losses, position = advance(setup, whole, n), whole.loader.get_state()
        checkpoints.wait()
        state = restore(setup, checkpoints)
    halfway = state.loader.get_state()
    params, opt_state = jax.device_get((state.params, state.opt_state))
    shardings = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))

    def resumed(opt_state):
        state.step = n
        state.loader.set_state(halfway)
        setup.method.set_state(setup.method.get_state())  # as a start does: nothing is known of rounds before
        state.params, state.opt_state = jax.device_put((params, opt_state), shardings)
        return advance(setup, state, n)

    assert state.step == n and resumed(opt_state) == losses
    assert state.loader.get_state() == position
    helpers.assert_bit_equal((state.params, state.opt_state), (whole.params, whole.opt_state))
    for buffer in buffers:
        lossy = resumed(without(opt_state, buffer))
        with pytest.raises(AssertionError):
            helpers.assert_bit_equal((lossy, state.params), (losses, whole.params))
    assert resumed(opt_state) == losses  # so it was the buffer that made the difference
    for one in (state, whole):
        one.loader.close()
