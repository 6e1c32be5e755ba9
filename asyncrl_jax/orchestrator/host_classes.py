"""What the actors of each class of hosts are at, summed over their heartbeats."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from asyncrl_jax.config_fleet import FleetConfig
from asyncrl_jax.orchestrator.round import finite


@dataclasses.dataclass
class ClassSeen:
    """Of the actors that show signs of life."""

    actors: int = 0
    episodes: int = 0
    tokens_per_s: float = 0.0
    accelerator_busy: float = 0.0  # mean share of their time in which their engines computed


def seen_by_class(beats: Mapping[str, Mapping[str, Any]], fleet: FleetConfig) -> dict[str, ClassSeen]:
    """By class, in the order of the classes. Args: beats: of actors, by id."""
    seen = {one.name: ClassSeen() for one in fleet.host_classes}
    shares = collections.defaultdict[str, list[float]](list)
    for actor, beat in beats.items():
        if (name := fleet.class_of(actor)) in seen:
            found = seen[name]
            found.actors += 1
            found.episodes += int(finite(beat.get("running")))
            found.tokens_per_s += finite(beat.get("tokens_per_s"))
            shares[name].append(finite(beat.get("accelerator_busy")))
    for name, each in shares.items():
        seen[name].accelerator_busy = sum(each) / len(each)
    return seen
