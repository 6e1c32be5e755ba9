"""The arithmetic of benchmarks of whole runs, which take minutes and are not made here."""

import asyncio
import math

import pytest

from benchmarks import pooling
from benchmarks._runs import crossing, interval
from benchmarks.async_speedup import GATE, WINDOW, gate_reached


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
    """The share of those that arrived in the window, whatever that of an update with few of them."""
    low, high = ({"success_all": share, "trajectories_all": 128.0} for share in (0.5, 0.95))
    needed = next(n for n in range(WINDOW + 1) if 0.95 * n + 0.5 * (WINDOW - n) >= GATE * WINDOW)
    assert 0 < needed < WINDOW
    assert gate_reached([low] * WINDOW + [high] * 20) == WINDOW + needed
    assert gate_reached([low] * 40) is None
    few = {"success_all": 0.0, "trajectories_all": 1.0}
    assert gate_reached([high] * 10 + [few]) == WINDOW
    assert gate_reached([few] * 4 + [high] * 10) == WINDOW
    assert gate_reached([high] * (WINDOW - 1)) is None
    assert gate_reached([{}] * 20) is None  # nothing has arrived


def test_both_ways_of_the_pooling_benchmark_play_episodes():
    asyncio.run(pooling.pooled(2, 2))
    asyncio.run(pooling.one_each(1, 1))
