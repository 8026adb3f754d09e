"""Local steps that fit each worker: all reach the exchange together, and noise moves nobody."""

import re

import numpy as np
import pytest

from gasloc_jax import AdaptiveLocalSteps

# Seconds of a step and of an exchange: the fastest, one of half its speed, one behind a slow link.
STEP_SECS, EXCHANGE_SECS = [0.1, 0.2, 0.1], [0.5, 0.5, 1.0]


def test_all_reach_the_exchange_together():
    adapt = AdaptiveLocalSteps(nominal=20)
    target = adapt.common_target(STEP_SECS, EXCHANGE_SECS)
    assert target == pytest.approx(20 * 0.1 + 0.5)
    steps = [adapt.choose(20, [s], [x], target) for s, x in zip(STEP_SECS, EXCHANGE_SECS, strict=True)]
    assert steps == [20, 10, 15]
    ends = [h * s + x for h, s, x in zip(steps, STEP_SECS, EXCHANGE_SECS, strict=True)]
    assert ends == pytest.approx([target] * 3)


def test_given_target_needs_no_other_worker():
    adapt = AdaptiveLocalSteps(nominal=4, target_secs=3.0)
    assert adapt.common_target([], []) == 3.0
    assert adapt.choose(4, [0.1], [0.0], 3.0) == 30


def test_bounds():
    adapt = AdaptiveLocalSteps(nominal=10, minimum=5, maximum=20)
    assert adapt.choose(10, [10.0], [0.5], 2.0) == 5
    assert adapt.choose(10, [0.001], [0.5], 2.0) == 20
    assert adapt.choose(10, [0.1], [9.0], 2.0) == 5, "an exchange above the target leaves the minimum"
    # A number outside the bounds, from a resumed run, is brought back inside.
    assert adapt.choose(50, [0.1], [0.0], 2.0) == 20


def test_rounds_down():
    """A step more than fits would keep all the others waiting."""
    adapt = AdaptiveLocalSteps(nominal=10, hysteresis=0.0)
    assert adapt.choose(3, [0.3], [0.0], 2.9) == 9
    assert adapt.choose(3, [0.1], [0.0], 0.7) == 7  # 0.7 / 0.1 is 6.999... in floating point


@pytest.mark.parametrize("noise", [0.05, 0.1])
def test_noise_within_the_hysteresis_moves_nothing(noise):
    adapt = AdaptiveLocalSteps(nominal=10)
    rng = np.random.default_rng(0)
    steps, seen = 10, []
    for _ in range(200):
        recent = list(0.1 * rng.uniform(1 - noise, 1 + noise, size=3))
        steps = adapt.choose(steps, recent, [0.5], 1.5)
        seen.append(steps)
    assert set(seen) == {10}


def test_a_lasting_change_is_followed_in_one_round_and_stays():
    adapt = AdaptiveLocalSteps(nominal=10)
    assert adapt.choose(10, [0.2] * 3, [0.5], 1.5) == 5
    assert adapt.choose(5, [0.2] * 3, [0.5], 1.5) == 5
    assert adapt.choose(5, [0.1] * 3, [0.5], 1.5) == 10


def test_one_slow_round_is_not_a_change():
    assert AdaptiveLocalSteps(nominal=10).choose(10, [0.1, 0.1, 0.5], [0.5], 1.5) == 10


def test_waiting_for_a_peer_does_not_make_a_worker_do_less():
    """Exchange times of a fast worker hold the wait for a slow one: only the least is its own."""
    assert AdaptiveLocalSteps(nominal=10).choose(10, [0.1], [2.0, 0.5, 1.7], 1.5) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nominal": 0}, "nominal must be a whole number >= 1, got 0"),
        ({"nominal": 4, "minimum": 0}, "minimum must be a whole number >= 1, got 0"),
        ({"nominal": 4, "minimum": 5}, "nominal must be a whole number >= 5, got 4"),
        ({"nominal": 4, "maximum": 3}, "maximum must be a whole number >= 4, got 3"),
        ({"nominal": 4.5}, "nominal must be a whole number"),
        ({"nominal": 4, "target_secs": 0.0}, "target_secs must be a finite number > 0, got 0.0"),
        ({"nominal": 4, "hysteresis": 1.0}, "hysteresis must be in [0, 1), got 1.0"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        AdaptiveLocalSteps(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [0.1], 1.0), "step_secs must hold finite times > 0, got []"),
        (([0.0], [0.1], 1.0), "step_secs must hold finite times > 0, got [0.0]"),
        (([0.1], [-1.0], 1.0), "exchange_secs must hold finite times >= 0, got [-1.0]"),
        (([0.1], [0.1], float("inf")), "target_secs must be a finite number > 0, got inf"),
    ],
)
def test_bad_measurements(arguments, message):
    adapt = AdaptiveLocalSteps(nominal=4)
    with pytest.raises(ValueError, match=re.escape(message)):
        adapt.choose(4, *arguments)
    with pytest.raises(ValueError, match="one number for each worker, got 2 and 1"):
        adapt.common_target([0.1, 0.2], [0.1])
