"""What roles of a run must have been started with alike, and which of them was not.

Roles of a cluster get their settings one by one. An orchestrator with another bound or other environments than the rest
does not crash: it leads a run whose groups expire, or whose tasks nobody knows. So every role states what it was
started with, and whoever starts with something else says so by name. Text may be a secret: Redis holds digests, and the
log no text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import redis

from asyncrl_jax.config import Config, to_json
from asyncrl_jax.config_model import RUN_SETTINGS
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.steering import parse

# Settings, or starts of their names up to the dot, that more than one role acts on.
_SHARED = (
    *("mode", "seed", "model.", "environment.", "reward.", "lag.", "evaluation.", "weights.publish_every_updates"),
    *("learner.group_size", "learner.groups_per_update", "learner.num_updates", "learner.replay_ratio"),
    *("pool.size_updates", "redis.partitions", "redis.max_deliveries"),
)
# Of those, what belongs to a role or to the machine that it is on.
_OWN = (
    *("environment.endpoint_host", "environment.endpoint_port", "environment.processes", "environment.score_processes"),
    *("environment.start_timeout_s", "environment.process_leak_bytes"),
    *(f"model.{name}" for name in RUN_SETTINGS),
)


class SharedSettings:
    """Statements of all roles, newest of each."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._redis: Any = client  # Any: redis-py types a reply for all client settings at once
        self._keys = keys

    def state(self, role: str, config: Config) -> list[str]:
        """States what a role is started with, in place of what it stated before.

        Returns:
          One line for each role, itself included, that was last started otherwise.
        """
        own = _digests(config)
        lines = [
            f"{', '.join(_shown(config, name) for name in names)} here, and otherwise where the "
            f"{other} was last started: start all roles of a run with the same settings"
            for other, names in self._differing(own).items()
        ]
        self._redis.hset(self._keys.settings, role, json.dumps(own))
        return lines

    def differing(self, config: Config) -> dict[str, list[str]]:
        """Names of the settings that differ from these, by role; roles that agree are left out."""
        return self._differing(_digests(config))

    def _differing(self, own: Mapping[str, str]) -> dict[str, list[str]]:
        found = {}
        for role, text in sorted(self._redis.hgetall(self._keys.settings).items()):
            stated = parse(text, f"the settings of {role!r}")
            if isinstance(stated, dict):
                names = [name for name, digest in own.items() if stated.get(name, digest) != digest]
                if names:
                    found[role.decode(errors="replace")] = names
        return found


def _digests(config: Config) -> dict[str, str]:
    """Of every shared setting, by name."""
    return {
        name: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
        for name, value in to_json(config).items()
        if any(name == one or (one.endswith(".") and name.startswith(one)) for one in _SHARED) and name not in _OWN
    }


def _shown(config: Config, name: str) -> str:
    """As on the command line; of text the name alone."""
    value = to_json(config)[name]
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, str) for one in values):
        return f"--config.{name}"
    return f"--config.{name}={','.join(map(str, values))}"
