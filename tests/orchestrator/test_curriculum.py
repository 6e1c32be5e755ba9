"""Weights of buckets from recent success, and the draw."""

import collections

import pytest

from asyncrl_jax.config_orchestrator import CurriculumConfig
from asyncrl_jax.orchestrator.policies import curriculum
from asyncrl_jax.orchestrator.policies.curriculum import Observed, State, draw_task

CONFIG = CurriculumConfig(adaptive=True)
BASE = {f"sums/{level}": 1.0 for level in (1, 2, 3)}


def run(successes, groups=400, state=None, config=CONFIG, base=BASE):
    """Weights after every bucket gave `groups` groups with these successes, ten at a time, in drawn order."""
    state, decided, log = state or State(), None, []
    for _ in range(groups // 10):
        observed = Observed(base, dict.fromkeys(successes, 10.0), successes)
        decided = curriculum.decide(state, observed, config)
        state, log = decided.state, log + list(decided.log)
    return decided, log


def test_too_easy_and_hopeless_buckets_both_fall():
    decided, _ = run({"sums/1": 0.99, "sums/2": 0.5, "sums/3": 0.01})
    weights = decided.weights
    assert weights["sums/2"] > 0.7
    assert weights["sums/1"] < 0.15
    assert weights["sums/3"] < 0.15
    assert sum(weights.values()) == pytest.approx(1)


def test_every_open_bucket_keeps_its_floor_and_every_bucket_its_exploratory_share():
    decided, _ = run({"sums/1": 1.0, "sums/2": 0.5, "sums/3": 0.0})
    assert min(decided.weights.values()) >= CONFIG.floor * (1 - CONFIG.exploratory_share) * 0.9
    closed = curriculum.decide(State(), Observed(BASE), CONFIG)
    assert closed.weights["sums/3"] == pytest.approx(CONFIG.exploratory_share / 3)


def test_new_buckets_enter_easy_first():
    decided, log = run({"sums/1": 0.1})
    assert [b.open for b in decided.state.buckets.values()] == [True, False, False]
    decided, log = run({"sums/1": 0.8}, state=decided.state)
    assert [b.open for b in decided.state.buckets.values()] == [True, True, False]
    assert [entry.subject for entry in log] == ["bucket:sums/2"]


def test_a_stuck_bucket_rises_for_a_while_and_then_falls():
    easy, _ = run({"sums/1": 0.9, "sums/2": 0.6})
    state, weights, log = easy.state, [], []
    for _ in range(40):
        observed = Observed(BASE, dict.fromkeys(BASE, 5.0), {"sums/1": 0.9, "sums/2": 0.6, "sums/3": 0.0})
        decided = curriculum.decide(state, observed, CONFIG)
        state, log = decided.state, log + list(decided.log)
        weights.append(decided.weights["sums/3"])
    assert max(weights) > 0.5
    assert weights[-1] < 0.05
    assert [entry.action for entry in log].count("boost") == 1


def test_static_weights_are_as_configured():
    decided, log = run({"sums/1": 1.0}, config=CurriculumConfig(), base={"sums/1": 1.0, "sums/2": 0.0, "sums/3": 3.0})
    assert decided.weights == {"sums/1": 0.25, "sums/2": 0.0, "sums/3": 0.75}
    assert log == []


def test_what_a_breaker_has_opened_is_not_drawn_and_all_open_draws_nothing():
    base = BASE | {"proofs/1": 1.0}
    one = curriculum.decide(State(), Observed(base, factors=dict.fromkeys(BASE, 0.0)), CurriculumConfig())
    assert one.weights == dict.fromkeys(BASE, 0.0) | {"proofs/1": 1.0}
    none = curriculum.decide(State(), Observed(base, factors=dict.fromkeys(base, 0.0)), CurriculumConfig())
    assert draw_task(none.weights, 0, 1) is None


def test_levels_are_drawn_by_weight():
    weights = {"arithmetic/1": 1.0, "arithmetic/2": 0.0, "arithmetic/3": 3.0}
    levels = collections.Counter(draw_task(weights, 0, count).level for count in range(4000))
    assert levels[2] == 0
    assert levels[1] / 4000 == pytest.approx(0.25, abs=0.03)
    assert draw_task(weights, 0, 17) == draw_task(weights, 0, 17)


def test_where_every_bucket_weighs_nothing_nothing_is_drawn():
    for config in (CurriculumConfig(), CurriculumConfig(adaptive=True)):
        decided = curriculum.decide(State(), Observed(base={"a/1": 0.0, "a/2": 0.0}, explore=4.0), config)
        assert decided.weights == {"a/1": 0.0, "a/2": 0.0}
