"""A round on whatever JSON stands in Redis where heartbeats and a human's settings should: it goes on, and decides."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_jax.config import Config, override
from asyncrl_jax.orchestrator import memory
from asyncrl_jax.orchestrator import round as rounds
from asyncrl_jax.orchestrator.recovery import first_round
from asyncrl_jax.transport.steering import parse
from asyncrl_jax.types import LearnerState

ODD_NAMES = st.sampled_from(["0", "3", "-1", "²", "٣", "9" * 5000, "updates", ""])
NUMBERS = st.integers(-3, 3) | st.floats() | st.sampled_from([10**400, -(10**400), 2**63])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "open", "fresh", "released 1", "held", "nan", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_NAMES, inner, max_size=3),
    max_leaves=6,
)
BY_LAG = st.dictionaries(ODD_NAMES, st.lists(VALUES, min_size=3, max_size=3) | VALUES, max_size=3)
LEARNER_BEATS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("idle_share", "starved_share", "clip_fraction", "step_s"), VALUES)
    | {"by_lag": BY_LAG | VALUES},
)
ACTOR_BEATS = st.dictionaries(
    st.sampled_from(["actor-0", "actor-1", "x", ""]),
    st.dictionaries(
        st.sampled_from(["tokens_sampled", "paused_s", "generating", "running", "drained", "evaluating"]), VALUES
    ),
    max_size=2,
)
BY_HAND = [
    "N",
    "mode",
    "temperature",
    "learning_rate_scale",
    "paused",
    "draining",
    "archive_reset",
    "resumed",
    "actors",
    "breaker.environment:arithmetic",
    "breaker.actor:actor-0",
    "review.arithmetic/1",
    "weight.arithmetic/1",
    "drain.actor-0",
    "unknown",
]
OPERATOR = st.dictionaries(st.sampled_from(BY_HAND), VALUES, max_size=4)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(LEARNER_BEATS, ACTOR_BEATS, OPERATOR), min_size=1, max_size=3))
def test_whatever_stands_in_redis_a_round_decides_and_its_states_survive_a_change_of_leader(looks):
    config = Config()
    scaling = dataclasses.replace(config.orchestrator.autoscale, enabled=True)
    config = dataclasses.replace(config, orchestrator=dataclasses.replace(config.orchestrator, autoscale=scaling))
    states = rounds.initial_states(config)
    for n, (learner_beat, actor_beats, operator) in enumerate(looks):
        scene = rounds.Scene(
            float(n), LearnerState(0, n, n, "training"), learner_beat, actor_beats, 3, operator=operator
        )
        states, plan, decisions = rounds.decide(states, scene, config)
        assert 0 < plan.token_updates <= config.orchestrator.tuning.max_token_updates
        assert all(weight >= 0 and math.isfinite(weight) for weight in plan.weights.values())
        assert math.isfinite(plan.temperature)
        for decision in decisions:
            json.dumps(dataclasses.asdict(decision), allow_nan=False)
        states = memory.load(rounds.initial_states(config), memory.dump(states))


def test_a_clock_that_jumps_ahead_and_is_put_back_stops_nothing():
    config = override(Config(), {"orchestrator.watermark.dispatch_episodes_per_s": 10.0})
    states, learner = rounds.initial_states(config), LearnerState(0, 0, 0, "training")

    def look(now, **target):
        nonlocal states
        observations = ({"targets": {"environment:arithmetic": target}},) if target else ()
        scene = rounds.Scene(now, learner, {}, {}, 0, observations=observations)
        states, plan, _ = rounds.decide(states, scene, config)
        states = memory.load(rounds.initial_states(config), memory.dump(states))
        return plan

    look(1000.0)
    look(1000.0 + 86400)
    spent = {name: dataclasses.replace(quota, episodes=0.0) for name, quota in states.quotas.items()}
    states = dataclasses.replace(states, quotas=spent)
    look(1001.0, infrastructure={"x": 20.0})
    assert states.breaker.phase("environment:arithmetic") == "open"
    plan = look(1012.0)
    assert states.breaker.phase("environment:arithmetic") == "half_open"
    assert plan.quotas["arithmetic"].episodes == 20.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("breaker", '{"breakers": {"x": {"phase": "ajar"}}}'),
        ("watermark", '{"level": "odd", "changed_at": 1e12}'),
        ("watermark", '{"rate": 1%s}' % ("0" * 400)),
        ("lag", '{"token_updates": 1%s}' % ("0" * 400)),
        ("lag", "[" * 100_000),
    ],
)
def test_a_state_that_no_policy_can_go_on_from_starts_anew_and_the_others_stay(name, value):
    found = {name: parse(value.encode(), name), "issued": {"arithmetic/1": 7}}
    initial = rounds.initial_states(Config())
    loaded = memory.load(initial, {key: one for key, one in found.items() if one is not None})
    scene = rounds.Scene(1.0, LearnerState(0, 0, 0, "training"), {}, {}, 0)
    states, plan, _ = first_round(loaded, scene, Config())
    assert states.issued == {"arithmetic/1": 7}
    assert plan.token_updates == 4
