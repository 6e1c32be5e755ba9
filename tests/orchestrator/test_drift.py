"""Drift of a bucket from its own history, held for a human; collapse, answered with exploration."""

import random

import pytest

from asyncrl_jax.config_orchestrator import DriftConfig
from asyncrl_jax.orchestrator.policies import drift
from asyncrl_jax.orchestrator.policies.drift import Observed, Sample, State

HOLD = DriftConfig(action="hold", window_groups=8, min_windows=4)


def sample(reward=0.5, success=0.5, length=10.0, entropy=1.0, spread=0.2, repetition=0.1, groups=8.0):
    episodes = groups * 8
    tokens = episodes * length
    return Sample(
        groups=groups,
        episodes=episodes,
        tokens=tokens,
        reward=reward * episodes,
        reward_squared=(reward**2 + spread**2) * episodes,
        group_variance=spread**2 * groups,
        successes=success * episodes,
        repetition=repetition * episodes,
        surprisal=entropy * tokens,
    )


def run(samples, config=HOLD, state=None, **observed):
    state, log, decided = state or State(), [], None
    for one in samples:
        decided = drift.decide(state, Observed({"sums/1": one}, **observed), config)
        state, log = decided.state, log + list(decided.log)
    return decided, log


def usual(windows=12, seed=0):
    rng = random.Random(seed)
    return [sample(reward=0.5 + rng.gauss(0, 0.03), success=0.5 + rng.gauss(0, 0.03)) for _ in range(windows)]


def test_a_reward_hole_is_named_and_held_until_a_human_releases_it():
    decided, log = run(usual())
    assert log == []
    decided, log = run([sample(reward=1.4, success=0.5)], state=decided.state)
    assert decided.factors == {"sums/1": 0.0}
    (entry,) = log
    assert (entry.action, entry.subject) == ("hold", "bucket:sums/1")
    assert "reward_rise" in entry.reason
    assert entry.numbers["value"] == pytest.approx(1.4)
    decided, log = run([sample()] * 3, state=decided.state)
    assert decided.factors == {"sums/1": 0.0}, "held until released, however it looks now"
    assert log == []
    released = drift.decide(decided.state, Observed(released=frozenset({"sums/1"})), HOLD)
    assert released.factors == {}
    assert released.log[0].action == "release"
    decided, log = run([sample(reward=1.4)] * 8, state=released.state)
    assert log == [], "what a human accepted is the new normal"


@pytest.mark.parametrize(("action", "factor"), [("alarm", {}), ("lower", {"sums/1": HOLD.lowered_weight})])
def test_an_alarm_or_a_lowered_weight_ends_by_itself(action, factor):
    config = DriftConfig(action=action, window_groups=8)
    decided, _ = run(usual(), config)
    decided, log = run([sample(reward=1.4)] * 2, config, decided.state)
    assert decided.factors == factor
    assert [entry.action for entry in log] == [action]
    decided, log = run([sample()], config, decided.state)
    assert decided.factors == {}
    assert [entry.action for entry in log] == ["recover"]


def test_honest_learning_is_not_drift():
    """Reward and success rise from nothing to all within 40 observations, as in the quickstart."""
    rng = random.Random(0)
    samples = []
    for n in range(40):
        share = min(n / 30, 1.0)
        samples.append(sample(reward=1.5 * share + rng.gauss(0, 0.05), success=share, entropy=1.2 - share))
    _, log = run(samples)
    assert [entry.reason for entry in log] == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"reward": 0.0, "success": 0.0}, "_fall"),
        ({"length": 30.0}, "length_rise"),
        ({"repetition": 0.9}, "repetition_rise"),
        ({"entropy": 0.3, "success": 0.9}, "_"),
    ],
)
def test_other_measures_drift_too(change, name):
    decided, _ = run(usual())
    _, log = run([sample(**change)], state=decided.state)
    assert name in log[0].reason


def test_collapse_is_named_and_answered_with_exploration_until_it_is_over():
    flat = sample(reward=0.1, success=0.0, entropy=0.001, spread=0.0)
    decided, log = run([flat])
    assert (decided.temperature, decided.explore > 1) == (HOLD.explore_temperature, True)
    assert [entry.action for entry in log] == ["collapse"]
    assert log[0].numbers["entropy"] == pytest.approx(0.001)
    decided, log = run([sample(reward=0.1, success=0.1, entropy=0.5)], state=decided.state)
    assert (decided.temperature, decided.explore) == (1.0, 1.0)
    assert [entry.action for entry in log] == ["recover"]


def test_a_solved_bucket_has_not_collapsed():
    decided, log = run([sample(reward=1.5, success=1.0, entropy=0.001, spread=0.0)])
    assert decided.temperature == 1.0
    assert log == []


def test_a_human_may_hold_a_bucket():
    decided = drift.decide(State(), Observed(held=frozenset({"sums/2"})), HOLD)
    assert decided.factors == {"sums/2": 0.0}


def test_the_collapse_of_a_bucket_that_is_not_drawn_is_not_answered():
    """It gets no more groups, so nothing could ever end the answer."""
    flat = drift.Sample(groups=32, episodes=64, tokens=640, surprisal=0.1)
    collapsed = drift.decide(drift.State(), drift.Observed({"a/1": flat}), DriftConfig())
    assert collapsed.temperature > 1
    decided = drift.decide(collapsed.state, drift.Observed(drawn=frozenset({"a/2"})), DriftConfig())
    assert (decided.temperature, decided.explore) == (1.0, 1.0)


def test_the_collapse_of_a_bucket_that_is_held_is_answered_until_it_is_released():
    """The policy is one: what collapsed in a bucket that waits for a human collapses elsewhere."""
    flat = drift.Sample(groups=32, episodes=64, tokens=640, surprisal=0.1)
    collapsed = drift.decide(drift.State(), drift.Observed({"a/1": flat}), DriftConfig())
    held = drift.decide(collapsed.state, drift.Observed(held=frozenset({"a/1"})), DriftConfig())
    assert held.temperature > 1
    released = drift.decide(held.state, drift.Observed(released=frozenset({"a/1"})), DriftConfig())
    assert released.temperature == 1.0
