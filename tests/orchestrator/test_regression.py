"""A fall of held-out success: tested, confirmed, rolled back; noise is not."""

import random

import pytest

from asyncrl_jax.config_orchestrator import RegressionConfig
from asyncrl_jax.orchestrator.policies import regression
from asyncrl_jax.orchestrator.policies.regression import CONFIRM, Observed, Rollback, Score, State

CONFIG = RegressionConfig()


def score(update, success, line=0, tasks=600, confirm=False):
    name = f"{CONFIRM if confirm else ''}update-{update}-{line}"
    return Score(name, 1000 * line + update, line, update, tasks, round(success * tasks))


def judge(*scores, state=None, line=0, config=CONFIG):
    return regression.decide(state or State(), Observed(tuple(scores), line), config)


def test_a_fall_is_confirmed_once_and_then_rolled_back_to_what_a_passed_evaluation_vouches_for():
    first = judge(score(0, 0.3), score(20, 0.6))
    assert (first.state.good_update, first.state.best.update, first.confirm) == (20, 20, None)
    fallen = judge(score(40, 0.3), state=first.state)
    assert fallen.confirm.update == 40
    assert fallen.state.rollback is None
    assert fallen.log[-1].action == "suspect"
    assert fallen.log[-1].numbers["p"] < 1e-9
    confirmed = judge(score(40, 0.3, tasks=1200, confirm=True), state=fallen.state)
    assert confirmed.state.rollback == Rollback(1, 0, 20)
    assert confirmed.log[-1].action == "rollback"
    assert confirmed.confirm is None


def test_a_fall_that_is_not_confirmed_passes():
    state = judge(score(20, 0.6)).state
    state = judge(score(40, 0.5), state=state).state
    after = judge(score(40, 0.6, confirm=True, tasks=1200), state=state)
    assert (after.state.rollback, after.state.good_update, after.confirm) == (None, 40, None)


def test_noise_is_not_a_fall():
    """1,000 runs of 10 evaluations of the same weights: none is rolled back, and few are confirmed."""
    rng = random.Random(0)
    suspects = 0
    for _ in range(1000):
        state = State()
        for update in range(0, 200, 20):
            success = sum(rng.random() < 0.5 for _ in range(200)) / 200
            state = judge(score(update, success, tasks=200), state=state).state
            if state.suspect:
                suspects += 1
                again = sum(rng.random() < 0.5 for _ in range(400)) / 400
                state = judge(score(update, again, tasks=400, confirm=True), state=state).state
            assert state.rollback is None
    assert suspects <= 80, suspects


def test_an_evaluation_after_a_suspicion_vouches_for_nothing_until_it_is_settled():
    state = judge(score(20, 0.6)).state
    state = judge(score(40, 0.3), state=state).state
    later = judge(score(40, 0.3), score(60, 0.65), state=state)
    assert later.state.good_update == 20
    settled = judge(score(40, 0.62, confirm=True), score(60, 0.65), state=later.state)
    assert settled.state.good_update == 60


def test_results_of_an_abandoned_line_are_ignored_and_a_confirmation_of_it_is_not_awaited():
    state = judge(score(20, 0.6)).state
    state = judge(score(40, 0.3), state=state).state
    moved = judge(score(60, 0.1), state=state, line=1)
    assert moved.confirm is None
    assert moved.log[-1].action == "ignore"
    assert moved.state.good_update == 20


def test_a_line_that_is_being_left_is_not_rolled_back_twice():
    state = judge(score(20, 0.6)).state
    state = judge(score(40, 0.3), state=state).state
    state = judge(score(40, 0.3, confirm=True), state=state).state
    late = judge(score(60, 0.2), state=state, line=0)  # the learner has not heard of it yet
    assert late.confirm is None
    assert late.log[-1].action == "ignore"
    assert late.state.rollback == Rollback(1, 0, 20)


def test_after_too_many_rollbacks_the_run_is_paused():
    state = judge(score(20, 0.6)).state
    paused = []
    for line in range(5):
        state = judge(score(40, 0.2, line), state=state, line=line).state
        decided = judge(score(40, 0.2, line, confirm=True), state=state, line=line)
        state = decided.state
        paused.append(decided.pause)
    assert paused == [False, False, False, True, True]
    assert state.rollback.number == CONFIG.max_rollbacks


def test_off_says_so_and_rolls_nothing_back():
    config = RegressionConfig(rollback=False)
    state = judge(score(20, 0.6), config=config).state
    state = judge(score(40, 0.3), state=state, config=config).state
    decided = judge(score(40, 0.3, confirm=True), state=state, config=config)
    assert decided.state.rollback is None
    assert decided.log[-1].action == "alarm"


@pytest.mark.parametrize("equal", [0.0, 1.0])
def test_shares_without_variance_are_no_fall(equal):
    assert regression.fall_probability(score(0, equal), score(20, equal)) == 1.0


def test_an_evaluation_of_nothing_vouches_for_nothing_and_settles_no_more_than_its_own_suspicion():
    """As of an environment that is out of order: no episode came to its end."""
    state = judge(score(20, 0.6)).state
    after = judge(score(40, 0.0, tasks=0), state=state)
    assert (after.state.good_update, after.state.last, after.log[-1].action) == (20, state.last, "ignore")
    assert judge(score(0, 0.0, tasks=0)).state.good_update is None
    suspected = judge(score(60, 0.3), state=after.state).state
    assert judge(score(40, 0.0, tasks=0), state=suspected).confirm.update == 60, "still awaited"
    settled = judge(score(60, 0.0, tasks=0, confirm=True), state=suspected)
    assert (settled.confirm, settled.state.good_update, settled.state.rollback) == (None, 20, None)
    assert judge(score(80, 0.65), state=settled.state).state.good_update == 80
