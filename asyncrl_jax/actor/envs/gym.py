"""Gymnasium environments whose observations and actions are text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.envs.text import TextEnvironment, TextObservation, TextScore
from asyncrl_jax.actor.tools.base import Tool
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.types import Task


class GymnasiumTasks:
    """A registered Gymnasium environment with Text spaces.

    Its rewards add up to `final`, which must stay in [0, 1]; an episode that terminated with 1, or whose last info says
    `success`, is a success. A level is passed as the reset option `level`. Calls run in a thread.
    """

    tools: Mapping[str, Tool] = {}
    limits_own_score = False

    def __init__(self, environment_id: str, num_levels: int, arguments: Mapping[str, Any] | None = None) -> None:
        """Args: num_levels: that the config asks for; arguments: of the environment.

        Raises:
          ValueError: if there is no such environment, it does not take the arguments, or it does not speak text.
        """
        import gymnasium

        self.arguments = dict(arguments or {})
        try:
            with gymnasium.make(environment_id, **self.arguments) as probe:
                spaces = (probe.observation_space, probe.action_space)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ValueError(f"--config.environment.name=gymnasium:{environment_id}: {error}") from error
        for space in spaces:
            if not isinstance(space, gymnasium.spaces.Text):
                raise ValueError(f"--config.environment.name=gymnasium:{environment_id}: {space} is no Text space")
        self.name = f"gymnasium:{environment_id}"
        self.environment_id = environment_id
        self.num_levels = num_levels
        shown = f"-{json.dumps(self.arguments, sort_keys=True)}" if self.arguments else ""
        self.identity = f"{self.name}-{gymnasium.__version__}{shown}"

    def __call__(self) -> TextEnvironment:
        import gymnasium

        return _GymnasiumEpisode(self.name, gymnasium.make(self.environment_id, **self.arguments))


class _GymnasiumEpisode:
    def __init__(self, name: str, inner: Any) -> None:
        self._name = name
        self._inner = inner
        self._reward = 0.0
        self._terminated = False
        self._info: Mapping[str, Any] = {}

    async def reset(self, task: Task) -> Sequence[Message]:
        seed = derive_seed(0, self._name, task.split, task.level, task.index) % 2**31
        observation, self._info = await asyncio.to_thread(self._inner.reset, seed=seed, options={"level": task.level})
        self._reward, self._terminated = 0.0, False
        return [Message("user", str(observation))]

    async def step(self, text: str) -> TextObservation:
        observation, reward, terminated, truncated, self._info = await asyncio.to_thread(self._inner.step, text)
        self._reward += float(reward)
        self._terminated = bool(terminated)
        return TextObservation((Message("user", str(observation)),), done=bool(terminated or truncated))

    async def score(self) -> TextScore:
        success = bool(self._info.get("success", self._terminated and self._reward == 1.0))
        return TextScore(self._reward, success=success)

    async def close(self) -> None:
        """The inner environment is kept: it is reset for the next episode."""
