"""Local steps that follow from times of all workers: what is waiting and what is the link, and what a checkpoint keeps."""

import numpy as np
import pytest

import gasloc_jax
from training._pace import ADAPT_EVERY, Pace
from training.config import OuterConfig

ROUNDS = list(range(ADAPT_EVERY))
OUTER = OuterConfig(name="gasloc", local_steps=4, adapt=True, fewest_steps=1)


def make_pace(workers=4, own=slice(0, 1)):
    return Pace(OUTER, gasloc_jax.random_pairs().build(workers), own)


def seconds(pace, step_secs, link_secs, counts):
    """What all would measure, (W, rounds, 2): whoever comes first waits for its partner, and then both pay the link."""
    found = np.zeros((len(step_secs), len(ROUNDS), 2), np.float32)
    arrived = np.array(step_secs) * counts
    for i, number in enumerate(ROUNDS):
        pair = pace._pool.matrix(number) != 0
        last = np.where(pair, arrived, 0).max(axis=1)
        link = np.where(pair, link_secs, 0).max(axis=1)
        found[:, i] = np.stack([step_secs, last - arrived + link], axis=1)
    return found


def test_slow_worker_takes_fewer_steps_though_others_wait_for_it():
    """With two workers the fast one waits in every round: taken for its link, that time would keep the slow one at 4."""
    pace = make_pace(2)
    measured = seconds(pace, [0.1, 0.2], [0.01, 0.01], pace.local_steps)
    assert measured[0, :, 1].min() > 0.4
    assert pace.choose(ROUNDS, measured) == "local steps of the workers: [4, 4] -> [4, 2]"
    assert pace.choose(ROUNDS, seconds(pace, [0.1, 0.2], [0.01, 0.01], pace.local_steps)) is None


def test_only_the_workers_relative_speed_counts():
    """A loaded machine, or another one after a resume, changes the clock for all: that is no reason to take other steps."""
    pace, resumed = make_pace(), make_pace()
    for secs in (0.3, 0.1, 0.2, 0.01, 3.0):
        assert pace.choose(ROUNDS, seconds(pace, [secs] * 4, [secs / 10] * 4, pace.local_steps)) is None
    assert pace.local_steps == [4] * 4
    for scale in (1.0, 7.0, 0.2):
        step_secs = np.array([0.1, 0.1, 0.2, 0.4]) * scale
        pace.choose(ROUNDS, seconds(pace, step_secs, [0.01 * scale] * 4, pace.local_steps))
        assert pace.local_steps == [4, 4, 2, 1]
        resumed.set_state(pace.get_state())
        pace, resumed = resumed, make_pace()
    assert pace.choose(ROUNDS, seconds(pace, [0.1] * 4, [0.01] * 4, pace.local_steps)).endswith(
        "[4, 4, 2, 1] -> [4, 4, 4, 4]"
    )


def test_slow_link_costs_the_worker_that_has_it():
    """Partners of the slow link wait too, but not in every round."""
    pace = make_pace()
    measured = seconds(pace, [0.1] * 4, [0.01, 0.01, 0.01, 0.25], pace.local_steps)
    links = pace.link_secs(ROUNDS, measured[:, :, 1])
    np.testing.assert_allclose(links, [0.01, 0.01, 0.01, 0.25], rtol=1e-5)
    pace.choose(ROUNDS, measured)
    assert pace.local_steps == [4, 4, 4, 1]


def test_whoever_meets_the_slow_link_comes_earlier():
    """Otherwise the slow worker waits for its partner, the pair is late for the next round, and the delay goes around."""
    pace, links = make_pace(), [0.01, 0.01, 0.01, 0.25]
    assert pace.steps_of_next_round() == [4] * 4
    pace.choose(ROUNDS, seconds(pace, [0.1] * 4, links, pace.local_steps))
    partners = set()
    for number in range(7, 20):
        resumed = make_pace()
        resumed.set_state(pace.get_state() | {"next_round": number})
        counts, pair = resumed.steps_of_next_round(), pace._pool.matrix(number) != 0
        partner = int(np.flatnonzero(pair[3] & (np.arange(4) != 3))[0])
        partners.add(partner)
        assert [counts[n] for n in range(4)] == [2 if n == partner else 1 if n == 3 else 4 for n in range(4)]
    assert partners == {0, 1, 2}
    resumed.add(19, pace.local_steps, 0.4, 0.01)
    assert resumed.get_state()["next_round"] == 20


def test_step_s_time_is_that_of_the_process_s_own_workers():
    """Its two workers took 2 steps and 1 while others took 4; by all workers' most its steps would look twice as fast."""
    pace = make_pace(own=slice(2, 4))
    for number in range(2):
        pace.add(number, [4, 4, 2, 1], 0.5, 0.1)
    assert pace.get_state()["secs"][2] == [[0.25, np.float32(0.1)]]


def test_times_since_the_last_choice_go_through_a_checkpoint():
    """Saved after three timed rounds of five: the resumed run chooses two rounds later, from all five."""
    pace, resumed = make_pace(), make_pace()
    counts = pace.local_steps
    for number in range(4):  # the first one compiles
        assert pace.add(number, counts, 0.4, 0.1 + number) is None
    resumed.set_state(pace.get_state())
    assert resumed.get_state() == pace.get_state() and len(pace.get_state()["timed_rounds"]) == 3
    assert resumed.line() == {} and pace.line()["exchange_secs"] == [np.float32(3.1)] * 4
    measured = []
    resumed.choose = lambda rounds, secs: measured.append((rounds, secs[0, :, 1].tolist()))
    for number in range(4, 7):
        resumed.add(number, counts, 0.8, 2.0)
    assert measured == [([1, 2, 3, 5, 6], pytest.approx([1.1, 2.1, 3.1, 2.0, 2.0]))]
    assert resumed.get_state()["timed_rounds"] == []
