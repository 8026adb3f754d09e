"""Whether disagreement grows under momentum: the small matrix against the NumPy reference, round by round."""

import numpy as np
import pytest

import gasloc_jax as gj
from gasloc_jax.reference import NesterovGossip, NoLoCo

PULL = 0.7


def step(anchors, velocity, momentum, matrix):
    """One round of the reference without drift, (W, entries) each."""
    rule, trees = NoLoCo(0.7, momentum, PULL), [{"w": x} for x in anchors]
    rule.m = [{"w": x} for x in velocity]
    new = rule.step(trees, [{"w": np.zeros_like(x)} for x in anchors], matrix)
    return np.stack([x["w"] for x in new]), np.stack([x["w"] for x in rule.m])


def expected_growth(pool, momentum, rounds=100):
    """The mean factor over the second half of the rounds, the expectation over the pool's graphs taken exactly in each.

    The columns of `factor` are as many entries of a model; their second moments are all that the next round needs.
    """
    workers = pool.num_workers
    factor = np.random.default_rng(0).standard_normal((2 * workers, 2 * workers))
    growth = []
    for _ in range(rounds):
        factor -= (
            factor.reshape(2, workers, -1).mean(1).repeat(workers, 0)
        )  # rounding, of which the mean forgets nothing
        moments = np.zeros((2 * workers, 2 * workers))
        before = np.sum(factor[:workers] ** 2)
        for graph in pool.graphs:
            new = np.concatenate(step(factor[:workers], factor[workers:], momentum, graph.matrix()))
            moments += new @ new.T / len(pool.graphs)
        growth.append(np.trace(moments[:workers, :workers]) / before)
        values, vectors = np.linalg.eigh(moments / np.trace(moments))
        factor = vectors * np.sqrt(np.maximum(values, 0))
    return np.exp(np.mean(np.log(growth[rounds // 2 :])))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(
    ("topology", "workers", "rtol"),
    [
        (gj.random_pairs(), 5, 1e-6), (gj.random_pairs(), 8, 1e-6),
        # One graph: disagreement swings on its way, which fifty rounds do not quite average out.
        (gj.random_pairs(), 2, 0.02), (gj.ring(), 6, 0.02), (gj.complete(), 4, 0.02),
        (gj.random_ring(), 6, 0.03),  # few rings, in which workers are not quite alike
    ],
)  # fmt: skip
def test_growth_is_the_reference_s(topology, workers, rtol, momentum):
    outer = gj.noloco(0.7, momentum, PULL, topology=topology)
    expected = expected_growth(outer.pool(workers), momentum)
    np.testing.assert_allclose(outer.growth(workers), expected, rtol=rtol)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_a_run_shrinks_or_explodes_as_told(momentum):
    """One sequence of graphs, 200 rounds of eight workers: a distance of 1 ends below 1e-6 or above 10."""
    outer = gj.noloco(0.7, momentum, PULL)
    pool = outer.pool(8)
    params = np.random.default_rng(1).standard_normal((8, 50))
    params, velocity = params - params.mean(0), np.zeros((8, 50))
    began = np.linalg.norm(params)
    for number in range(200):
        params, velocity = step(params, velocity, momentum, pool.matrix(number))
    ended = np.linalg.norm(params - params.mean(0)) / began
    assert (outer.growth(8) > 1) is (momentum == 0.9) is bool(ended > 10)
    assert ended > 10 or ended < 1e-6


@pytest.mark.parametrize(
    ("momentum", "gamma"), [("mixed", 0.5), ("mixed", 0.9), ("local", 0.5), ("local", 0.9)]
)
def test_growth_of_the_explicit_forms(momentum, gamma):
    """The mean over many runs of the reference: expectations of squares are dominated by rare runs, so few rounds."""
    outer, runs, rounds = gj.nesterov_gossip(0.7, gamma, momentum), 3000, 12
    pool, rng = outer.pool(4), np.random.default_rng(2)
    squares = np.zeros(rounds)
    for _ in range(runs):
        rule = NesterovGossip(0.7, gamma, momentum)
        theta = rng.standard_normal((4, 1))
        theta -= theta.mean(0)
        trees, zero = [{"w": x} for x in theta], [{"w": np.zeros(1)}] * 4
        for number, graph in enumerate(rng.integers(len(pool.graphs), size=rounds)):
            trees = rule.step(trees, zero, pool.graphs[graph].matrix())
            squares[number] += sum(float(x["w"][0]) ** 2 for x in trees)
    measured = (squares[-1] / squares[5]) ** (1 / (rounds - 6))
    np.testing.assert_allclose(outer.growth(4), measured, rtol=0.06)
    assert (outer.growth(8) > 1) is (gamma == 0.9)


def test_without_momentum_it_is_the_gap():
    for topology in (gj.random_pairs(), gj.random_ring(), gj.ring(), gj.complete()):
        pool = topology.build(6)
        np.testing.assert_allclose(pool.growth([[1]], [[-1]]), 1 - pool.expected_gap(), atol=1e-9)
    assert gj.noloco(momentum=0.9).growth(1) == 0.0


def test_describe_tells_and_others_do_not_guess():
    params = {"w": np.zeros(3, np.float32)}
    assert "(squared, with this momentum: times 1.072 a round)" in gj.noloco(momentum=0.9).describe(params, 8)
    assert gj.gasloc().growth(8) is None and "momentum" not in gj.gasloc().describe(params, 8)
