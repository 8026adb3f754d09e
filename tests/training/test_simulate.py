"""training/simulate.py against closed forms: times of collectives, bytes of the ledgers, waiting, overlap, wrong input."""

import dataclasses
import doctest
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gasloc_jax
import scape_jax
from training import _sim_collectives as collectives
from training import _sim_paper as paper
from training import simulate as sim

PARAMS = {
    "w": jax.ShapeDtypeStruct((300, 4096), jnp.float32),
    "layers": {"v": jax.ShapeDtypeStruct((8, 64, 512), jnp.float32)},
    "scale": jax.ShapeDtypeStruct((777,), jnp.float32),
}
GIGA = sim.Network(upload_bits=8e9)  # 1e9 bytes/s
STEP = sim.Machine(forward_secs=0.1, backward_secs=0.2, update_secs=0.05)
ROUNDS = [name for name, method in sim.METHODS.items() if method.in_rounds]
STEPS = [name for name in sim.METHODS if name not in ROUNDS]


def links(workers, network=GIGA, machine=None):
    return sim.Links(network, workers, machine)


def secs(collective, on, *arguments):
    return collective(on, np.zeros(on.workers), *arguments)


def close(actual, desired):
    np.testing.assert_allclose(actual, desired, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 64, 1024])
def test_collectives_of_equal_workers_take_their_closed_forms(workers):
    n, share = 1e9, (workers - 1) / workers
    levels = math.ceil(math.log2(workers))
    for collective, argument, wanted in (
        (collectives.ring_all_reduce, n, 2 * share),
        (collectives.ring_reduce_scatter, n, share),
        (collectives.ring_all_gather, n / workers, share),
        (collectives.all_to_all, n / workers, share),
        (collectives.tree_all_reduce, n, 2.0 * levels),
    ):
        on = links(workers)
        close(secs(collective, on, argument).max(), wanted)
        assert on.sent_bytes.sum() == pytest.approx(on.received_bytes.sum(), rel=1e-12)


@pytest.mark.parametrize("changes", [{}, {"duplex": False}, {"upload_latency_secs": 0.25}])
@pytest.mark.parametrize(
    "collective", [collectives.ring_all_reduce, collectives.ring_all_gather, collectives.all_to_all]
)
@pytest.mark.parametrize("workers", [2, 3, 6])
def test_equal_phases_multiplied_are_the_phases_followed(collective, workers, changes):
    """Workers that begin together have one phase followed; the slow way is that of links that are not all equal."""
    network = dataclasses.replace(GIGA, **changes)
    machine = sim.Machine(message_secs=0.125, byte_secs=1e-9)
    fast, slow = links(workers, network, machine), links(workers, network, machine)
    slow.alike = False
    ready = np.full(workers, 3.0)
    close(collective(fast, ready, 1e9), collective(slow, ready, 1e9))
    for name in ("sent_bytes", "received_bytes", "own_secs"):
        close(getattr(fast, name), getattr(slow, name))


def test_phases_of_equal_workers_are_not_followed_one_by_one(monkeypatch):
    """No timing: at 4096 workers a ring's 4095 phases would take a second, in every step of every method."""
    followed = []
    phase = sim.Links.phase
    monkeypatch.setattr(sim.Links, "phase", lambda *a: followed.append(0) or phase(*a))
    for name in ("adams", "scape_d0.1_index", "diloco"):
        sim.predict(name, PARAMS, 4096, GIGA, STEP)
    assert len(followed) < 100


def test_latency_and_costs_come_once_a_phase():
    network = dataclasses.replace(GIGA, upload_latency_secs=0.25, download_latency_secs=0.5)
    on = links(4, network, sim.Machine(message_secs=0.125, byte_secs=1e-9))
    # six phases of a quarter: on the link, to get there, before it leaves, to be summed
    close(secs(collectives.ring_all_reduce, on, 1e9), 6 * (0.25 + 0.75 + 0.125 + 0.25))


def test_a_slow_link_slows_a_ring_by_its_factor_and_leaves_other_pairs_alone():
    slow = dataclasses.replace(GIGA, upload_bits=(8e9, 8e9, 8e9, 8e8))
    on = links(4, slow)
    close(secs(collectives.ring_all_reduce, on, 1e9)[3], 15.0)
    end = secs(collectives.exchange, links(4, slow), [(0, 1), (2, 3)], 1e9)
    close(end, [1.0, 1.0, 10.0, 10.0])
    # a slow download of worker 2 holds who sends to it, and nobody else
    slow_down = dataclasses.replace(GIGA, download_bits=(8e9, 8e9, 8e8, 8e9))
    close(
        secs(collectives.ppermute, links(4, slow_down), [(0, 1), (1, 0), (3, 2)], 1e9), [1.0, 1.0, 10.0, 10.0]
    )


def test_one_direction_after_the_other_where_two_share_a_socket():
    half = dataclasses.replace(GIGA, duplex=False)
    close(secs(collectives.exchange, links(2), [(0, 1)], 1e9), 1.0)
    close(secs(collectives.exchange, links(2, half), [(1, 0)], 1e9), 2.0)
    close(
        secs(collectives.ppermute, links(3, half), [(0, 1), (1, 2), (2, 0)], 1e9), 1.0
    )  # no two to each other


def test_waiting_goes_from_worker_to_worker():
    on = links(3)
    ready = collectives.ppermute(on, np.array([0.0, 5.0, 0.0]), [(0, 1)], 1e9)
    close(ready, [6.0, 6.0, 0.0])
    close(collectives.ppermute(on, ready, [(2, 0)], 1e9), [7.0, 6.0, 7.0])


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("name", STEPS)
def test_bytes_of_a_step_are_those_of_the_ledger(name, workers):
    run = sim.simulate(name, PARAMS, workers, GIGA, STEP, repeats=1)
    wire = sim.METHODS[name].optimizer.wire(PARAMS, num_workers=workers, step=None)
    for passed in (run.sent_bytes, run.received_bytes):
        assert [round(x) for x in passed] == [wire.total_bytes] * workers
    found = sim.predict(name, PARAMS, workers, GIGA, STEP)
    assert found.sent_bytes == wire.total_bytes


@pytest.mark.parametrize("workers", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("name", ROUNDS)
def test_bytes_of_a_round_are_those_of_the_closed_form(name, workers):
    """An odd worker rests in random pairs: the closed form is that of the busiest."""
    run = sim.simulate(name, PARAMS, workers, GIGA, STEP, local_steps=3, repeats=1)
    method = sim.METHODS[name]
    if method.fragments == 1:
        wanted = method.optimizer.bytes_per_round(PARAMS, workers)
    else:
        local = gasloc_jax.make_local_step(lambda p, b: jnp.float32(0), method.optimizer)
        mesh = gasloc_jax.make_mesh(workers, devices=jax.devices()[:workers])
        wanted = gasloc_jax.make_round(local, method.optimizer, mesh, fragments=4).wire_bytes(PARAMS)
    assert round(run.sent_bytes.max()) == round(run.received_bytes.max()) == wanted
    idle = 1 if "1peer" in name and workers % 2 else 0
    assert [round(x) for x in sorted(run.sent_bytes)] == [0] * idle + [wanted] * (workers - idle)
    assert sim.predict(name, PARAMS, workers, GIGA, STEP, local_steps=3).sent_bytes == wanted / 3


def test_top_k_gathers_what_it_kept_after_the_backward_pass():
    """Its gather holds values of this step, so that nothing hides it."""
    method = sim.Method("topk", lambda: scape_jax.topk(1e-3, 0.01, axis_name="data"))
    found = sim.predict(method, PARAMS, 4, GIGA, STEP)
    wire = method.optimizer.wire(PARAMS, num_workers=4, step=None)
    assert found.sent_bytes == wire.total_bytes
    close(found.exposed_secs, wire.total_bytes / 1e9)


@pytest.mark.parametrize("name", sim.METHODS)
def test_one_worker_only_computes(name):
    found = sim.predict(name, PARAMS, 1, GIGA, STEP)
    assert (found.exposed_secs, found.sent_bytes) == (0.0, 0.0)
    assert found.step_secs == pytest.approx(0.35)


def test_the_masks_hide_behind_the_compute():
    """What is left of a gather is what takes longer than forward and backward."""
    wire = scape_jax.wire_bytes(PARAMS, num_workers=4, density=0.01, codec="bitmap")
    network = sim.Network(upload_bits=8e4)  # seconds, so that nothing is lost in rounding
    gather, reduce = wire.mask_bytes / 1e4, (wire.total_bytes - wire.mask_bytes) / 1e4
    for compute in (0.5 * gather, 2 * gather):
        machine = sim.Machine(backward_secs=compute)
        beside = sim.predict("scape_d0.01_bitmap", PARAMS, 4, network, machine)
        before = sim.predict(
            "scape_d0.01_bitmap", PARAMS, 4, network, dataclasses.replace(machine, overlap=False)
        )
        close(beside.exposed_secs, reduce + max(0.0, gather - compute))
        close(before.exposed_secs - beside.exposed_secs, min(gather, compute))


def test_a_delay_hides_the_exchange_behind_the_first_steps():
    size = 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(PARAMS))
    network = sim.Network(upload_bits=8.0 * size)  # an exchange with one peer takes a second
    machine = sim.Machine(backward_secs=0.25)
    for delay, left in ((0, 1.0), (1, 0.75), (3, 0.25), (4, 0.0), (6, 0.0)):
        found = sim.predict("gasloc_1peer", PARAMS, 4, network, machine, local_steps=8, delay=delay)
        close(found.exposed_secs * 8, left)


def test_rounds_meet_over_the_graphs_of_the_library():
    """Worker 3 is slow to compute: only whom it meets waits, in the first round its peer alone."""
    machine = sim.Machine(backward_secs=(1.0, 1.0, 1.0, 5.0))
    run = sim.simulate("gasloc_1peer", PARAMS, 4, GIGA, machine, local_steps=2, repeats=2)
    pool = sim.METHODS["gasloc_1peer"].optimizer.pool(4)
    message = pool.bytes_per_round(sum(math.prod(x.shape) for x in jax.tree.leaves(PARAMS)), _plain()) / 1e9
    ends, compute = np.zeros(4), np.array([2.0, 2.0, 2.0, 10.0])
    for number in range(2):
        ready = ends + compute
        partner = dict(pool.graph(number).messages[0])
        ends = np.array([max(ready[i], ready[partner[i]]) + message for i in range(4)])
        close(run.ends[number], ends)
    fast = partner_of_3 = dict(pool.graph(0).messages[0])[3]
    one = sim.simulate("gasloc_1peer", PARAMS, 4, GIGA, machine, local_steps=2, repeats=1)
    close(one.idle_secs[partner_of_3], 8.0)
    close(np.delete(one.idle_secs, fast), 0.0)
    all_wait = sim.simulate("diloco", PARAMS, 4, GIGA, machine, local_steps=2, repeats=1)
    close(all_wait.idle_secs[:3], 8.0)


def _plain():
    return gasloc_jax.make_payload(None)


def test_who_is_idle_where_links_differ():
    """The peer of a slow link waits for it; who has the slow link is busy all the time."""
    slow = dataclasses.replace(GIGA, upload_bits=(8e9, 8e8), download_bits=8e9)
    machine = sim.Machine(backward_secs=1.0)
    message = sim.exchange_of(sim.METHODS["gasloc_1peer"], PARAMS, 2).sent_bytes / 1e9
    run = sim.simulate("gasloc_1peer", PARAMS, 2, slow, machine, local_steps=1, repeats=1)
    close(run.idle_secs, [9 * message, 0.0])
    # one after the other, both are busy in one direction and wait in the other only for the slow link
    half = dataclasses.replace(slow, duplex=False)
    run = sim.simulate("gasloc_1peer", PARAMS, 2, half, machine, local_steps=1, repeats=1)
    close(run.ends[0], 1.0 + 11 * message)
    close(run.idle_secs, [9 * message, 0.0])


def test_the_start_is_not_the_long_run():
    """Worker 1 is done first in a ring with a slow link, and begins its longer compute while the others still send."""
    slow = dataclasses.replace(GIGA, upload_bits=(8e6, 8e6, 8e6, 8e5))
    machine = sim.Machine(backward_secs=(0.1, 60.0, 0.1, 0.1))
    run = sim.simulate("adams", PARAMS, 4, slow, machine)
    first = run.ends[0].max()
    assert run.secs < first - 5.0
    close(run.secs * 2, run.ends[2].max() - first)


def test_adapted_local_steps_end_the_waiting():
    machine = sim.Machine(backward_secs=(1.0, 1.0, 1.0, 5.0))
    equal = sim.simulate("gasloc_1peer", PARAMS, 4, GIGA, machine, local_steps=10)
    adapted = sim.simulate("gasloc_1peer", PARAMS, 4, GIGA, machine, local_steps=[10, 10, 10, 2])
    assert equal.idle_share[:3].min() > 0.5
    assert adapted.idle_share.max() < 1e-9
    assert equal.secs > 4 * adapted.secs


@pytest.mark.parametrize("name", ["scape_d0.1_index", "diloco", "gasloc_2peer"])
def test_the_timeline_is_the_run(name):
    """Segments of a worker's own follow one another without a hole, and add up to what is told."""
    machine = dataclasses.replace(STEP, backward_secs=(0.2, 0.4, 0.2), outer_secs=0.01)
    run = sim.simulate(
        name, PARAMS, 3, dataclasses.replace(GIGA, upload_bits=8e7), machine, repeats=3, record=True
    )
    for worker in range(3):
        own = [s for s in run.timeline if s.worker == worker and s.kind != "beside"]
        assert own[0].start == 0.0
        close([s.start for s in own[1:]], [s.end for s in own[:-1]])
        close(own[-1].end, run.ends[-1, worker])
        spent = lambda *kinds: sum(s.end - s.start for s in own if s.kind in kinds)  # noqa: B023, E731
        close(spent("wait"), run.idle_secs[worker])
        close(spent("wait", "exchange"), run.exposed_secs[worker])
        assert spent("wait") > 0 or worker == 1


def test_the_examples_print_what_they_say():
    found = doctest.testmod(sim)
    assert found.failed == 0 and found.attempted >= 10


def test_a_thousand_workers_around_a_ring():
    found = sim.predict("adams", PARAMS, 1024, GIGA, STEP)
    total = scape_jax.wire_bytes(PARAMS, num_workers=1024, method="all_reduce").total_bytes
    assert found.exposed_secs == pytest.approx(total / 1e9, rel=1e-6)


def test_the_papers_sparse_steps_follow_from_its_dense_ones():
    """Order and size. Every prediction is too fast, since the cost of choosing entries is in no dense step: within 25 %."""
    for name, secs in paper.DENSE_SECS.items():
        assert paper.step_secs(name, paper.MANY, None) == pytest.approx(secs, rel=1e-6)
    scaling = (
        paper.step_secs("llama1p8b", paper.FEW, None) / paper.step_secs("llama1p8b", paper.MANY, None) / 16
    )
    assert scaling == pytest.approx(paper.DENSE_SCALING, rel=1e-6)
    fit = paper.fit()
    assert fit.compute_secs > 0 and fit.fixed_secs > 0 and fit.bits > 0

    figures = paper.figures()
    assert [f.published for f in figures] == [1.077, 0.908, 1.983, 1.473, 0.372, 0.478]
    times, scaling = figures[:4], figures[4:]
    assert all(-0.25 < f.error < 0 for f in times) and all(0 < f.error < 0.25 for f in scaling)
    for dense, (tenth, hundredth) in ((1.754, times[:2]), (4.804, times[2:])):
        assert hundredth.predicted < tenth.predicted < dense
    assert paper.DENSE_SCALING < scaling[0].predicted < scaling[1].predicted


rates = st.floats(1e3, 1e12)


@settings(max_examples=30)
@given(
    st.lists(rates, min_size=2, max_size=6),
    st.data(),
    st.sampled_from(["adams", "scape_d0.1_index", "gasloc_1peer"]),
)
def test_more_bandwidth_is_never_slower(bits, data, name):
    faster = tuple(b * data.draw(st.floats(1.0, 100.0)) for b in bits)
    machine = dataclasses.replace(STEP, backward_secs=tuple(data.draw(st.floats(0.0, 2.0)) for _ in bits))
    ends = [
        sim.simulate(
            name, PARAMS, len(bits), sim.Network(upload_bits=b), machine, local_steps=2, repeats=3
        ).ends
        for b in (tuple(bits), faster)
    ]
    assert (ends[1] <= ends[0] * (1 + 1e-12)).all()


@given(st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=20)
def test_more_workers_never_take_fewer_phases(a, b):
    """With latency alone a ring's time is its phases."""
    network = sim.Network(upload_bits=8e15, upload_latency_secs=1.0)
    phases = [round(secs(collectives.ring_all_reduce, links(w, network), 1.0).max()) for w in (a, b)]
    assert phases == [2 * (a - 1), 2 * (b - 1)]


def cell(name, workers=4, **changes):
    sent = sim.exchange_of(sim.METHODS[name], PARAMS, workers).sent_bytes
    found = dict(
        method=name, bandwidth=1e8, compute_secs=0.3, update_secs=0.1, bytes_per_step=sent, step_secs=1.0
    )
    return found | changes


def test_cells_are_compared_with_their_own_compute_and_link():
    ideal = sim.Network(upload_bits=1.0)
    dense = cell("adams")
    exact = 0.4 + 8 * dense["bytes_per_step"] / 1e8
    row, faster = sim.compare(
        [dense | {"step_secs": exact / 1.1, "kernel": "any"}, dense | {"bandwidth": 1e9}],
        PARAMS,
        4,
        network=ideal,
    )
    assert row.predicted_secs == pytest.approx(exact) and row.error == pytest.approx(0.1)
    assert faster.predicted_secs == pytest.approx(0.4 + (exact - 0.4) / 10)
    (with_headers,) = sim.compare([dense], PARAMS, 4)
    assert with_headers.predicted_secs == pytest.approx(0.4 + (exact - 0.4) * 9014 / 8948)


def test_a_cell_may_be_of_a_round_or_of_a_step():
    whole = cell("gasloc_1peer")
    share = whole | {name: whole[name] / 10 for name in ("compute_secs", "update_secs", "bytes_per_step")}
    a, b = sim.compare([whole, share], PARAMS, 4)
    assert a.predicted_secs == pytest.approx(10 * b.predicted_secs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sim.predict("scape_d0.1_idnex", PARAMS, 4, GIGA, STEP), "Did you mean 'scape_d0.1_index'"),
        (lambda: sim.predict("adams", PARAMS, 0, GIGA, STEP), "workers must be a whole number >= 1, got 0"),
        (lambda: sim.predict("adams", PARAMS, 4, GIGA, STEP, delay=1), "delay must be 0 for adams"),
        (lambda: sim.predict("diloco", PARAMS, 4, GIGA, STEP, local_steps=[1, 2]), "one for each of 4 workers"),
        (lambda: sim.predict("diloco", PARAMS, 4, GIGA, STEP, local_steps=0), "local_steps must be"),
        (lambda: sim.predict("diloco", PARAMS, 4, GIGA, STEP, local_steps=3, delay=3), "fewest local steps = 3"),
        (lambda: sim.simulate("adams", PARAMS, 4, GIGA, STEP, repeats=0), "repeats must be at least 1"),
        (lambda: sim.Network(upload_bits=0.0), "upload_bits must be finite and > 0, got 0.0"),
        (lambda: sim.Network(upload_bits=(1.0, math.nan)), "upload_bits must be finite"),
        (lambda: sim.Network(upload_bits=1.0, upload_latency_secs=-1.0), ">= 0, got -1.0"),
        (lambda: sim.Network(upload_bits=1.0, payload_fraction=1.5), r"payload_fraction must be in \(0, 1\]"),
        (lambda: sim.Network(upload_bits=1.0, algorithm="star"), "'ring' or 'tree', got 'star'"),
        (lambda: sim.Machine(update_secs=-1.0), "update_secs must be finite and >= 0"),
        (lambda: links(3, sim.Network(upload_bits=(1.0, 2.0))), "each of 3 workers, got 2 numbers"),
        (lambda: secs(collectives.ppermute, links(2), [(0, 2)], 1.0), "workers 0 to 1, got 0 to 2"),
        (lambda: secs(collectives.ppermute, links(3), [(0, 1), (2, 1)], 1.0), "receives at most once"),
        (lambda: secs(collectives.ppermute, links(2), [(0, 0)], 1.0), "to another worker"),
        (lambda: sim.compare([{"method": "adams"}], PARAMS, 4), "lacks bandwidth, step_secs"),
        (lambda: sim.compare([cell("adams", step_secs=0.0)], PARAMS, 4), "step_secs of a cell must be"),
        (lambda: sim.compare([cell("adams", bytes_per_step=9e9)], PARAMS, 4), "parameters and workers that were"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
