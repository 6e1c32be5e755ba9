"""The arithmetic of benchmarks of whole runs, which take minutes and are not made here."""

import asyncio
import math

import pytest

from benchmarks import pooling
from benchmarks._runs import crossing, interval
from benchmarks.async_speedup import GATE, WINDOW, Sampled, gate_passed, sampled_in_sync


def test_the_gate_is_where_the_curve_first_crosses_it():
    curve = [(0, 0.4), (10, 0.6), (20, 1.0), (30, 0.8), (40, 1.0)]
    assert crossing(curve, 0.5) == 5
    assert crossing(curve, 0.9) == 17.5
    assert crossing(curve, 0.3) == 0
    assert crossing(curve, 1.1) is None
    assert crossing([], 0.5) is None


def test_the_interval_is_of_the_mean_log_ratio():
    mean, low, high = interval([0.5, 2.0])
    assert mean == pytest.approx(1)
    assert math.log(high) == pytest.approx(6.314 * math.log(2))  # of two, one degree of freedom; stdev √2 log 2
    assert low == pytest.approx(1 / high)
    assert math.isnan(interval([0.5])[1])


def test_the_gate_counts_trajectories_and_not_updates():
    """The share of what the weights of the window sampled, whatever that of an update with few of them."""
    low, high, few, none = Sampled(128, 64), Sampled(128, 121.6), Sampled(1, 0), Sampled(0, 0)
    needed = next(n for n in range(WINDOW + 1) if 0.95 * n + 0.5 * (WINDOW - n) >= GATE * WINDOW)
    assert 0 < needed < WINDOW
    assert gate_passed([low] * WINDOW + [high] * 20) == WINDOW + needed - 1
    assert gate_passed([low] * 40) is None
    assert gate_passed([high] * 10 + [few]) == WINDOW - 1
    assert gate_passed([few] * 4 + [high] * 10) == WINDOW - 1
    assert gate_passed([high, none] * 10) == WINDOW - 1  # weights that nothing was sampled with
    assert gate_passed([high] * (WINDOW - 1)) is None
    assert gate_passed([none] * 20) is None


def test_what_a_sync_update_trains_on_was_sampled_by_the_weights_before_it():
    rows = [{"success_all": 0.25, "trajectories_all": 128.0}, {}, {"success_all": 0.5, "trajectories_all": 64.0}]
    assert sampled_in_sync(rows) == [(128, 32), (0, 0), (64, 32)]


def test_both_ways_of_the_pooling_benchmark_play_episodes():
    asyncio.run(pooling.pooled(2, 2))
    asyncio.run(pooling.one_each(1, 1))
