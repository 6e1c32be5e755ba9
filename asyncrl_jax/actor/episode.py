"""One episode: the environment and the policy take turns until it is over, token in and token out."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np

from asyncrl_jax.actor.engines.base import Completion, Session, SessionSource
from asyncrl_jax.actor.envs.base import Environment
from asyncrl_jax.actor.process_rewards.base import ProcessScorer
from asyncrl_jax.actor.rewards import weigh
from asyncrl_jax.config import EnvironmentConfig, RewardConfig
from asyncrl_jax.laws import Delays
from asyncrl_jax.types import REWARD_PARTS, FinishReason, Task, Trajectory

log = logging.getLogger(__name__)

_DETAIL = 2000  # characters of what went wrong: whoever raises may say anything

T = TypeVar("T")


class EpisodeFailed(RuntimeError):
    """The environment, a tool or a reward failed: this episode alone has no result. `stage` is where it was."""

    def __init__(self, stage: str, detail: str) -> None:
        super().__init__(f"{stage}: {detail[:_DETAIL]}")
        self.stage = stage


@dataclasses.dataclass(frozen=True)
class EpisodeConfig:
    """What all episodes of a run share."""

    environment: EnvironmentConfig
    reward: RewardConfig
    process: ProcessScorer | None = None  # of steps; None: the environment scores them


class _Transcript:
    """The tokens of an episode, with who made each."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_turns = 0
        self._pieces: list[tuple[np.ndarray, Completion | None]] = []

    def forced(self, tokens: tuple[int, ...]) -> None:
        self._append(np.array(tokens, np.int32), None)

    def sampled(self, completion: Completion) -> None:
        self._append(completion.tokens, completion)
        self.num_turns += 1

    def _append(self, tokens: np.ndarray, completion: Completion | None) -> None:
        self._pieces.append((tokens, completion))
        self.num_tokens += len(tokens)

    def fields(self) -> dict[str, Any]:
        """The four token fields of a Trajectory."""
        tokens = np.zeros(self.num_tokens, np.int32)
        mask = np.zeros(self.num_tokens, np.uint8)
        logprobs = np.zeros(self.num_tokens, np.float32)
        versions = np.full(self.num_tokens, -1, np.int32)
        start = 0
        for piece, completion in self._pieces:
            where = slice(start, start + len(piece))
            tokens[where] = piece
            if completion is not None:
                mask[where], logprobs[where], versions[where] = 1, completion.logprobs, completion.versions
            start = where.stop
        return {"tokens": tokens, "loss_mask": mask, "behaviour_logprobs": logprobs, "policy_versions": versions}


async def run_episode(
    engine: SessionSource, environment: Environment, task: Task, *, seed: int, temperature: float, config: EpisodeConfig
) -> Trajectory:
    """Plays one task to its end.

    An observation that the policy has no room or turn left to answer is not part of the trajectory.

    Args:
      engine: holds one slot for the episode.
      environment: a fresh one; it is closed here, whatever happens.
      task: to play.
      seed: of sampling; with the same weights throughout, the same seed gives the same trajectory.
      temperature: of sampling.
      config: limits and reward weights.

    Raises:
      EpisodeFailed: if the environment raises, exceeds its time limit, or returns what is no token or no reward.
    """
    session = await engine.open(seed, temperature)
    started_at = time.time()
    limit_s = config.environment.call_timeout_s
    try:
        try:
            delays = Delays(config.environment.turn_delay_s, seed)
            transcript, finish = await _converse(session, environment, task, config.environment, delays)
        finally:
            session.close()  # what scores may take its time, and needs no slot
        score_limit_s = math.inf if environment.limits_own_score else limit_s
        scored = await _call("score", _score(environment, config.reward), score_limit_s)
        tokens = transcript.fields()
        if config.process is not None:  # which has limits of its own
            scored = await _call("process", _score_steps(config.process, tokens, scored, config.reward), math.inf)
    finally:
        await _close(environment, limit_s)
    return Trajectory(
        **tokens,
        **scored,
        finish_reason=finish,
        num_turns=transcript.num_turns,
        sampling_started_at=started_at,
        sampling_ended_at=time.time(),
    )


async def _converse(
    session: Session, environment: Environment, task: Task, limits: EnvironmentConfig, delays: Delays
) -> tuple[_Transcript, FinishReason]:
    transcript = _Transcript()
    started_at = time.monotonic()
    forced = await _call("reset", _reset(environment, task, limits.max_tokens), limits.call_timeout_s)
    for _ in range(limits.max_turns):
        if transcript.num_tokens + len(forced) >= limits.max_tokens:
            return transcript, FinishReason.LENGTH
        if transcript.num_turns and time.monotonic() - started_at > limits.episode_timeout_s:
            return transcript, FinishReason.OUT_OF_TIME
        transcript.forced(forced)
        room = limits.max_tokens - transcript.num_tokens
        turn_room = min(room, environment.turn_tokens or room)
        completion = await session.generate(forced, environment.stop_tokens, turn_room)
        transcript.sampled(completion)
        if completion.finish == "length" and turn_room == room:
            return transcript, FinishReason.LENGTH
        answer = _step(environment, completion.tokens.tolist(), delays.next_s())
        forced, done = await _call("step", answer, limits.call_timeout_s)
        if done:
            return transcript, FinishReason.ANSWERED
    return transcript, FinishReason.MAX_TURNS


async def _reset(environment: Environment, task: Task, max_tokens: int) -> tuple[int, ...]:
    prompt = _checked(await environment.reset(task), environment)
    if not 0 < len(prompt) < max_tokens:
        raise ValueError(f"a prompt of {len(prompt)} tokens, of at most {max_tokens} with an answer")
    return prompt


async def _step(environment: Environment, turn: list[int], delay_s: float) -> tuple[tuple[int, ...], bool]:
    observation = await environment.step(turn)
    if delay_s:
        await asyncio.sleep(delay_s)
    return _checked(observation.tokens, environment), observation.done


async def _score(environment: Environment, config: RewardConfig) -> dict[str, Any]:
    """The scored fields of a Trajectory."""
    score = await environment.score()
    reward, parts = weigh(score.parts, config)
    if not isinstance(score.success, bool):
        raise TypeError(f"success={score.success!r} is no bool")
    return {"reward": reward, "reward_parts": parts, "success": score.success}


async def _score_steps(
    process: ProcessScorer, tokens: dict[str, Any], scored: dict[str, Any], config: RewardConfig
) -> dict[str, Any]:
    """The scored fields with the process reward model's step part in place of the environment's."""
    steps = await process.score(tokens["tokens"], tokens["loss_mask"])
    parts = dict(zip(REWARD_PARTS, scored["reward_parts"].tolist(), strict=True)) | {"step": steps.part}
    reward, reward_parts = weigh(parts, config)
    return scored | {
        "reward": reward,
        "reward_parts": reward_parts,
        "step_scores": steps.scores,
        "step_ends": steps.ends,
    }


def _checked(tokens: tuple[int, ...], environment: Environment) -> tuple[int, ...]:
    if not all(type(token) is int and 0 <= token < environment.vocab_size for token in tokens):
        raise ValueError(f"{tokens!r} are not all tokens below {environment.vocab_size}")
    return tokens


async def _call(stage: str, awaitable: Awaitable[T], limit_s: float) -> T:
    """Result of one call of the environment, whose failure is the episode's alone.

    Invariant: what an environment raises passes as EpisodeFailed only, even a cancellation of its own making.
    """
    try:
        async with asyncio.timeout(limit_s if limit_s < math.inf else None) as limit:
            return await awaitable
    except Exception as error:
        detail = f"no answer within {limit_s:g} s" if limit.expired() else _told(error)
        raise EpisodeFailed(stage, detail) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # this episode really was cancelled
        raise EpisodeFailed(stage, _told(error)) from error


def _told(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception as another:  # noqa: BLE001, it may do anything there too
        return f"{type(error).__name__}, whose text can't be had: {type(another).__name__}"


async def _close(environment: Environment, limit_s: float) -> None:
    try:
        await _call("close", environment.close(), limit_s)
    except EpisodeFailed:
        log.warning("an environment failed to close; its episode stands", exc_info=True)
