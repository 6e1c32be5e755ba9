"""A plain Python function as an environment: the shortest way to train on one's own task.

def double(seed: int, level: int) -> tuple[str, Callable[[str], float]]:
    '''A question, and what scores its answer: a number in [0, 1], 1 for right.'''
    n = random.Random(seed).randrange(10 ** (level + 5))
    return f"What is 2 * {n}?", lambda answer: float(answer.strip() == str(2 * n))

--config.environment.name=function:my_tasks:double
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.envs.text import TextEnvironment, TextObservation, TextScore
from asyncrl_jax.actor.envs.user_code import user_function
from asyncrl_jax.actor.tools.base import Tool
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.types import Task

Scorer = Callable[[str], float]
TaskFunction = Callable[[int, int], tuple[str, Scorer]]


class FunctionTasks:
    """Tasks that a function `(seed, level) -> (question, scorer)` makes; the answer is the whole turn.

    Question and score are made in a thread, so that a slow function holds up its own episodes only.
    """

    tools: Mapping[str, Tool] = {}
    limits_own_score = False

    def __init__(self, address: str, num_levels: int) -> None:
        """Args: address: `module:function`, importable where actors run; num_levels: that the config asks for.

        Raises:
          ValueError: if there is no such function.
        """
        self.name = f"function:{address}"
        self.num_levels = num_levels
        self.function: TaskFunction
        self.function, source = user_function(self.name)
        self.identity = f"{self.name}-{source}"

    def __call__(self) -> TextEnvironment:
        return _FunctionEpisode(self)


class _FunctionEpisode:
    def __init__(self, tasks: FunctionTasks) -> None:
        self._tasks = tasks
        self._scorer: Scorer | None = None
        self._answer: str | None = None

    async def reset(self, task: Task) -> Sequence[Message]:
        seed = derive_seed(0, self._tasks.name, task.split, task.level, task.index)
        made: object = await asyncio.to_thread(self._tasks.function, seed, task.level)
        match made:
            case (str() as question, scorer) if callable(scorer):
                self._scorer, self._answer = scorer, None
            case _:
                raise TypeError(f"{self._tasks.name} returned {made!r:.100}, not a question and what scores its answer")
        return [Message("user", question)]

    async def step(self, text: str) -> TextObservation:
        self._answer = text
        return TextObservation((), done=True)

    async def score(self) -> TextScore:
        assert self._scorer is not None
        if self._answer is None:
            return TextScore(0.0, success=False, well_formed=False)
        final = await asyncio.to_thread(self._scorer, self._answer)
        return TextScore(final, success=final == 1.0)

    async def close(self) -> None:
        self._scorer = None
