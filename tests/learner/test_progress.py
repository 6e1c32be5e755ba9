import pytest

from asyncrl_jax.learner.progress import Pace


def test_an_update_that_compiles_leaves_no_trace_in_the_pace():
    """Admission reckons with these times: one of 30 s among updates of 1 s would keep it shallow for many."""
    pace = Pace()
    assert (pace.update_s, pace.step_s) == (0.0, 0.0)
    pace.updated(40.0, 30.0, 10.0, 10.0)
    assert pace.step_s == 30.0  # all that is known
    pace.updated(1.5, 1.0, 0.5, 0.0)
    assert (pace.update_s, pace.step_s) == (1.5, 1.0)


def test_the_pace_follows_a_learner_that_becomes_slower():
    pace = Pace()
    for seconds in (1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0):
        pace.updated(seconds, seconds, 0.0, 0.0)
    assert pace.step_s == 3.0


def test_shares_are_of_the_time_between_updates():
    pace = Pace()
    for _ in range(60):
        pace.updated(2.0, 1.0, 1.0, 0.5)
    assert pace.idle_share == pytest.approx(0.5, abs=1e-3)
    assert pace.starved_share == pytest.approx(0.25, abs=1e-3)
