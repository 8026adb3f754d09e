"""Graphs: doubly stochastic, drawn the same everywhere, with the spectral gap that the formulas say."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gasloc_jax as gj
from gasloc_jax import _topology
from gasloc_jax._graphs import Graph

TOPOLOGIES = {
    "random_pairs": gj.random_pairs(seed=3),
    "random_ring": gj.random_ring(seed=3),
    "ring": gj.ring(),
    "exponential": gj.exponential(),
    "complete": gj.complete(),
}
every_topology = pytest.mark.parametrize("name", TOPOLOGIES)
SIZES = (1, 2, 3, 4, 5, 7, 8, 16)


@every_topology
def test_every_matrix_is_doubly_stochastic(name):
    for size in SIZES:
        pool = TOPOLOGIES[name].build(size)
        for graph in pool.graphs:
            m = graph.matrix()
            assert (m >= 0).all() and m.shape == (size, size)
            np.testing.assert_allclose([m.sum(0), m.sum(1)], np.ones((2, size)), rtol=1e-15)
            if name != "exponential":
                np.testing.assert_array_equal(m, m.T)


@every_topology
def test_messages_are_permutations_and_pools_can_share_a_switch(name):
    """A source twice in one message is refused by ppermute; branches of a switch must return equally many messages."""
    for size in SIZES:
        pool = TOPOLOGIES[name].build(size)
        assert len({len(graph.messages) for graph in pool.graphs}) == 1
        for pairs in itertools.chain.from_iterable(graph.messages for graph in pool.graphs):
            for side in (0, 1):
                assert len({pair[side] for pair in pairs}) == len(pairs)
            assert all(a != b for a, b in pairs)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 33])
def test_random_pairs_meet_equally_often(size):
    """The pool is a tournament: every pair meets in exactly one of its matchings, an odd worker rests in one."""
    graphs = gj.random_pairs(seed=1).build(size).graphs
    assert len(graphs) == (size - 1 if size % 2 == 0 else size)
    total = sum(graph.matrix() for graph in graphs)
    met = 2 * (total - np.diag(np.diag(total)))
    np.testing.assert_array_equal(met, 1 - np.eye(size))
    resting = [int((graph.self_weights == 1).sum()) for graph in graphs]
    assert resting == [size % 2] * len(graphs)


@pytest.mark.parametrize(("size", "rings"), [(3, 1), (4, 3), (5, 12), (6, 60), (9, 64)])
def test_random_rings_are_different_and_go_through_all(size, rings):
    graphs = gj.random_ring().build(size).graphs
    assert len({graph.matrix().tobytes() for graph in graphs}) == len(graphs) == rings
    for graph in graphs:
        step = graph.matrix() > 0
        at, seen = 0, [0]
        while len(seen) < size:
            at = next(int(n) for n in np.nonzero(step[at])[0] if n not in seen)
            seen.append(at)
        assert step[at, 0] and (step.sum(axis=0) == 3).all()


def test_ring_of_two_is_a_pair():
    for topology in (gj.ring(), gj.random_ring(), gj.exponential(), gj.random_pairs()):
        np.testing.assert_array_equal(topology.build(2).matrix(0), np.full((2, 2), 0.5))


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_exponential_reaches_all_after_log2_rounds(size):
    pool = gj.exponential().build(size)
    product = np.eye(size)
    for t in range(int(math.log2(size))):
        product = pool.matrix(t) @ product
    np.testing.assert_allclose(product, np.full((size, size), 1 / size))


# The draw -----------------------------------------------------------------------------------------------------


def test_graphs_never_change():
    """Pinned: a run resumed under another version, or joined by another machine, must see the same graphs."""
    pool = gj.random_pairs(seed=7).build(8)
    assert [pool.index(t) for t in range(12)] == [1, 5, 0, 6, 5, 0, 6, 6, 5, 5, 6, 1]
    pairs = [pair for pair in pool.graphs[0].messages[0] if pair[0] < pair[1]]
    assert pairs == [(0, 4), (1, 7), (2, 6), (3, 5)]
    assert sorted(gj.random_ring(seed=7).build(6).graphs[0].messages[0]) == [
        (0, 1),
        (1, 4),
        (2, 0),
        (3, 2),
        (4, 5),
        (5, 3),
    ]


def test_the_device_draws_what_the_host_draws():
    for pool in (
        gj.random_pairs(seed=2**31 + 5).build(8),
        gj.random_ring().build(9),
        gj.exponential().build(9),
    ):
        rounds = jnp.arange(200, dtype=jnp.int32)
        drawn = jax.jit(jax.vmap(pool.index))(rounds)
        assert drawn.dtype == jnp.int32
        assert drawn.tolist() == [pool.index(t) for t in range(200)]


def test_draws_are_uniform_and_depend_on_the_seed():
    size, rounds = 8, 7000
    draws = {seed: [gj.random_pairs(seed).build(size).index(t) for t in range(rounds)] for seed in (0, 1)}
    for drawn in draws.values():
        counts = np.bincount(drawn, minlength=7)
        assert np.sum((counts - rounds / 7) ** 2) / (rounds / 7) < 22.5  # chi-square, 6 degrees, p = 0.001
        repeats = sum(a == b for a, b in itertools.pairwise(drawn)) / rounds
        assert abs(repeats - 1 / 7) < 0.02, "a round must not tell the next one"
    assert sum(a == b for a, b in zip(*draws.values(), strict=True)) / rounds < 0.17


# Spectral gap -------------------------------------------------------------------------------------------------


def ring_gap(n: int) -> float:
    """The fixed ring's eigenvalues are (1 + 2 cos(2 pi k / n)) / 3."""
    values = (1 + 2 * np.cos(2 * np.pi * np.arange(1, n) / n)) / 3
    return float(1 - np.max(values**2))


FORMULAS = {
    "random_pairs": lambda n: n / (2 * (n - 1)) if n % 2 == 0 else 0.5,
    "random_ring": lambda n: 2 / 3 + 2 / (3 * (n - 1)),
    "ring": ring_gap,
    "complete": lambda n: 1.0,
}


@pytest.mark.parametrize(
    ("name", "size"),
    [*((n, s) for n in ("random_pairs", "ring", "complete") for s in (3, 4, 7, 8, 32)),
     # All rings are in the pool up to 6 workers.
     *(("random_ring", s) for s in (3, 4, 5, 6))],
)  # fmt: skip
def test_gap_of_the_pool_is_that_of_the_formula(name, size):
    assert TOPOLOGIES[name].build(size).expected_gap() == pytest.approx(FORMULAS[name](size), abs=1e-12)


@pytest.mark.parametrize(("name", "size"), [("random_pairs", 8), ("random_pairs", 7), ("random_ring", 5)])
def test_empirical_gap(name, size):
    """Mean of W^T W over the rounds as drawn, against the formula for uniform draws."""
    pool, rounds = TOPOLOGIES[name].build(size), 4000
    squares = [m.T @ m for m in (graph.matrix() for graph in pool.graphs)]
    mean = sum(squares[pool.index(t)] for t in range(rounds)) / rounds
    second = np.linalg.eigvalsh(mean)[-2]
    assert 1 - second == pytest.approx(FORMULAS[name](size), abs=0.03)


def test_a_small_pool_of_rings_tells_its_smaller_gap():
    gaps = [gj.random_ring(pool=pool).build(16).expected_gap() for pool in (1, 4, 64, 512)]
    assert gaps == sorted(gaps)
    assert gaps[0] == pytest.approx(ring_gap(16))
    assert 0 < FORMULAS["random_ring"](16) - gaps[-1] < 0.05


def test_random_gap_does_not_shrink_with_the_workers_but_the_ring_s_does():
    sizes = (8, 16, 32, 64)
    pairs = [gj.random_pairs().build(n).expected_gap() for n in sizes]
    rings = [gj.random_ring().build(n).expected_gap() for n in sizes]
    fixed = [gj.ring().build(n).expected_gap() for n in sizes]
    assert min(pairs) > 0.5 and min(rings) > 0.5
    for smaller, larger in itertools.pairwise(fixed):
        assert larger / smaller < 0.3  # about 1/4 for twice the workers


def test_rounds_to_halve_is_what_mixing_does():
    """Mean squared disagreement after 4 rounds, over many draws and starts, against (1/2)^(2 * 4 / rounds)."""
    pool = gj.random_pairs().build(16)
    rng = np.random.default_rng(0)
    before = after = 0.0
    for start in range(0, 2000, 4):
        x = rng.standard_normal((16, 10))
        x -= x.mean(axis=0)
        before += np.sum(x**2)
        for t in range(start, start + 4):
            x = pool.matrix(t) @ x
        after += np.sum(x**2)
    halvings = 0.5 * np.log2(before / after)
    assert 4 / halvings == pytest.approx(pool.rounds_to_halve(), rel=0.05)
    assert gj.complete().build(8).rounds_to_halve() == 1
    assert gj.mixing_matrix(np.eye(3)).build(3).rounds_to_halve() == math.inf


def test_gap_of_graphs_in_turn_is_that_of_their_product():
    """What is left after 12 cycles of mixing, not the mean over the graphs: 8 workers agree after three rounds."""
    for size in (3, 5, 6, 7):
        pool, left = gj.exponential().build(size), np.eye(size) - 1 / size
        rounds = 12 * len(pool.graphs)
        for t in range(rounds):
            left = pool.matrix(t) @ left
        assert 1 - np.linalg.norm(left, 2) ** (2 / rounds) == pytest.approx(pool.expected_gap(), abs=0.01)
        assert pool.rounds_to_agree() is None
    for size, halved in ((2, 1), (4, 2), (8, 2), (16, 2)):
        pool = gj.exponential().build(size)
        assert (pool.expected_gap(), pool.rounds_to_halve()) == (1.0, halved)
        assert pool.rounds_to_agree() == math.log2(size)


def test_rounds_to_agree():
    bits = np.zeros((8, 8))  # worker i hears of what 2i and 2i + 1 have: all of it after three rounds
    for i in range(8):
        bits[i, [2 * i % 8, (2 * i + 1) % 8]] = 0.5
    rounds = {gj.complete(): 1, gj.mixing_matrix(bits): 3, gj.random_pairs(): None, gj.ring(): None}
    assert {topology: topology.build(8).rounds_to_agree() for topology in rounds} == rounds
    assert gj.random_ring().build(3).rounds_to_agree() == 1


# Bytes and a user's matrix ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "messages"), [("random_pairs", 1), ("random_ring", 2), ("ring", 2), ("exponential", 1)]
)
def test_bytes_per_round(name, messages):
    pool = TOPOLOGIES[name].build(8)
    for dtype, nbytes in ((None, 4000), (jnp.bfloat16, 2000), (jnp.int8, 1024 + 16)):
        assert pool.bytes_per_round(1000, gj.make_payload(dtype)) == messages * nbytes
    assert TOPOLOGIES[name].build(1).bytes_per_round(1000, gj.make_payload(None)) == 0


def test_bytes_of_the_complete_graph_are_those_of_a_ring_all_reduce():
    pool = gj.complete().build(8)
    assert pool.bytes_per_round(1000, gj.make_payload(None)) == 2 * 7 * 4000 // 8
    assert pool.bytes_per_round(8 * 256, gj.make_payload(jnp.int8)) == 2 * 7 * (256 + 4)


def test_a_user_s_matrix_sends_only_where_it_has_a_weight():
    lazy_ring = 0.5 * np.eye(4) + 0.25 * (np.roll(np.eye(4), 1, 0) + np.roll(np.eye(4), -1, 0))
    pairs = np.array([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]])
    one_way = np.array([[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0.5, 0, 0.5, 0], [0, 0, 0, 1.0]])
    cases = (
        (lazy_ring, [2, 2, 2, 2], 2),
        (one_way, [1, 1, 1, 0], 1),
        (pairs, [1, 1, 1, 1], 1),
        (np.eye(4), [0, 0, 0, 0], 0),
    )
    for matrix, sent, messages in cases:
        pool = gj.mixing_matrix(matrix).build(4)
        np.testing.assert_array_equal(pool.matrix(17), matrix)
        assert pool.graphs[0].sends().tolist() == sent
        assert len(pool.graphs[0].messages) == messages, "offsets that do not meet travel together"
        assert pool.bytes_per_round(10, gj.make_payload(None)) == 40 * max(sent)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[1.0, 0.0], [0.5, 0.5]], "doubly stochastic, but column 0 sums to 1.5"),
        ([[0.5, 0.4], [0.4, 0.5]], "doubly stochastic, but row 0 sums to 0.9"),
        ([[1.5, -0.5], [-0.5, 1.5]], "finite weights >= 0, got -0.5"),
        ([[float("nan"), 1.0], [1.0, 0.0]], "finite weights >= 0, got nan"),
        ([[1.0, 0.0]], "must be square, got shape (1, 2)"),
        ([], "must be square"),
        ([[1.0, 0.0], [1.0]], "real numbers in rows of equal length, got [[1.0, 0.0], [1.0]]"),
        ([["0.5", "0.5"], ["0.5", "0.5"]], "real numbers in rows of equal length, got [['0.5'"),
        ("ring", "real numbers in rows of equal length, got 'ring'. Give one row for each worker"),
        (np.eye(2) * (1 + 0j), "real numbers in rows of equal length, got array([[1.+0.j"),
    ],
)
def test_bad_matrices(matrix, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        gj.mixing_matrix(matrix)


def test_bad_settings():
    with pytest.raises(ValueError, match=re.escape("a row for each worker, got 2 rows for 3 workers")):
        gj.mixing_matrix(np.eye(2)).build(3)
    for bad in (-1, 0.5, None, True):
        with pytest.raises(ValueError, match=f"seed must be a whole number >= 0, got {bad!r}"):
            gj.random_pairs(seed=bad)
    with pytest.raises(ValueError, match="pool must be a whole number >= 1, got 0"):
        gj.random_ring(pool=0)
    with pytest.raises(ValueError, match="num_workers must be a whole number >= 1, got 0"):
        gj.complete().build(0)


def test_line_for_the_start_of_a_run():
    params = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
    assert gj.gasloc(axis_name="worker").describe(params, 8) == (
        "random_pairs, 8 workers: expected spectral gap 0.571, disagreement halves in 1.6 rounds, "
        "4,000,000 bytes sent by a worker in a round"
    )
    assert "8,000,000 bytes" in gj.noloco(axis_name="worker").describe(params, 8), "two trees"
    assert "in inf rounds, 0 bytes" in gj.gasloc(topology=gj.mixing_matrix(np.eye(3))).describe(params, 3)


@pytest.mark.parametrize("size", [3, 4, 5, 6, 8])
def test_a_ring_of_even_length_is_two_sets_of_pairs(size):
    for graph in gj.random_ring(seed=2, pool=4).build(size).graphs:
        found = graph.matchings()
        if size % 2:
            assert found is None
            continue
        sets, brought = found
        assert all(sorted(sum(pairs, ())) == list(range(size)) for pairs in sets)
        for k, pairs in enumerate(graph.messages):
            for source, destination in pairs:
                assert tuple(sorted((source, destination))) in sets[brought[k, destination]]
    assert gj.exponential().build(8).graphs[0].matchings() is None
    assert gj.complete().build(4).graphs[0].matchings() is None
    two_rings = np.kron(np.eye(2), gj.ring().build(4).matrix(0))
    assert gj.mixing_matrix(two_rings).build(8).graphs[0].matchings() is not None
    odd = np.kron(np.eye(2), gj.ring().build(3).matrix(0))
    assert gj.mixing_matrix(odd).build(6).graphs[0].matchings() is None


def test_a_pool_makes_no_graph_that_nobody_asks_for(monkeypatch):
    """All graphs of random pairs over 4096 workers take 20 s, the complete one's messages minutes."""
    made = []
    monkeypatch.setattr(
        _topology, "_pairing", lambda pairs, size: made.append(pairs) or Graph(((),), None, np.ones(size))
    )
    pool = gj.random_pairs().build(4096)
    assert len(pool.graphs) == 4095 and not made
    assert pool.graph(3) is pool.graph(3) and pool.graphs[-1] is pool.graphs[4094] and len(made) == 2
    assert len(gj.complete().build(4096).graphs) == 1  # not made
    with pytest.raises(IndexError):
        pool.graphs[4095]
