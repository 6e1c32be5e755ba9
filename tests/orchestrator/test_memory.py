"""What one orchestrator leaves to the next: every state comes back as it was, and what does not fit starts anew."""

from __future__ import annotations

import dataclasses
import json
import time

from asyncrl_jax.config import Config
from asyncrl_jax.orchestrator import memory
from asyncrl_jax.orchestrator import round as rounds
from asyncrl_jax.orchestrator.policies import autoscale, breaker, curriculum, drift, lag, regression, watermark
from asyncrl_jax.types import LearnerState

SCORE = regression.Score("update-20", 20, 0, 20, 100, 60)
STATES = rounds.States(
    lag=lag.State(5, 40, 1, True, (6, 2, 4)),
    autoscale=autoscale.State(5, 3, 2, 6, 7.0, 6.5, True, 4.0, 6.0, None, 8.0, 0.25, 0.5, 0.75),
    watermark=watermark.State("slow", 3.5, 1.2, -0.1, 9.0),
    curriculum=curriculum.State({"sums/1": curriculum.Bucket(0.4, 12.0, True, 0.5, 3.0, True)}),
    breaker=breaker.State(
        {"actor:a": breaker.Breaker("open", 2.0, breaker.Tally(1, 2.0, {"x": 1.0}), replaced_at=(1.0, 2.0))},
        {"actor:b": 3.5},
        {"actor:b": 4.0},
        {"actor:b": 5.0},
        6.0,
        {"a": 3.0},
        {"a": 4.0},
        7.0,
    ),
    drift=drift.State({"sums/1": drift.Bucket(drift.Sample(1.0), {"reward": drift.History(3, 0.5, 0.1)}, "x", True)}),
    regression=regression.State(SCORE, None, 20, SCORE, ("a", "b"), regression.Rollback(1, 0, 20), 1),
    quotas={"sums": watermark.Quota(1.5, 2.0)},
    issued={"sums/1": 3},
    orders={"a": 2},
    marks={"resumed": "x"},
    expire_before=(0, 6),
    halted="regression",
)


def test_every_state_survives_json():
    initial = rounds.initial_states(Config())
    assert memory.load(initial, json.loads(json.dumps(memory.dump(STATES)))) == STATES
    assert memory.load(initial, json.loads(json.dumps(memory.dump(initial)))) == initial
    assert memory.load(initial, {}) == initial


def test_what_does_not_fit_starts_anew_and_the_rest_stays():
    found = json.loads(json.dumps(memory.dump(STATES))) | {"breaker": {"breakers": [1]}, "lag": "x", "halted": 3}
    loaded = memory.load(rounds.initial_states(Config()), found)
    initial = rounds.initial_states(Config())
    assert loaded == dataclasses.replace(STATES, breaker=initial.breaker, lag=initial.lag, halted="")


def test_the_cost_of_a_round_grows_linearly_with_actors():
    def cost_s(actors):
        states, best = rounds.initial_states(Config()), float("inf")
        for n in range(4):
            beats = {f"a{i}": {"tokens_sampled": i * n, "generating": 3} for i in range(actors)}
            scene = rounds.Scene(float(n), LearnerState(0, n, n, "training"), {}, beats, 3)
            begun = time.process_time()
            states, _, _ = rounds.decide(states, scene, Config())
            memory.dump(states)
            best = min(best, time.process_time() - begun)
        return best

    assert cost_s(8000) < 40 * cost_s(400), "twenty times the actors, with room for noise; quadratic would be 400"
