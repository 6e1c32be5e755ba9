"""Environments of the package `verifiers` (PyPI), not to be mixed up with verifiers of answers: the actor's side.

--config.environment.name=verifiers:<id>, with arguments in --config.environment.arguments.

Such an environment drives a client itself, so it is played like an agent: in a process of `EnvironmentProcesses` that
loads it (`verifiers_player`), against the recording endpoint of the actor. The reward of its rubric is `final`. The
package itself is imported there only.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import importlib.util
import math
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from asyncrl_jax.actor.envs.agent import AgentProgram, checked_reward
from asyncrl_jax.actor.envs.isolated import EnvironmentDied, EnvironmentProcesses, IsolationLimits, Known
from asyncrl_jax.actor.envs.third_party import read_arguments
from asyncrl_jax.actor.services import Services
from asyncrl_jax.config_environment import EnvironmentConfig
from asyncrl_jax.types import Task


class RubricFailed(ValueError):
    """A rubric has no reward for an episode: one of its functions raised, or returned no number."""


class RubricMeans:
    """Means of what the functions of a rubric said, over the episodes since they were last asked for."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = collections.defaultdict(float)
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Counts one episode; what is no number is left out."""
        for name, value in metrics.items():
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                continue
            self._sums[name] += value
            self._counts[name] += 1

    def take(self) -> dict[str, float]:
        """By `rubric/<function>`; without those that nobody asked."""
        means = {f"rubric/{name}": self._sums[name] / count for name, count in self._counts.items()}
        self._sums.clear()
        self._counts.clear()
        return means


def module_name(environment_id: str) -> str:
    """Of `owner/name@version`, as the package itself finds it."""
    return environment_id.rpartition("/")[2].partition("@")[0].replace("-", "_")


def verifiers_program(environment_id: str, num_levels: int, arguments: str, services: Services) -> AgentProgram:
    """The environment as what drives episodes.

    Raises:
      ValueError: if the environment is not installed, or `arguments` is no JSON object.
    """
    name = f"verifiers:{environment_id}"
    given = read_arguments(arguments)
    source = _source(name, module_name(environment_id))
    identity = f"{name}-{metadata.version('verifiers')}-{source}-{xxhash.xxh3_64_hexdigest(repr(given).encode())}"
    processes = services.environment_processes(name, num_levels)
    means = RubricMeans()
    services.reports(means.take)

    async def play(task: Task, base_url: str, api_key: str) -> Any:
        argument = {"task": dataclasses.asdict(task), "base_url": base_url, "api_key": api_key}
        return await processes.play(task, argument)

    def reward(played: Mapping[str, Any]) -> float:
        if played["faults"]:
            raise RubricFailed("; ".join(played["faults"]))
        final = checked_reward(played["reward"])
        means.add(played["metrics"])
        return final

    return AgentProgram(name, identity, play, reward)


def check_starts(config: EnvironmentConfig) -> str:
    """Starts a process of the environment and ends it; what is wrong, empty if nothing is."""

    async def start() -> None:
        limits = IsolationLimits(start_s=config.start_timeout_s)
        known = Known(config.name, len(config.level_weights), config.arguments)
        processes = EnvironmentProcesses(known, 1, limits)
        try:
            await processes.process_for(Task(config.name, "train", 1, 0))
        finally:
            await processes.close()

    try:
        asyncio.run(start())
    except EnvironmentDied as error:
        return f"--config.environment.name={config.name}: {error}"
    return ""


def _source(name: str, module: str) -> str:
    """A hash of the environment's code, without running it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # of the package that a dotted name says it is in; of an empty name
        spec = None
    if spec is None or spec.origin is None:
        raise ValueError(f"--config.environment.name={name}: no module {module} here; install the environment")
    found = Path(spec.origin)
    files = sorted(found.parent.rglob("*.py")) if found.name == "__init__.py" else [found]
    return xxhash.xxh3_64_hexdigest(b"\0".join(file.read_bytes() for file in files))
