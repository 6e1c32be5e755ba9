"""Every data set of reasoning-gym, at the difficulties its curriculum offers. Answers stand in <answer> tags."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import asyncrl_jax.actor.envs.pycosat_stub  # noqa: F401, before any import of reasoning_gym
from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.envs.text import TextEnvironment, TextObservation, TextScore
from asyncrl_jax.actor.tools.base import Tool
from asyncrl_jax.actor.verifiers import VerifierPool
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.types import Task

MAX_LEVELS = 5
INSTRUCTION = "Solve the problem. Give the final answer, and nothing else, between <answer> and </answer>."

_CLOSING = "</answer>"
_ANSWER = re.compile(f"<answer>(.*?){_CLOSING}", re.DOTALL)


def extract_answer(text: str) -> str | None:
    """What stands in the last pair of answer tags; None if there is none."""
    end = text.rfind(_CLOSING)
    answers = _ANSWER.findall(text[: end + len(_CLOSING)]) if end >= 0 else []  # openings behind it find nothing
    return answers[-1].strip() if answers else None


@functools.cache
def _settings(name: str, level: int) -> dict[str, Any]:
    """What the data set's curriculum sets at a level; level 1 is where it starts."""
    from reasoning_gym.factory import CURRICULA, create_curriculum

    if name not in CURRICULA:
        return {}
    curriculum = create_curriculum(name)
    for _ in range(level - 1):
        curriculum.increment_global_level()
    configuration = curriculum.generate_configuration({"seed": 0, "size": 1})
    return {key: value for key, value in vars(configuration).items() if key not in ("seed", "size")}


def num_levels(name: str) -> int:
    """Levels that differ, up to MAX_LEVELS.

    Raises:
      ValueError: for a data set that reasoning-gym does not have.
    """
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(f"--config.environment.name=reasoning_gym:{name}: no such data set in reasoning-gym")
    levels = 1
    while levels < MAX_LEVELS and _settings(name, levels + 1) != _settings(name, levels):
        levels += 1
    return levels


def make_entry(name: str, task: Task) -> dict[str, Any]:
    """The task's item. Train and held-out items come from different seeds; `overlap` of a run checks them."""
    import reasoning_gym

    seed = derive_seed(0, "reasoning_gym", name, task.split, task.level, task.index) % 2**31
    entry: dict[str, Any] = reasoning_gym.create_dataset(name, seed=seed, size=1, **_settings(name, task.level))[0]
    return entry


def score_answer(name: str, level: int, answer: str | None, entry: Mapping[str, Any]) -> float:
    """The data set's own score, in [0, 1]; 1 is right, what lies between is its partial credit."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, seed=0, size=1, **_settings(name, level))
    return float(dataset.score_answer(answer, entry=dict(entry)))


def score_task(name: str, split: str, level: int, index: int, answer: str | None) -> float:
    """`score_answer` for the item that the task names: what is sent to a verifier process."""
    return score_answer(name, level, answer, make_entry(name, Task(f"reasoning_gym:{name}", split, level, index)))


class ReasoningTasks:
    """A data set as an environment of one question and one answer; tools may be used on the way."""

    tools: Mapping[str, Tool] = {}
    limits_own_score = True

    def __init__(self, dataset: str, verifiers: VerifierPool) -> None:
        self.name = f"reasoning_gym:{dataset}"
        self.dataset = dataset
        self.num_levels = num_levels(dataset)
        self.identity = f"reasoning_gym-{metadata.version('reasoning_gym')}:{dataset}:1"
        self.verifiers = verifiers

    def __call__(self) -> TextEnvironment:
        return _ReasoningEpisode(self)


class _ReasoningEpisode:
    def __init__(self, tasks: ReasoningTasks) -> None:
        self._tasks = tasks
        self._task: Task | None = None
        self._answer: str | None = None

    async def reset(self, task: Task) -> Sequence[Message]:
        self._task, self._answer = task, None
        entry = make_entry(self._tasks.dataset, task)
        return [Message("system", INSTRUCTION), Message("user", entry["question"])]

    async def step(self, text: str) -> TextObservation:
        self._answer = extract_answer(text)
        return TextObservation((), done=True)

    async def score(self) -> TextScore:
        task = self._task
        assert task is not None
        if self._answer is None:
            return TextScore(0.0, success=False, well_formed=False)
        final = await self._tasks.verifiers.score(
            "asyncrl_jax.actor.envs.reasoning:score_task",
            [self._tasks.dataset, task.split, task.level, task.index, self._answer],
        )
        return TextScore(final, success=final == 1.0)

    async def close(self) -> None:
        self._task = None
