"""An environment that thinks for long, and now and then for much longer: the delay of a turn is lognormal."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Mapping, Sequence

from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.envs.text import TextEnvironment, TextObservation, TextScore
from asyncrl_jax.actor.tools.base import Tool
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.types import Task

MEDIAN_VARIABLE = "ASYNCRL_BENCHMARK_DELAY_S"  # median delay of a turn, in seconds
TURNS = 4
_SIGMA = math.log(10) / 2.3263  # the 99th percentile is ten times the median


class SlowTasks:
    """See `TextEnvironmentFactory`."""

    name = "text:benchmarks._slow_environment:SLOW"
    num_levels = 1
    identity = "slow-1"
    limits_own_score = False
    tools: Mapping[str, Tool] = {}

    def __init__(self) -> None:
        self.median_s = float(os.environ.get(MEDIAN_VARIABLE, "0"))

    def __call__(self) -> TextEnvironment:
        return _SlowEpisode(self.median_s)


class _SlowEpisode:
    def __init__(self, median_s: float) -> None:
        self._median_s = median_s
        self._random = random.Random()
        self._turns = 0

    async def reset(self, task: Task) -> Sequence[Message]:
        self._random.seed(derive_seed(0, "slow", task.index))
        self._turns = 0
        return [Message("user", "go")]

    async def step(self, text: str) -> TextObservation:  # noqa: ARG002
        self._turns += 1
        if self._median_s:
            await asyncio.sleep(self._median_s * math.exp(_SIGMA * self._random.gauss(0.0, 1.0)))
        return TextObservation((Message("user", "on"),), done=self._turns == TURNS)

    async def score(self) -> TextScore:
        return TextScore(1.0, success=True)

    async def close(self) -> None:
        self._turns = 0


SLOW = SlowTasks()
