"""Checkpoints: every bit back, refused where the run at hand is another one (cases 15 and 17)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests import helpers
from training import config as settings
from training._leaves import by_path, like
from training.checkpoint import Checkpoints


class Buffers(NamedTuple):
    count: jax.Array
    h: dict
    mask: jax.Array


def make_state(mesh, *, seed=0, width=8, layers=2):
    """A state like the trainer's: replicated parameters, one buffer per worker, packed masks, a count, a
    scalar key.
    """
    key = jax.random.key(seed)

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    workers = mesh.devices.size
    params = {
        "embedding": put(jax.random.normal(key, (5, width))),
        "layers": {"kernel": put(jax.random.normal(key, (layers, width, width)).astype(jnp.bfloat16))},
    }
    h = {"kernel": put(jax.random.normal(key, (workers, layers * width * width)), "data")}
    mask = put(jax.random.bits(key, (workers, 4)), "data")
    return params, (Buffers(put(jnp.int32(seed + 3)), h, mask), (), put(jnp.float32(jnp.nan)))


CONFIG = settings.preset("tiny")


def save(folder, step, params, opt_state, config=CONFIG, **options):
    with Checkpoints(folder, **options) as checkpoints:
        checkpoints.save(
            step, params, opt_state, config=config, data_state={"step": step}, totals={"secs": 0.1}
        )


def test_every_bit_and_sharding_comes_back(tmp_path):
    mesh = helpers.make_mesh(4)
    params, opt_state = make_state(mesh)
    save(tmp_path, 5, params, opt_state)
    other_params, other_state = make_state(mesh, seed=1)
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore(other_params, other_state, CONFIG)
    helpers.assert_bit_equal((found.params, found.opt_state), (params, opt_state))
    assert (found.step, found.data_state, found.totals) == (5, {"step": 5}, {"secs": 0.1})
    for got, want in zip(jax.tree.leaves(found.opt_state), jax.tree.leaves(opt_state), strict=True):
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    mesh = helpers.make_mesh(4)
    params, opt_state = make_state(mesh)
    kept = jax.tree.map(np.array, (params, opt_state))
    shardings = jax.tree.map(lambda x: x.sharding, (params, opt_state))
    overwrite = jax.jit(
        lambda t: jax.tree.map(lambda x: x * 0 + 1, t), donate_argnums=0, out_shardings=shardings
    )
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, params, opt_state, config=CONFIG, data_state={}, totals={})
        jax.block_until_ready(overwrite((params, opt_state)))
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore(*make_state(mesh, seed=1), CONFIG)
    helpers.assert_bit_equal((found.params, found.opt_state), kept)


def test_newest_are_kept_and_the_newest_is_taken(tmp_path):
    mesh = helpers.make_mesh(2)
    for step in (1, 2, 3):
        save(tmp_path, step, *make_state(mesh, seed=step), keep=2)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps[-1] == 3
        assert int(checkpoints.restore(*make_state(mesh), CONFIG).opt_state[0].count) == 6
        assert int(checkpoints.restore(*make_state(mesh), CONFIG, step=2).opt_state[0].count) == 5
        with pytest.raises(ValueError, match=r"no checkpoint of step 1 .* holds \[2, 3\]"):
            checkpoints.restore(*make_state(mesh), CONFIG, step=1)


def test_nothing_to_resume_from(tmp_path):
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match=r"needed, got none .* Name a run that has saved one"),
    ):
        checkpoints.restore(*make_state(helpers.make_mesh(2)), CONFIG)


def test_saving_a_step_twice_keeps_the_first(tmp_path):
    mesh = helpers.make_mesh(2)
    save(tmp_path, 1, *make_state(mesh, seed=1))
    save(tmp_path, 1, *make_state(mesh, seed=2))
    with Checkpoints(tmp_path) as checkpoints:
        assert int(checkpoints.restore(*make_state(mesh), CONFIG).opt_state[0].count) == 4


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            {"layers": 3},
            r"params, of another shape: layers/kernel bfloat16\[2, 8, 8\], must be bfloat16\[3, 8, 8\]",
        ),
        ({"layers": 1}, r"layers/kernel bfloat16\[2, 8, 8\], must be bfloat16\[1, 8, 8\]"),
        ({"width": 4}, r"embedding float32\[5, 8\], must be float32\[5, 4\]"),
    ],
)
def test_other_shapes_are_refused_with_both_settings(tmp_path, shape, message):
    mesh = helpers.make_mesh(2)
    save(tmp_path, 1, *make_state(mesh))
    other = settings.update(CONFIG, {"model.n_layers": 3, "model.width": 64})
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=message) as refused:
        checkpoints.restore(*make_state(mesh, **shape), other)
    for line in ("nothing was loaded", "model.n_layers: None -> 3", "model.width: None -> 64"):
        assert line in str(refused.value)


def test_other_leaves_are_refused_by_name(tmp_path):
    mesh = helpers.make_mesh(2)
    params, (buffers, empty, key) = make_state(mesh)
    save(tmp_path, 1, params, (buffers, empty, key))
    plain = {"mu": buffers.h, "count": buffers.count}
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match="nothing was loaded") as refused,
    ):
        checkpoints.restore(params, plain, CONFIG)
    assert "opt_state, missing from the checkpoint: count int32[]; mu/kernel" in str(refused.value)
    assert "opt_state, only in the checkpoint: 0/count int32[]; 0/h/kernel" in str(refused.value)


def test_long_lists_are_cut(tmp_path):
    mesh = helpers.make_mesh(2)
    params, opt_state = make_state(mesh)
    save(tmp_path, 1, params, opt_state)
    many = {**params, **{f"extra{i}": params["embedding"] for i in range(9)}}
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=r"extra3 .*, and 5 more"):
        checkpoints.restore(many, opt_state, CONFIG)


@pytest.mark.parametrize("key", ["optimizer.density", "optimizer.b1", "optimizer.mask_every"])
def test_settings_that_no_shape_shows_are_refused(tmp_path, key):
    mesh = helpers.make_mesh(2)
    save(tmp_path, 1, *make_state(mesh))
    value = 2 if key.endswith("every") else 0.5
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=rf"{key}: .* -> {value}"):
        checkpoints.restore(*make_state(mesh), settings.update(CONFIG, {key: value}))


def test_longer_run_is_allowed_but_not_in_the_middle_of_density_warmup(tmp_path):
    mesh = helpers.make_mesh(2)
    warming = settings.update(CONFIG, {"optimizer.density_warmup_fraction": 0.5})  # 10 of 20 steps
    save(tmp_path, 15, *make_state(mesh), config=warming)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.restore(*make_state(mesh), settings.update(warming, {"run.steps": 24}))
        with pytest.raises(ValueError, match="density warm-up: 10 -> 20, not over at step 15"):
            checkpoints.restore(*make_state(mesh), settings.update(warming, {"run.steps": 40}))


def test_parameters_alone_for_another_optimizer(tmp_path):
    mesh = helpers.make_mesh(4)
    params, opt_state = make_state(mesh)
    save(tmp_path, 1, params, opt_state)
    other = settings.update(CONFIG, {"optimizer.name": "adamw", "mesh.data": 2})
    smaller = helpers.make_mesh(2)
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore_params(make_state(smaller, seed=1)[0], other)
        with pytest.raises(ValueError, match="params, of another shape"):
            checkpoints.restore_params(make_state(smaller, width=4)[0], other)
    helpers.assert_bit_equal(found, params)
    assert all(leaf.sharding.mesh == smaller for leaf in jax.tree.leaves(found))


def test_damaged_checkpoint_is_one_clear_error(tmp_path):
    """A file overwritten in the middle: the error names the folder and the checkpoint to go on from."""
    params, opt_state = make_state(helpers.make_mesh(4))
    save(tmp_path, 5, params, opt_state)
    save(tmp_path, 10, params, opt_state)
    for file in (tmp_path / "checkpoints" / "10" / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(b"damaged" * (1 + file.stat().st_size // 7))
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match=r"checkpoints/10 must be whole.*go on from step 5"),
    ):
        checkpoints.restore(params, opt_state, CONFIG)


def test_paths_are_readable_and_reversible():
    tree = (Buffers(1, {"a": {"b": 2}}, 3), [4])
    assert by_path(tree) == {"0/count": 1, "0/h/a/b": 2, "0/mask": 3, "1/0": 4}
    assert like(tree, {k: v * 10 for k, v in by_path(tree).items()}) == (
        Buffers(10, {"a": {"b": 20}}, 30),
        [40],
    )
