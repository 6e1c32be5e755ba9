"""The tuned lag bound: up when the learner starves and old data is good, down when it is bad, settled in between."""

import math
import random

import pytest

from asyncrl_jax.config_orchestrator import TuningConfig
from asyncrl_jax.orchestrator.policies import lag
from asyncrl_jax.orchestrator.policies.lag import LagStatistics, Observed, State

CONFIG = TuningConfig(enabled=True, min_token_updates=2, max_token_updates=12, window_updates=5)


def by_lag(bound, decay, kl=0.001):
    """Data whose worth falls with its age: ESS exp(−decay · lag), KL in proportion to the lag."""
    return {n: LagStatistics(100.0, math.exp(-decay * n), kl * n) for n in range(bound + 1)}


def simulate(decay, need, windows=200, noise=0.0, initial=4, config=CONFIG, seed=0):
    """N after every window, of a learner that idles 1 − N/need of its time."""
    rng = random.Random(seed)
    state, bounds, log = State(initial), [initial], []
    for window in range(windows):
        bound = bounds[-1]
        idle = max(0.0, 1 - bound / need) + noise * rng.random()
        data = by_lag(bound, max(decay * (1 + noise * rng.uniform(-1, 1)), 0.0))
        decided = lag.decide(state, Observed(window * 5, data, 0.02, idle), config, initial=initial, least=2)
        state = decided.state
        bounds.append(decided.token_updates)
        log += decided.log
    return bounds, log


def test_n_rises_while_the_learner_starves_and_old_data_is_good():
    bounds, log = simulate(decay=0.001, need=9)
    assert bounds[-1] == 9  # the least N at which the learner idles less than a tenth of its time
    assert {entry.action for entry in log} == {"raise"}
    assert {"ess", "kl", "clip_fraction", "idle_share", "before", "after"} <= log[0].numbers.keys()


def test_n_falls_to_where_the_oldest_data_is_worth_training_on():
    bounds, _ = simulate(decay=0.1, need=4, initial=12)
    assert bounds[-1] < 6
    upper = [n for n in range(bounds[-1] + 1) if n >= bounds[-1] / 2]
    assert sum(math.exp(-0.1 * n) for n in upper) / len(upper) >= CONFIG.ess_low


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("decay", [0.02, 0.05, 0.1])
def test_n_settles_instead_of_swinging(decay, noise):
    """A learner that always starves, on data that is bad past some age: N stays within 1 of its edge, and the number
    of changes grows with the logarithm of time, not with time."""
    bounds, _ = simulate(decay=decay, need=100, windows=2000, noise=noise)
    changes = [n for n in range(1, len(bounds)) if bounds[n] != bounds[n - 1]]
    assert len([n for n in changes if n > 1000]) <= 8
    assert max(bounds[500:]) - min(bounds[500:]) <= 2


def test_n_never_leaves_its_range():
    bounds, _ = simulate(decay=0.0, need=1000, windows=300)
    assert max(bounds) == CONFIG.max_token_updates
    bounds, _ = simulate(decay=2.0, need=1000, windows=300)
    assert min(bounds) == CONFIG.min_token_updates


def test_by_hand_wins_and_is_held_within_what_is_safe():
    observed = Observed(5, by_lag(4, 0.0), 0.0, 0.9, pinned=3)
    decided = lag.decide(State(4, 0), observed, CONFIG, initial=4, least=2)
    assert decided.token_updates == 3
    assert (decided.log[0].action, decided.log[0].subject) == ("set", "N")
    pinned = Observed(5, {}, 0.0, 0.0, pinned=1000)
    assert lag.decide(State(4, 0), pinned, CONFIG, initial=4, least=2).token_updates == CONFIG.max_token_updates
    assert lag.decide(State(4, 0), Observed(5, {}, 0, 0, pinned=0), CONFIG, initial=4, least=2).token_updates == 2


def test_off_means_the_setting_of_the_run():
    observed = Observed(50, by_lag(4, 0.0), 0.0, 0.9)
    assert lag.decide(State(4), observed, TuningConfig(), initial=4, least=2).token_updates == 4


def test_a_policy_that_has_run_off_gets_fresh_data_only_until_it_is_back():
    state = State(4, 0)
    far = lag.decide(state, Observed(5, by_lag(4, 0.0, kl=0.06), 0.0, 0.0), CONFIG, initial=4, least=2)
    assert far.fresh
    assert far.log[0].action == "wait_for_fresh"
    back = lag.decide(far.state, Observed(10, by_lag(0, 0.0), 0.0, 0.5), CONFIG, initial=4, least=2)
    assert not back.fresh
    assert back.log[0].action == "resume"
    by_hand = lag.decide(state, Observed(5, by_lag(4, 0.0), 0, 0, fresh=True), CONFIG, initial=4, least=2)
    assert by_hand.fresh


def test_n_by_hand_leaves_the_mode_for_fresh_data_to_the_rule():
    def look(state, update, kl, config=CONFIG, pinned=4):
        observed = Observed(update, {1: LagStatistics(100.0, 0.9, kl)}, 0.0, 0.0, pinned=pinned)
        return lag.decide(state, observed, config, initial=4, least=2)

    entered = look(State(4, 0), 5, 0.3)
    assert entered.fresh
    assert [entry.action for entry in entered.log] == ["wait_for_fresh"]
    left = look(entered.state, 10, 0.0)
    assert not left.fresh
    assert left.token_updates == 4
    off = TuningConfig(enabled=False)
    assert not look(entered.state, 10, 0.0, off, None).fresh, "no rule would ever end it"


def test_n_is_within_limits_that_were_set_anew():
    config = TuningConfig(enabled=True, max_token_updates=5)
    observed = Observed(100, by_lag(4, 0.05), 0.0, 0.0)
    assert lag.decide(State(8, 100), observed, config, initial=4, least=2).token_updates == 5
