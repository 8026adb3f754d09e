"""Whether disagreement grows under momentum: the small matrix against the NumPy reference, round by round."""

import numpy as np
import pytest

import gasloc_jax as gj
from gasloc_jax.reference import NesterovGossip, NoLoCo, Optax, Sgd
from tests.quick_compile import quickest_compile  # noqa: F401

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


# Graphs in turn, of which one alone is the simplest case -------------------------------------------------------


def nesterov_step(anchors, trace, momentum, matrix, rate=0.7):
    """One round of the default form without drift, as `step`."""
    rule = Optax(lambda: Sgd(rate, momentum, nesterov=True), len(anchors))
    for one, x in zip(rule.rules, trace, strict=True):
        one.trace = {"w": x}
    new = rule.step([{"w": x} for x in anchors], [{"w": np.zeros_like(x)} for x in anchors], matrix)
    return np.stack([x["w"] for x in new]), np.stack([one.trace["w"] for one in rule.rules])


def nesterov_recursion(momentum, rate=0.7):
    return [[1.0, -rate * momentum**2], [0.0, momentum]], [[-rate * (1.0 + momentum), 0.0], [1.0, 0.0]]


def growth_by_powers(one_round, pool, momentum):
    """The reference's linear map of a cycle, found by feeding it a basis, to the power 2^20."""
    n = pool.num_workers
    cycle = np.kron(np.eye(2), np.eye(n) - 1 / n)
    for graph in pool.graphs:
        cycle = np.concatenate(one_round(cycle[:n], cycle[n:], momentum, graph.matrix()))
    log_norm = 0.0  # of the power so far is exp(log_norm) |cycle|
    for _ in range(20):
        norm = np.linalg.norm(cycle)
        if norm < 1e-9:
            return 0.0
        cycle, log_norm = (cycle / norm) @ (cycle / norm), 2 * (log_norm + np.log(norm))
    return np.exp((log_norm + np.log(np.linalg.norm(cycle))) / 2**20 * 2 / len(pool.graphs))


@pytest.mark.parametrize("momentum", [0.5, 0.9])
@pytest.mark.parametrize(
    ("topology", "workers"),
    [*((gj.exponential(), n) for n in (4, 5, 6, 8, 16)), (gj.ring(), 8), (gj.complete(), 4), (gj.random_pairs(), 2)],
)  # fmt: skip
def test_growth_in_turn_is_that_of_the_whole_cycle(topology, workers, momentum):
    pool = topology.build(workers)
    for one_round, recursion in (
        (nesterov_step, nesterov_recursion(momentum)),
        (step, gj.noloco(0.7, momentum, PULL).recursion),
    ):
        expected = growth_by_powers(one_round, pool, momentum)
        np.testing.assert_allclose(pool.growth(*recursion), expected, rtol=1e-4)


def test_growth_of_a_matrix_that_is_not_symmetric():
    """Messages one way round: eigenvalues are complex, and one matrix of second moments would be an estimate."""
    pool = gj.mixing_matrix(0.6 * np.eye(5) + 0.4 * np.roll(np.eye(5), 1, axis=0)).build(5)
    expected = growth_by_powers(nesterov_step, pool, 0.9)
    np.testing.assert_allclose(pool.growth(*nesterov_recursion(0.9)), expected, rtol=1e-4)


@pytest.mark.parametrize(("workers", "grows"), [(8, False), (16, True)])
def test_the_exponential_graph_shrinks_or_grows_as_told(workers, grows):
    """The default form over 240 rounds: with 8 workers momentum is harmless, with 16 it is not."""
    pool = gj.exponential().build(workers)
    params = np.random.default_rng(1).standard_normal((workers, 50))
    params, trace = params - params.mean(0), np.zeros((workers, 50))
    squares = []
    for number in range(240):
        params, trace = nesterov_step(params, trace, 0.9, pool.matrix(number))
        squares.append(np.sum((params - params.mean(0)) ** 2))
    told = pool.growth(*nesterov_recursion(0.9))
    assert (told > 1) is grows is bool(squares[-1] > squares[39])
    assert (squares[99] / squares[39]) ** (1 / 60) == pytest.approx(told, rel=0.02)


def test_without_momentum_it_is_the_gap():
    for topology in (gj.random_pairs(), gj.random_ring(), gj.ring(), gj.complete(), gj.exponential()):
        pool = topology.build(6)
        np.testing.assert_allclose(pool.growth([[1]], [[-1]]), 1 - pool.expected_gap(), atol=1e-9)
    assert gj.noloco(momentum=0.9).growth(1) == 0.0


def test_describe_tells_and_others_do_not_guess():
    params = {"w": np.zeros(3, np.float32)}
    assert "(squared, with this momentum: times 1.072 a round)" in gj.noloco(momentum=0.9).describe(params, 8)
    assert gj.gasloc().growth(8) is None and "momentum" not in gj.gasloc().describe(params, 8)
    in_turn = gj.noloco(topology=gj.exponential()).describe(params, 8)
    assert "all agree after 3 rounds (disagreement squared, with this momentum: times 0." in in_turn
    assert "gap 1.000, all agree after a round, " in gj.diloco().describe(params, 8)
    assert gj.gasloc().describe(params, 1) == "random_pairs, 1 worker: nobody to exchange with"


def test_growth_where_numbers_are_scheduled():
    """Without drift no rate matters, so that one which changes leaves it known; the pull does."""
    params, halved = {"w": np.zeros(3, np.float32)}, lambda count: 0.7 / (1 + count)
    assert gj.nesterov_gossip(halved).growth(8) == gj.nesterov_gossip(0.1).growth(8)
    assert gj.noloco(halved).growth(8) == gj.noloco(0.1).growth(8)
    scheduled = gj.noloco(pull=halved)
    assert scheduled.growth(8) is None and "momentum" not in scheduled.describe(params, 8)
