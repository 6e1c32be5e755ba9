"""A round on whatever JSON stands in Redis where heartbeats and a human's settings should: it goes on, and decides."""

import dataclasses
import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_jax.config import Config
from asyncrl_jax.orchestrator import memory
from asyncrl_jax.orchestrator import round as rounds
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
