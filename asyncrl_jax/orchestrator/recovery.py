"""States of Redis that fit their types and yet no policy can go on from: the one that is at fault starts anew.

Without this, whoever takes over would fail as the leader before it did, for ever.
"""

from __future__ import annotations

import dataclasses
import logging

from asyncrl_jax.config import Config
from asyncrl_jax.orchestrator import round as rounds
from asyncrl_jax.types import Decision

log = logging.getLogger(__name__)

_UNFIT = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError)


def first_round(
    states: rounds.States, scene: rounds.Scene, config: Config
) -> tuple[rounds.States, rounds.Plan, tuple[Decision, ...]]:
    """`rounds.decide` on states that were read from Redis."""
    try:
        return rounds.decide(states, scene, config)
    except _UNFIT as error:
        initial = rounds.initial_states(config)
        for field in dataclasses.fields(rounds.States):
            mended = dataclasses.replace(states, **{field.name: getattr(initial, field.name)})
            try:
                decided = rounds.decide(mended, scene, config)
            except _UNFIT:
                continue
            log.error("the state %s in Redis is none and starts anew: %r", field.name, error)
            return decided
        log.error("the states in Redis are none and start anew: %r", error)
        return rounds.decide(initial, scene, config)
