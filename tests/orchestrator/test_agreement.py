"""A process reward model that prefers failures is named and taken out; one that agrees is left alone."""

import random

import pytest

from asyncrl_jax.actor.tally import Tally
from asyncrl_jax.config import Config, override
from asyncrl_jax.config_orchestrator import AgreementConfig
from asyncrl_jax.orchestrator import round as rounds
from asyncrl_jax.orchestrator.policies import agreement
from asyncrl_jax.orchestrator.policies.agreement import Contrasts, Observed, State
from asyncrl_jax.types import LearnerState
from tests.actor.process_rewards.test_steps import member
from tests.builders import make_ticket

CONFIG = AgreementConfig()


def group(rng, prefers, *, size=8, success=0.5, noise=0.25):
    """Contrast of a group whose model scores successes `prefers` higher, with noise on each score, all in [0, 1]."""
    ended = [rng.random() < success for _ in range(size)]
    if all(ended) or not any(ended):
        return Contrasts()
    hardness = rng.uniform(-0.2, 0.2)
    scores = [min(max(0.5 + hardness + prefers * (won - 0.5) + rng.gauss(0, noise), 0.0), 1.0) for won in ended]
    won = [score for score, yes in zip(scores, ended, strict=True) if yes]
    lost = [score for score, yes in zip(scores, ended, strict=True) if not yes]
    gap = sum(won) / len(won) - sum(lost) / len(lost)
    return Contrasts(1.0, gap, gap * gap)


def run(groups, config=CONFIG, state=None, weight=0.4, **observed):
    """(the last decision, all of the log) after these groups of bucket sums/1, one look each."""
    state, log, decided = state or State(), [], None
    for one in groups:
        decided = agreement.decide(state, Observed({"sums/1": one}, weight, **observed), config)
        state, log = decided.state, log + list(decided.log)
    return decided, log


def groups(prefers, count, seed=0, **how):
    rng = random.Random(seed)
    return [group(rng, prefers, **how) for _ in range(count)]


def test_a_model_that_prefers_failures_is_named_with_its_numbers_and_held_out():
    decided, log = run(groups(-0.2, 800))
    (entry,) = log  # said once, however many windows repeat it
    assert (entry.policy, entry.action, entry.subject) == ("agreement", "hold_out", "bucket:sums/1")
    assert entry.reason == "prefers_failures: the process model prefers failures"
    assert entry.numbers["gap"] == pytest.approx(-0.2, abs=0.1)
    assert entry.numbers["gap"] + 4 * entry.numbers["standard_error"] < 0
    assert (entry.numbers["weight"], entry.numbers["groups"] >= 32) == (0.4, True)
    assert (decided.held_out, decided.factors) == (("sums/1",), {})


def test_a_model_that_says_nothing_is_named_as_that():
    for how in ({"noise": 0.25}, {"noise": 0.0}):
        _, log = run(groups(0.0, 800, **how))
        assert [entry.reason for entry in log] == [
            "uninformative: the process model does not tell success from failure"
        ], how


def test_an_alarm_ends_when_the_model_agrees_and_a_new_one_is_said_again():
    decided, _ = run(groups(-0.2, 100))
    decided, log = run(groups(0.2, 200, seed=1), state=decided.state)
    assert [entry.action for entry in log] == ["recover"]
    assert decided.held_out == ()
    decided, log = run(groups(-0.2, 200, seed=2), state=decided.state)
    assert [entry.action for entry in log] == ["hold_out"]
    assert decided.held_out == ("sums/1",)


@pytest.mark.parametrize(
    ("action", "held_out", "factors"),
    [("alarm", (), {}), ("hold_out", ("sums/1",), {}), ("hold", ("sums/1",), {"sums/1": 0.0})],
)
def test_what_an_alarm_does_is_configured(action, held_out, factors):
    decided, log = run(groups(-0.3, 100), AgreementConfig(action=action))
    assert [entry.action for entry in log] == [action]
    assert (decided.held_out, decided.factors) == (held_out, factors)


def test_a_held_bucket_waits_for_a_human_and_is_then_judged_anew():
    config = AgreementConfig(action="hold")
    decided, _ = run(groups(-0.3, 100), config)
    decided, log = run(groups(0.3, 200), config, decided.state)
    assert (log, decided.factors) == ([], {"sums/1": 0.0}), "late groups release nothing"
    released = agreement.decide(decided.state, Observed({}, 0.4, frozenset({"sums/1"})), config)
    assert ([entry.action for entry in released.log], released.factors, released.held_out) == (["release"], {}, ())
    decided, log = run(groups(-0.3, 100), config, released.state)
    assert [entry.action for entry in log] == ["hold"]


def test_a_model_without_weight_is_not_judged_nor_groups_that_ended_alike():
    assert run(groups(-0.5, 200), weight=0.0)[0].state == State()
    assert run(groups(-0.5, 200, success=0.0))[0].state == State()


def alarms(prefers, num_windows, seeds, **how):
    """Alarms over `seeds` runs of `num_windows` times the shortest window."""
    found = [run(groups(prefers, num_windows * CONFIG.window_groups, seed, **how))[1] for seed in range(seeds)]
    return [sum(entry.action == "hold_out" for entry in log) for log in found]


def test_false_alarms_are_rare_and_true_ones_are_not_missed():
    """300 runs of 640 groups each, as far as they have contrasts.

    Fair models that prefer successes by 0.1 (twice `min_gap`) and by 0.3: no alarm in 300 runs, with few and with many
    successes. A model that prefers failures by 0.1: an alarm in every run.
    """
    assert sum(alarms(0.1, 20, 150)) == 0
    assert sum(alarms(0.3, 20, 75, success=0.15)) == 0
    assert sum(alarms(0.3, 20, 75, success=0.85)) == 0
    assert min(alarms(-0.1, 20, 100)) >= 1


# ------------------------------------------------------------------------------------------ in a round of all policies


def scene(observations, **fields):
    learner = LearnerState(line=0, update=3, version=3, phase="training")
    return rounds.Scene(1.0, learner, {}, {}, 0, observations=observations, **fields)


def observation(rng, prefers, count=100):
    sums = Contrasts()
    for _ in range(count):
        sums = sums.plus(group(rng, prefers))
    named = {"contrasts": sums.groups, "step_gap": sums.gap, "step_gap_squared": sums.gap_squared}
    return {"actor": "a", "buckets": {"arithmetic/2": {"groups": float(count), "episodes": 8.0 * count} | named}}


def test_a_round_tells_actors_what_is_held_out_and_draws_the_bucket_no_more_where_that_is_asked():
    for action, share in (("hold_out", 1 / 3), ("hold", 0.0)):
        config = override(Config(), {"orchestrator.agreement.action": action})
        states = rounds.initial_states(config)
        states, plan, log = rounds.decide(states, scene((observation(random.Random(0), -0.3),)), config)
        assert [entry.policy for entry in log if entry.policy == "agreement"] == ["agreement"]
        assert plan.directives.steps_held_out == ("arithmetic/2",)
        assert plan.weights["arithmetic/2"] == pytest.approx(share)
        released = {"review.arithmetic/2": "released 1"}
        _, plan, log = rounds.decide(states, scene((), operator=released), config)
        assert plan.directives.steps_held_out == ()
        assert plan.weights["arithmetic/2"] == pytest.approx(1 / 3)


def test_actors_and_orchestrator_name_the_sums_alike():
    tally = Tally("a")
    assert tally.take() is None
    tally.group(make_ticket("1-1", level=2), [member(1.0, 0.2), member(0.0, 0.7)])
    samples, _ = rounds.fold([tally.take()])
    assert rounds._contrasts(samples)["arithmetic/2"].mean == pytest.approx(-0.5)
