"""What a process reward model is, what its scores must be, and what they make of an episode.

    tokens ─ steps_of ─▶ steps ─ ProcessRewardModel.score ─▶ scores ─ checked ─▶ aggregated: the step part

The step part of the reward then is the process model's alone; what the environment said of steps does not count.

Dimensions: T tokens of one trajectory, K steps of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from asyncrl_jax.actor.process_rewards.steps import Step, steps_of
from asyncrl_jax.actor.rewards import InvalidReward
from asyncrl_jax.config_environment import ProcessRewardConfig

Text = Callable[[Sequence[int]], str]  # what tokens say


class ProcessRewardModel(Protocol):
    """Scores the steps of one episode. What it gives is not trusted: `checked` looks at it."""

    async def score(self, steps: Sequence[Step]) -> Sequence[Any]:
        """One score for each step, in order, each in [0, 1]: how likely the solution is right so far.

        Raises:
          ScoreFailed: if there is no answer; another try may get one.
          InvalidReward: if there is one that is none.
        """
        ...

    async def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class StepScores:
    """The scored steps of one episode."""

    scores: np.ndarray  # float32 [K]
    ends: np.ndarray  # int32 [K]; tokens up to the end of each step
    part: float  # the step part of the episode's reward


class ProcessScorer:
    """Scores episodes by a process reward model."""

    def __init__(self, model: ProcessRewardModel, text: Text, config: ProcessRewardConfig) -> None:
        """Args: text: what tokens of the environment say."""
        self._model = model
        self._text = text
        self._config = config

    async def score(self, tokens_T: np.ndarray, loss_mask_T: np.ndarray) -> StepScores:
        """The scores of an episode.

        Args:
          tokens_T: int32.
          loss_mask_T: uint8; 1 where the policy sampled the token, at least once.

        Raises:
          ScoreFailed: if the model does not answer.
          InvalidReward: if it answers what is no score for every step.
        """
        # In a thread: text is made token by token where steps end within turns.
        steps = await asyncio.to_thread(steps_of, tokens_T, loss_mask_T, self._text, self._config.step_end)
        scores = checked(await self._model.score(steps), len(steps))
        ends = np.array([step.end for step in steps], np.int32)
        return StepScores(scores, ends, aggregated(scores, self._config.aggregate))

    async def close(self) -> None:
        await self._model.close()


def checked(scores: Sequence[Any], num_steps: int) -> np.ndarray:
    """The scores as float32 [K]. Nothing is repaired, and nothing of what is wrong is repeated but numbers.

    Raises:
      InvalidReward: reasons "wrong_count", "not_a_number", "not_finite", "out_of_range".
    """
    if len(scores) != num_steps:
        raise InvalidReward("wrong_count", f"{len(scores)} scores for {num_steps} steps")
    for at, score in enumerate(scores):
        if isinstance(score, bool) or not isinstance(score, (int, float, np.floating)):
            raise InvalidReward("not_a_number", f"score {at} is of type {type(score).__name__}")
        if not isinstance(score, int) and not math.isfinite(score):
            raise InvalidReward("not_finite", f"score {at} is {score!r}")
        if not 0 <= score <= 1:
            raise InvalidReward("out_of_range", f"score {at} is {score!r:.40}, outside [0, 1]")
    return np.array(scores, np.float32)


def aggregated(scores_K: np.ndarray, rule: str) -> float:
    """An episode's step part, of at least one step's scores.

    `min` is the score of the worst step, by which Math-Shepherd judges solutions (Wang et al. 2024, arXiv 2312.08935):
    one wrong step spoils what follows, and more steps gain nothing. `mean` forgives one, and can be raised by steps
    without content. `last` trusts the model to remember (Snell et al. 2024, arXiv 2408.03314).
    """
    if rule == "last":
        return float(scores_K[-1])
    return float(scores_K.min() if rule == "min" else scores_K.mean())
