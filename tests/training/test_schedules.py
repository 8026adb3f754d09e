"""Learning rates: first, peak and last value of each shape."""

import jax
import numpy as np
import pytest

from training.config import ScheduleConfig
from training.schedules import make_schedule


def rates(name, steps=100, **changes):
    values = dict(learning_rate=1.0, end_learning_rate=0.1, warmup_fraction=0.1, decay_fraction=0.2)
    config = ScheduleConfig(name=name, **(values | changes))
    return np.array([float(make_schedule(config, steps)(count)) for count in range(steps + 1)])


@pytest.mark.parametrize("name", ["cosine", "constant", "wsd"])
def test_warmup_is_linear_and_ends_at_the_peak(name):
    np.testing.assert_allclose(rates(name)[:10], np.arange(1, 11) / 10, rtol=1e-6)


def test_cosine_reaches_the_end_value_in_the_last_step():
    values = rates("cosine")
    assert values[99] == values[100] == np.float32(0.1)
    assert np.all(np.diff(values[9:100]) < 0)
    # half-way between update 10 (the peak) and update 100
    np.testing.assert_allclose(values[54], 0.55, rtol=1e-6)


def test_wsd_is_flat_then_linear():
    values = rates("wsd")
    assert np.all(values[9:80] == 1.0)
    np.testing.assert_allclose(values[80:100], 1 - 0.9 * np.arange(1, 21) / 20, rtol=1e-6)
    assert values[100] == values[99]


def test_constant_stays():
    assert np.all(rates("constant")[9:] == 1.0)


def test_without_warmup_the_first_step_has_the_peak():
    assert rates("constant", warmup_fraction=0.0)[0] == 1.0


@pytest.mark.parametrize("name", ["cosine", "constant", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_shortest_runs_are_finite(name, steps):
    values = rates(name, steps=steps, warmup_fraction=0.5)
    assert np.all(np.isfinite(values)) and np.all(values > 0)


def test_traced_count_gives_the_same_bits():
    schedule = make_schedule(ScheduleConfig(), 50)
    traced = jax.jit(schedule)
    for count in (0, 1, 7, 49):
        assert traced(np.int32(count)) == schedule(count)
