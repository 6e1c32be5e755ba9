"""Back-pressure and speed-up: hysteresis in level and time, and quotas that hold."""

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_jax.config_orchestrator import WatermarkConfig
from asyncrl_jax.orchestrator.policies import watermark
from asyncrl_jax.orchestrator.policies.watermark import Observed, State

CONFIG = WatermarkConfig(high_updates=1.5, low_updates=0.25, dwell_s=5.0)


def run(backlogs, idle=0.5, start=0.0):
    state, decided, log = State(), None, []
    for n, backlog in enumerate(backlogs):
        decided = watermark.decide(state, Observed(start + n, backlog, 16, 3, idle), CONFIG)
        state, log = decided.state, log + list(decided.log)
    return decided, log


def test_a_growing_backlog_slows_admission_and_a_starving_learner_speeds_it_up():
    assert run([8, 16, 24, 32], idle=0.0)[0].factor == 0.5
    assert run([8, 16, 24, 32], idle=0.5)[0].factor == 1.0  # it waits for something else than groups
    assert run([0, 0, 0])[0].factor == 2.0
    assert run([0, 0, 0], idle=0.0)[0].factor == 1.0  # empty, but the learner is busy: all is well
    assert run([8, 8, 8])[0].factor == 1.0


def test_what_is_too_much_follows_the_bound_on_lag():
    """With N - A + 1 = 10, 4 updates' worth come and go; with 3, they would be older than they need."""

    def factor(bound_updates, config):
        state, decided = State(), None
        for n, backlog in enumerate([16, 32, 48, 64]):
            decided = watermark.decide(state, Observed(float(n), backlog, 16, bound_updates, 0.0), config)
            state = decided.state
        return decided.factor

    relative, absolute = WatermarkConfig(dwell_s=0.0), WatermarkConfig(dwell_s=0.0, high_updates=3.5)
    assert (factor(3, relative), factor(10, relative)) == (0.5, 1.0)
    assert relative.high_mark(1) == 2.0  # in sync all of an update's groups wait while the one before is made
    assert (factor(3, absolute), factor(10, absolute)) == (0.5, 0.5)


def test_more_ends_once_the_learner_has_its_next_update():
    """However much the bound lets be outstanding, and though the learner still idles a little."""
    state, factors = State(), []
    for n in range(40):
        backlog, idle = (0, 0.5) if n < 10 else (24, 0.07)
        decided = watermark.decide(state, Observed(float(n), backlog, 16, 10, idle), WatermarkConfig())
        state, factors = decided.state, [*factors, decided.factor]
    assert factors[9] == 2.0
    assert factors[-1] == 1.0


def test_noise_around_a_mark_changes_nothing():
    rng = random.Random(0)
    _, log = run([24 + rng.choice((-3, 3)) for _ in range(200)], idle=0.0)
    assert len(log) == 1, [entry.action for entry in log]
    assert log[0].action == "slow"
    assert log[0].numbers["backlog_updates"] >= 1.5


def test_two_changes_are_never_closer_than_the_dwell_time():
    rng = random.Random(1)
    state, at = State(), []
    for n in range(600):
        decided = watermark.decide(
            state, Observed(n * 0.5, (backlog := rng.choice((0, 60))), 16, 3, 0.0 if backlog else 0.9), CONFIG
        )
        state = decided.state
        at += [n * 0.5] * len(decided.log)
    assert len(at) > 3
    assert min(later - earlier for earlier, later in itertools.pairwise(at)) >= CONFIG.dwell_s


def test_a_clock_that_jumps_back_stands_still():
    decided, _ = run([8, 8], start=1000.0)
    later = watermark.decide(decided.state, Observed(3.0, 8, 16, 3, 0.5), CONFIG)
    assert later.state.seen_at == decided.state.seen_at
    assert later.factor == 1.0


@settings(deadline=None, max_examples=100)
@given(
    rate=st.floats(0.5, 50),
    burst=st.floats(0.5, 4),
    steps=st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 40)), min_size=20, max_size=60),
)
def test_a_quota_is_never_exceeded_by_more_than_its_burst(rate, burst, steps):
    config = WatermarkConfig(dispatch_episodes_per_s=rate, dispatch_burst_s=burst)
    quotas, now, latest, spent = {}, 0.0, 0.0, 0
    for elapsed, wanted in steps:
        now = max(now + elapsed, 0.0)
        latest = max(latest, now)
        quotas = watermark.refill(quotas, ("api",), now, config)
        groups = min(wanted, watermark.allowed(quotas, "api", 2))
        quotas = watermark.spend(quotas, "api", 2 * groups)
        spent += 2 * groups
        assert spent <= rate * (latest + burst) + 1e-6


def test_without_a_quota_nothing_is_limited():
    assert watermark.refill({}, ("api",), 0.0, WatermarkConfig()) == {}
    assert watermark.allowed({}, "api", 4) is None


def test_slow_ends_once_the_learner_waits_for_something_else_after_all():
    """What is pooled while stragglers are waited for is no sign of too much in flight."""
    state, factors = State(), []
    for n in range(40):
        decided = watermark.decide(state, Observed(float(n), 32, 16, 3, 0.0 if n < 20 else 0.5), CONFIG)
        state, factors = decided.state, [*factors, decided.factor]
    assert factors[19] == 0.5
    assert factors[-1] == 1.0
