"""What the scaling policy is told of a fleet of several classes."""

import pytest

from asyncrl_jax.config import Config, override
from asyncrl_jax.orchestrator import round as rounds
from asyncrl_jax.orchestrator.policies.autoscale import State
from asyncrl_jax.types import LearnerState


def test_the_share_of_slots_in_use_counts_each_member_by_the_slots_of_its_class():
    config = override(
        Config(),
        {
            "orchestrator.autoscale.enabled": True,
            "orchestrator.fleet.classes": ("cheap:1", "dear"),
            "orchestrator.fleet.class_settings": ("cheap.slots=10", "dear.slots=90", "dear.episodes=900"),
        },
    )
    beats = {"cheap-0": {"running": 10}, "dear-0": {"running": 90, "generating": 45}}
    scene = rounds.Scene(0.0, LearnerState(0, 1, 1, "training"), {}, beats, 0)
    observed = rounds._scaling(State(2, 2, 1), scene, config, "normal", 4)
    assert observed.busy == pytest.approx(0.55), "10 of 10, and 45 of 90: more episodes than slots is no more work"
    assert observed.slots == {"cheap": 10, "dear": 90}
