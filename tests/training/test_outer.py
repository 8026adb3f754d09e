"""What a run's settings say of its workers: whether they can stay together."""

import re

import numpy as np
import pytest

from gasloc_jax.reference import Optax, Sgd
from training import config as settings
from training.outer import disagreement_growth, growth_warning, make_outer


def config_of(name, workers, **outer):
    changes = {"outer.name": name, "mesh.worker": workers, "mesh.data": 1, "data.global_batch": workers}
    return settings.update(settings.preset("tiny"), changes | {f"outer.{k}": v for k, v in outer.items()})


def second_moments_of_nesterov(pool, rate, momentum, rounds=100):
    """Mean factor of the squared disagreement over the last half of the rounds, over all graphs of the pool in each."""
    n = pool.num_workers
    factor, growth = np.random.default_rng(0).standard_normal((2 * n, 2 * n)), []
    for _ in range(rounds):
        factor -= factor.reshape(2, n, -1).mean(1).repeat(n, 0)
        moments = np.zeros((2 * n, 2 * n))
        for graph in pool.graphs:
            rule = Optax(lambda: Sgd(rate, momentum, nesterov=True), n)
            for one, trace in zip(rule.rules, factor[n:], strict=True):
                one.trace = {"w": trace}
            zero = [{"w": np.zeros(2 * n)}] * n
            params = rule.step([{"w": x} for x in factor[:n]], zero, graph.matrix())
            new = np.stack([p["w"] for p in params] + [one.trace["w"] for one in rule.rules])
            moments += new @ new.T / len(pool.graphs)
        growth.append(np.trace(moments[:n, :n]) / np.sum(factor[:n] ** 2))
        values, vectors = np.linalg.eigh(moments / np.trace(moments))
        factor = vectors * np.sqrt(np.maximum(values, 0))
    return np.exp(np.mean(np.log(growth[rounds // 2 :])))


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (1.0, 0.9), (1.0, 0.0)])
def test_growth_of_nesterov_is_the_reference_s(rate, momentum):
    config = config_of("gasloc", 8, learning_rate=rate, momentum=momentum)
    expected = second_moments_of_nesterov(make_outer(config).pool(8), rate, momentum)
    np.testing.assert_allclose(disagreement_growth(config), expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "outer", "told"),
    [
        ("noloco", {"momentum": 0.9}, r"factor of 1\.072 a round, 10\^0\.1 over the run, .* Use outer.momentum 0.8,"),
        ("gasloc", {"learning_rate": 1.0}, "factor of 1.045 a round, .* Use outer.momentum 0.8,"),
        ("gasloc", {"learning_rate": 3.0, "momentum": 0.0}, "Use a smaller outer.learning_rate, or a denser"),
    ],
)  # fmt: skip
def test_growing_disagreement_is_told(name, outer, told):
    assert re.search(told, growth_warning(config_of(name, 8, **outer)))


@pytest.mark.parametrize("name", ["gasloc", "diloco", "noloco", "local_sgd", "local_dadam"])
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_defaults_stay_together(name, workers):
    assert growth_warning(config_of(name, workers)) is None
