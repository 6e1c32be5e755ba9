import asyncio
import math

import numpy as np
import pytest
from scripted import ScriptedPolicy

from asyncrl_jax.actor.envs.base import Observation, Score
from asyncrl_jax.actor.episode import EpisodeConfig, EpisodeFailed, run_episode
from asyncrl_jax.actor.process_rewards.base import StepScores
from asyncrl_jax.config import EnvironmentConfig, RewardConfig
from asyncrl_jax.types import REWARD_PARTS, FinishReason, Task

STOP = 9
TASK = Task("scripted", "train", 1, 0)


class ScriptedEnvironment:
    """Prompts with (1, 2), answers every turn with (3,), and ends after `num_turns` turns."""

    vocab_size, num_levels, identity, stop_tokens = 10, 1, "scripted", frozenset({STOP})
    limits_own_score, turn_tokens = False, 0

    def __init__(self, num_turns=2, **faults):
        self.num_turns, self.faults, self.steps, self.closed = num_turns, faults, [], 0

    async def _maybe(self, stage, answer):
        fault = self.faults.get(stage)
        if isinstance(fault, BaseException):
            raise fault
        if fault == "hang":
            await asyncio.sleep(3600)
        return answer if fault is None else fault

    async def reset(self, task):
        return await self._maybe("reset", (1, 2))

    async def step(self, tokens):
        self.steps.append(tokens)
        done = len(self.steps) == self.num_turns
        return await self._maybe("step", Observation(() if done else (3,), done))

    async def score(self):
        return await self._maybe("score", Score(dict.fromkeys(REWARD_PARTS, 1.0), True))

    async def close(self):
        self.closed += 1
        await self._maybe("close", None)


def play(engine, environment, **settings):
    config = EpisodeConfig(EnvironmentConfig(**{"call_timeout_s": 0.05} | settings), RewardConfig())
    return asyncio.run(run_episode(engine, environment, TASK, seed=0, temperature=1.0, config=config))


def test_tok_03_tok_04_tok_06_every_position_says_who_made_it():
    engine, environment = ScriptedPolicy((4, STOP), (5, 6, STOP)), ScriptedEnvironment()
    trajectory = play(engine, environment)
    assert trajectory.tokens.tolist() == [1, 2, 4, STOP, 3, 5, 6, STOP]
    assert trajectory.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 1]  # the sampled stop token is trained
    assert trajectory.behaviour_logprobs.tolist() == [0, 0, -4, -9, 0, -5, -6, -9]
    assert trajectory.policy_versions.tolist() == [-1, -1, 1, 1, -1, 2, 2, 2]
    assert [array.dtype for array in (trajectory.tokens, trajectory.loss_mask)] == [np.int32, np.uint8]
    assert [array.dtype for array in (trajectory.behaviour_logprobs, trajectory.policy_versions)] == [
        np.float32,
        np.int32,
    ]
    assert (trajectory.finish_reason, trajectory.num_turns, trajectory.success) == (FinishReason.ANSWERED, 2, True)
    assert trajectory.reward == pytest.approx(1.6)
    assert engine.heard == [(1, 2), (3,)]
    assert environment.steps == [[4, STOP], [5, 6, STOP]]
    assert (engine.num_open, environment.closed) == (0, 1)


@pytest.mark.parametrize(
    ("turns", "limits", "tokens", "finish"),
    [
        # A turn cut off by the budget is scored as it stands, and the environment never sees it.
        ([(4, 5, 6, 7)], {"max_tokens": 5}, [1, 2, 4, 5, 6], FinishReason.LENGTH),
        # An observation that leaves no room to answer is no part of the trajectory.
        ([(4, STOP)], {"max_tokens": 5}, [1, 2, 4, STOP], FinishReason.LENGTH),
        ([(4, STOP), (5, STOP)], {"max_turns": 2}, [1, 2, 4, STOP, 3, 5, STOP], FinishReason.MAX_TURNS),
    ],
)
def test_limits_end_an_episode_with_their_reason(turns, limits, tokens, finish):
    engine, environment = ScriptedPolicy(*turns), ScriptedEnvironment(num_turns=9)
    trajectory = play(engine, environment, **limits)
    assert (trajectory.tokens.tolist(), trajectory.finish_reason) == (tokens, finish)
    assert trajectory.loss_mask[-1] == 1
    assert (engine.num_open, environment.closed) == (0, 1)


@pytest.mark.parametrize("stage", ["reset", "step", "score"])
@pytest.mark.parametrize(
    "fault", [RuntimeError("broken"), KeyError("x"), TimeoutError(), asyncio.CancelledError(), "hang", 7]
)
def test_env_01_env_10_a_fault_fails_the_episode_and_names_the_stage(stage, fault):
    engine, environment = ScriptedPolicy((4, STOP), (5, STOP)), ScriptedEnvironment(**{stage: fault})
    with pytest.raises(EpisodeFailed) as caught:
        play(engine, environment)
    assert caught.value.stage == stage
    assert (engine.num_open, environment.closed) == (0, 1)


class Unspeakable(Exception):
    def __repr__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(("fault", "told"), [(Unspeakable(), "Unspeakable"), (ValueError("x" * 10**6), "ValueError")])
def test_what_is_said_of_a_fault_is_short_and_can_be_had(fault, told):
    with pytest.raises(EpisodeFailed, match=told) as caught:
        play(ScriptedPolicy((4, STOP)), ScriptedEnvironment(step=fault))
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("fault", [RuntimeError("broken"), "hang"])
def test_an_episode_stands_when_only_its_close_fails(fault):
    engine = ScriptedPolicy((4, STOP), (5, STOP))
    assert play(engine, ScriptedEnvironment(close=fault)).success
    assert engine.num_open == 0


@pytest.mark.parametrize(
    ("faults", "detail"),
    [
        ({"reset": ()}, "0 tokens"),
        ({"reset": (1,) * 64}, "64 tokens"),
        ({"reset": (1, 10)}, "not all tokens"),
        ({"reset": (1, -1)}, "not all tokens"),
        ({"reset": (1.0, 2.0)}, "not all tokens"),
        ({"step": Observation((10,), False)}, "not all tokens"),
        ({"score": Score({"final": 1.0}, True)}, "wrong_parts"),
        ({"score": Score(dict.fromkeys(REWARD_PARTS, math.nan), True)}, "not_finite"),
        ({"score": Score(dict.fromkeys(REWARD_PARTS, 2.0), True)}, "out_of_range"),
        ({"score": Score(dict.fromkeys(REWARD_PARTS), True)}, "not_a_number"),
        ({"score": Score(dict.fromkeys(REWARD_PARTS, 1.0), 1)}, "no bool"),
    ],
)
def test_nonsense_from_an_environment_is_refused_with_its_reason(faults, detail):
    engine = ScriptedPolicy((4, STOP), (5, STOP))
    with pytest.raises(EpisodeFailed, match=detail):
        play(engine, ScriptedEnvironment(**faults))
    assert engine.num_open == 0


def test_orch_11_a_cancelled_episode_closes_everything_and_stays_cancelled():
    engine, environment = ScriptedPolicy((4, STOP)), ScriptedEnvironment(step="hang")

    async def run():
        config = EpisodeConfig(EnvironmentConfig(), RewardConfig())
        episode = asyncio.create_task(run_episode(engine, environment, TASK, seed=0, temperature=1.0, config=config))
        while not environment.steps:
            await asyncio.sleep(0)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    asyncio.run(run())
    assert (engine.num_open, environment.closed) == (0, 1)


def test_what_scores_holds_no_session_of_the_engine():
    """A verifier or a process reward model may take long, and others want the slot."""
    engine, seen = ScriptedPolicy((4, STOP)), []

    class Scored(ScriptedEnvironment):
        async def score(self):
            seen.append(engine.num_open)
            return await super().score()

    class Scorer:
        async def score(self, tokens, loss_mask):
            seen.append(engine.num_open)
            return StepScores(np.zeros(0, np.float32), np.zeros(0, np.int32), 0.5)

    config = EpisodeConfig(EnvironmentConfig(), RewardConfig(), Scorer())
    asyncio.run(run_episode(engine, Scored(1), TASK, seed=0, temperature=1.0, config=config))
    assert seen == [0, 0]


def test_engine_errors_are_not_the_environments():
    with pytest.raises(IndexError):  # the script has no turn left: a bug, which must end the process
        play(ScriptedPolicy(), ScriptedEnvironment())


def test_an_added_delay_is_a_part_of_the_environments_answer():
    """Two turns of 0.2 s each are waited for, and count against the limit of a call."""
    engine, environment = ScriptedPolicy((4, STOP), (5, 6, STOP)), ScriptedEnvironment()
    trajectory = play(engine, environment, turn_delay_s="constant:0.2", call_timeout_s=5.0)
    assert trajectory.sampling_ended_at - trajectory.sampling_started_at >= 0.4
    with pytest.raises(EpisodeFailed, match=r"step: no answer within 0\.05 s"):
        play(ScriptedPolicy((4, STOP)), ScriptedEnvironment(), turn_delay_s="constant:0.2")
