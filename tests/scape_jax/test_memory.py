"""Bytes of optimizer state, counted from the state's own arrays on each device."""

from typing import Any

import jax
import numpy as np
import pytest

import scape_jax
from tests.helpers import make_mesh
from tests.scape_jax.side_by_side import linear_loss

# 1 M parameters in whole blocks of 4096 for 8 workers, so that the formulas hold to the byte.
SHAPES = {"embedding": (256, 1024), "layer": {"kernel": (768, 1024)}}
P = 1024 * 1024
SCALARS = 4 + 4 * 4  # count; loss, gradient norm, clip factor, skipped


def state_bytes_per_device(tx: Any, num_workers: int) -> list[int]:
    params = jax.tree.map(
        lambda shape: np.zeros(shape, np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )
    state = scape_jax.make_train_step(linear_loss, tx, make_mesh(num_workers)).init(params)
    total: dict[Any, int] = {}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            total[shard.device] = total.get(shard.device, 0) + shard.data.nbytes
    assert len(total) == num_workers
    return list(total.values())


@pytest.mark.parametrize("density", [0.01, 0.1])
def test_one_worker_needs_4_bytes_and_2_bits_a_parameter(density: float) -> None:
    tx = scape_jax.scape(1e-3, density, axis_name="data")
    assert state_bytes_per_device(tx, 1) == [4 * P + 2 * P // 8 + SCALARS]


def test_without_an_axis_it_is_the_same() -> None:
    params = jax.tree.map(
        lambda shape: np.zeros(shape, np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )
    state = scape_jax.scape(1e-3, 0.1).init(params)
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == 4 * P + 2 * P // 8 + SCALARS


@pytest.mark.parametrize("options", [dict(), dict(density_warmup_steps=100, mask_every=4, codec="index")])
def test_eight_workers_share_the_mask_being_selected(options: dict) -> None:
    """4 bytes and 1 bit on each, and an eighth of a bit: a worker keeps only the rows it selected."""
    tx = scape_jax.scape(1e-3, 0.1, axis_name="data", **options)
    assert state_bytes_per_device(tx, 8) == [4 * P + P // 8 + P // 64 + SCALARS] * 8


def test_staleness_costs_one_byte_a_parameter() -> None:
    tx = scape_jax.scape(1e-3, 0.1, axis_name="data", staleness_power=1.0)
    assert state_bytes_per_device(tx, 8) == [5 * P + P // 8 + P // 64 + SCALARS] * 8


@pytest.mark.parametrize(
    ("make", "bytes_each"),
    [
        (lambda: scape_jax.adams(1e-3, axis_name="data"), 4),
        (lambda: scape_jax.adamw(1e-3, axis_name="data"), 8),
        (lambda: scape_jax.topk(1e-3, 0.1, axis_name="data"), 12),
        (lambda: scape_jax.topk(1e-3, 0.1, optimizer="adams", axis_name="data"), 8),
        (lambda: scape_jax.scape(1e-3, 1.0, axis_name="data"), 4),
    ],
    ids=["adams", "adamw", "topk adamw", "topk adams", "scape d=1"],
)
def test_dense_methods_and_topk(make: Any, bytes_each: int) -> None:
    for found in state_bytes_per_device(make(), 2):
        assert 0 < found - bytes_each * P <= SCALARS + 4


def test_dense_leaves_have_no_mask() -> None:
    """A leaf that the user names, and one below a block, cost 4 bytes a parameter and no bit more."""
    params = {"named": np.zeros((64, 4096), np.float32), "tiny": np.zeros((4, 4), np.float32)}
    state = scape_jax.scape(1e-3, 0.1, dense=lambda path: path == "named").init(params)
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == 4 * (64 * 4096 + 16) + SCALARS
