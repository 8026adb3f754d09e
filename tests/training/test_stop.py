"""Lines between processes: who is lost is named, and a wish to stop is followed at the same place by all."""

import random
import socket
import threading
import time

import jax
import pytest

from training._peers import Peers
from training._stop import CommonStop
from training._watchdog import Hang, Watchdog

SECS = 20.0


class Signals:
    """As `StopSignals`, without signals."""

    received = None


def connected():
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


class Group:
    """Processes 0 .. count - 1 as threads of this one, joined as `_rendezvous` joins them."""

    def __init__(self, count):
        pairs = {index: connected() for index in range(1, count)}
        self.lost = [[] for _ in range(count)]
        links = [{i: pair[0] for i, pair in pairs.items()}, *({0: pair[1]} for pair in pairs.values())]
        names = [{i: f"host{i} pid {i}" for i in range(count)}, *({0: "host0"} for _ in pairs)]
        self.stopped = [[] for _ in range(count)]
        calls = [(lost.append, stopped.append) for lost, stopped in zip(self.lost, self.stopped, strict=True)]
        self.peers = [Peers(i, links[i], names[i], *calls[i]) for i in range(count)]
        self.links = links

    def close(self):
        for peers in self.peers:
            peers.close()


@pytest.fixture
def group():
    made = []

    def make(count):
        made.append(Group(count))
        return made[-1]

    yield make
    for one in made:
        one.close()
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "peers"])


def wait_for(condition):
    deadline = time.monotonic() + SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_that_ends_is_named_in_all_others(group):
    found = group(4)
    found.links[2][0].shutdown(socket.SHUT_RDWR)  # as the kernel does at the end of a process
    wait_for(lambda: all(found.lost[i] for i in (0, 1, 3)))
    told = "process 2 (host2 pid 2) was lost: it ended or cannot be reached"
    assert [found.lost[i] for i in (0, 1, 3)] == [[told]] * 3


def test_all_name_process_0_when_it_is_lost(group):
    found = group(3)
    for link in found.links[0].values():
        link.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: found.lost[1] and found.lost[2])
    assert found.lost[1] == ["process 0 (host0) was lost: it ended or cannot be reached"]


def test_who_is_done_or_failed_is_not_lost(group):
    found = group(4)
    found.peers[1].close()
    found.peers[2].fail("ValueError: a bad number", 2)
    wait_for(lambda: found.lost[0] and found.lost[3])
    assert found.lost == [["process 2 (host2 pid 2) ended: ValueError: a bad number"], [], [], found.lost[0]]
    assert [found.peers[i].code for i in (0, 3)] == [2, 2]


@pytest.mark.parametrize("one", [0, 2])
def test_a_signal_outside_the_loop_of_one_ends_all_with_its_number(group, one):
    """As where one process compiles already, and another that gets the signal is not so far yet."""
    found = group(4)
    assert found.peers[one].stopped(15) and not found.peers[one].stopped(15)
    others = [i for i in range(4) if i != one]
    wait_for(lambda: all(found.stopped[i] for i in others))
    assert [found.stopped[i] for i in others] == [[15]] * 3 and found.lost == [[]] * 4


def test_messages_wait_for_their_handler_and_come_in_order(group):
    found, taken = group(2), []
    for number in range(100):
        found.peers[1].tell_first("number", value=number)
    time.sleep(0.05)
    found.peers[0].on("number", lambda index, message: taken.append((index, message["value"])))
    wait_for(lambda: len(taken) == 100)
    assert taken == [(1, number) for number in range(100)]


@pytest.mark.parametrize("seed", range(20))
def test_all_stop_at_the_same_place_and_none_waits_for_ever(group, seed):
    """Each place is an exchange, which a process can only pass when all others have come to it: as a barrier of threads."""
    count, rng = 4, random.Random(seed)
    found, barrier, ended = group(count), threading.Barrier(count), {}
    stops = [CommonStop(Signals(), peers) for peers in found.peers]
    pauses = [[rng.random() * 2e-3 for _ in range(200)] for _ in range(count)]

    def run(index):
        passed = 0
        while passed < 200 and not stops[index].here():
            time.sleep(pauses[index][passed])
            barrier.wait(SECS)
            passed += 1
        ended[index] = passed

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(rng.random() * 0.1)
    for index in rng.sample(range(count), rng.randint(1, count)):  # one of them got it, or several
        stops[index].wish(15)
    for thread in threads:
        thread.join(SECS)
    assert len(ended) == count and len(set(ended.values())) == 1 and ended[0] < 200
    assert [stop.exit_code for stop in stops] == [143] * count
    assert all(stop.here() for stop in stops)


def test_a_run_that_ends_first_ignores_the_wish(group):
    found = group(2)
    stops = [CommonStop(Signals(), peers) for peers in found.peers]
    assert [stop.here() for stop in stops] == [False, False]
    stops[1].wish(2)
    wait_for(lambda: stops[0]._last is not None and stops[1]._last is not None)
    assert stops[0].received is None and stops[0].exit_code == 0
    assert stops[0].here() and stops[0].exit_code == 130


@pytest.mark.parametrize("all_of_them", [True, False])
def test_where_nothing_is_lost_a_signal_ends_all_at_once(group, all_of_them):
    found, left = group(3), []
    stops = [
        CommonStop(Signals(), peers, lambda number, i=i: left.append((i, number)))
        for i, peers in enumerate(found.peers)
    ]
    for stop in stops[: 3 if all_of_them else 2]:
        stop.nothing_to_save(True)
    stops[1].wish(15)
    wait_for(lambda: all(stop._last is not None for stop in stops))
    assert sorted(left) == ([(0, 15), (1, 15), (2, 15)] if all_of_them else [])


def test_a_single_process_follows_its_own_signal():
    signals, left = Signals(), []
    stop = CommonStop(signals, None, left.append)
    assert not stop.here()
    stop.nothing_to_save(True)
    stop.wish(2)
    assert left == [2]
    stop.nothing_to_save(False)
    signals.received = 2
    stop.wish(2)
    assert left == [2] and stop.here() and stop.exit_code == 130


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_deadline_of_a_step_follows_from_the_steps():
    clock = Clock()
    watch = Watchdog(lambda text: None, least_secs=10.0, rare_secs=1000.0, clock=clock)
    watch.doing("first step")
    clock.now += 300.0  # compilation
    assert watch.deadline_secs == 1000.0 and watch.hung() is None
    for secs in (1.0, 1.0, 1.0, 4.0, 1.0, 1.0):
        watch.doing("step")
        clock.now += secs
    watch.doing("step")
    assert watch.deadline_secs == 80.0  # 20 times the longest
    watch.doing("checkpoint")
    clock.now += 900.0
    assert watch.hung() is None
    watch.doing("step")  # what lay between is no step
    assert watch.deadline_secs == 80.0
    with watch:
        jax.jit(lambda x: x + clock.now)(1.0)
        clock.now += 70.0
        watch.doing("step")  # one that compiles something does not count either
    assert watch.deadline_secs == 80.0
    clock.now += 79.0
    assert watch.hung() is None
    clock.now += 2.0
    assert watch.hung() == "no progress for 81 s (step; the deadline is 80 s)"
    fast = Watchdog(lambda text: None, least_secs=10.0, clock=clock)
    for _ in range(10):
        fast.doing("step")
        clock.now += 0.01
    assert fast.deadline_secs == 10.0


def test_a_run_that_stands_still_is_reported_once_and_one_that_goes_on_is_not():
    told = []
    with Watchdog(told.append, least_secs=0.2) as watch:
        for _ in range(60):
            watch.doing("step")
            time.sleep(0.01)
        assert not told
        wait_for(lambda: told)
        time.sleep(0.3)
    assert len(told) == 1 and told[0].startswith("no progress for 0 s (step;")
    with Watchdog(told.append, least_secs=0.0):
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("places", "silent", "expected"),
    [
        ([7, 7, 6], None, "process 2 (host2 pid 2) came less far than the others"),
        ([7, 7, 7], 1, "process 1 (host1 pid 1) did not answer"),
        ([7, 7, 7], None, "all processes came equally far"),
    ],
)
def test_the_one_that_holds_all_up_is_named(group, monkeypatch, capfd, places, silent, expected):
    monkeypatch.setattr("training._watchdog._ANSWER_SECS", 0.3)
    found = group(3)
    hangs = [
        Hang(peers, lambda n=n: n, lost.append)
        for peers, n, lost in zip(found.peers, places, found.lost, strict=True)
    ]
    if silent is not None:
        found.peers[silent].on("where", lambda index, message: None)  # it is stopped
    hangs[1].report("no progress for 9 s (step)")
    wait_for(lambda: found.lost[0] and found.lost[1] and found.lost[2])
    assert found.lost[0] == [f"no progress for 9 s (step): {expected}"]
    assert "Thread 0x" in capfd.readouterr().err


def test_nobody_waits_for_a_process_0_that_does_not_answer(group, monkeypatch):
    monkeypatch.setattr("training._watchdog._ANSWER_SECS", 0.1)
    found, told = group(2), []
    Hang(found.peers[1], lambda: 1, told.append).report("no progress for 9 s (step)")  # 0 has no handler
    assert told == ["no progress for 9 s (step); process 0 does not answer"]


def test_an_own_run_that_hangs_ends():
    told = []
    Hang(None, lambda: 1, told.append).report("no progress for 9 s (step)")
    assert told == ["no progress for 9 s (step)"]
