"""The arithmetic of benchmarks of whole runs, which take minutes and are not made here."""

import math

import pytest

from benchmarks._runs import crossing, interval


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
