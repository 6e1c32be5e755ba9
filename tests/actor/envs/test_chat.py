"""Conversations with tools, played through `run_episode` as actors play them."""

import asyncio
import collections
import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrl_jax.actor.chat.formats import ByteFormat
from asyncrl_jax.actor.chat.messages import Message, read_variants
from asyncrl_jax.actor.chat.tokenizer import ByteTokenizer
from asyncrl_jax.actor.envs.chat import ChatEnvironments, ChatEpisode, InstancePool, ResetMismatch
from asyncrl_jax.actor.envs.text import TextObservation, TextScore
from asyncrl_jax.actor.episode import EpisodeConfig, EpisodeFailed, run_episode
from asyncrl_jax.actor.tools.base import ToolBroken
from asyncrl_jax.actor.tools.builtin import Calculator
from asyncrl_jax.config import EnvironmentConfig, RewardConfig, ToolsConfig
from asyncrl_jax.types import FinishReason, Task

sys.path.insert(0, str(Path(__file__).parents[1]))  # for scripted
from scripted import ScriptedPolicy

TASK = Task("riddles", "train", 1, 7)
END = ByteTokenizer.TURN_END


class Riddle:
    """Asks for twice the index and answers a wrong answer once; `faults` maps a call to what it raises."""

    def __init__(self, factory):
        self.factory, self.task, self.answers = factory, None, []

    def _fault(self, call):
        if call in self.factory.faults:
            raise self.factory.faults[call]

    async def reset(self, task):
        self._fault("reset")
        leftover = f" (and {self.answers})" if self.factory.leaky and self.answers else ""
        self.task = task
        if not self.factory.leaky:
            self.answers = []
        return [Message("user", f"Twice {task.index}?{leftover}")]

    async def step(self, text):
        self._fault("step")
        self.answers.append(text)
        right = text == str(2 * self.task.index)
        return TextObservation((Message("user", "no"),), done=right or len(self.answers) > 1)

    async def score(self):
        self._fault("score")
        right = self.answers[-1:] == [str(2 * self.task.index)]
        return TextScore(float(right), success=right, step=0.5, well_formed=bool(self.answers))

    async def close(self):
        self._fault("close")


class Riddles:
    name, num_levels, identity, tools, limits_own_score = "riddles", 1, "riddles-1", {}, False

    def __init__(self, *, leaky=False, **faults):
        self.leaky, self.faults = leaky, faults

    def __call__(self):
        return Riddle(self)


class Slow:
    name, description, parameters, limits_itself = "slow", "waits", {"type": "object", "properties": {}}, False
    cancelled = 0

    async def call(self, arguments):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class Broken(Slow):
    name = "broken"

    async def call(self, arguments):
        raise ToolBroken("no such machine")


def _source(riddles=None, tools=(), **settings):
    config = dataclasses.replace(ToolsConfig(), **settings)
    return ChatEnvironments(riddles or Riddles(), ByteFormat(), {tool.name: tool for tool in tools}, config)


def _play(source, *turns, max_turns=5, task=TASK):
    policy = ScriptedPolicy(*[(*turn.encode(), END) for turn in turns])
    environment = EnvironmentConfig(max_turns=max_turns, max_tokens=2000, call_timeout_s=5.0)
    config = EpisodeConfig(environment, RewardConfig())
    trajectory = asyncio.run(run_episode(policy, source(), task, seed=0, temperature=1.0, config=config))
    heard = [ByteTokenizer().decode(tokens) for tokens in policy.heard]
    return trajectory, heard


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2*7"}}</tool_call>'


def test_an_episode_of_text_is_one_of_tokens():
    trajectory, heard = _play(_source(), "13", "14")
    assert "user\nTwice 7?" in heard[0]
    assert "user\nno" in heard[1]
    assert trajectory.success
    assert trajectory.finish_reason == FinishReason.ANSWERED
    assert trajectory.reward_parts.tolist() == [1.0, 0.5, 1.0, 0.0]


def test_a_training_task_is_put_in_one_of_several_ways_and_a_held_out_one_as_it_is(tmp_path):
    (tmp_path / "ways.json").write_text('["Quick: {prompt}", "{prompt} Think."]')
    ways = read_variants(str(tmp_path / "ways.json"))

    def asked(split, index):
        source = ChatEnvironments(Riddles(), ByteFormat(), {}, ToolsConfig(), variants=ways)
        task = Task("riddles", split, 1, index)
        heard = [_play(lambda: ChatEpisode(source), "1", "1", task=task)[1][0] for _ in range(2)]
        assert heard[0] == heard[1], "members of a group see the same"
        return heard[0].split("\n")[1].removesuffix("<|end|>")

    seen = collections.Counter()
    for index in range(60):
        assert asked("heldout", index).startswith(f"Twice {index}?")
        put = asked("train", index)
        assert f"Twice {index}?" in put
        seen[("Quick: " in put) + 2 * ("Think." in put)] += 1
    assert set(seen) == {0, 1, 2}
    assert min(seen.values()) > 8
    assert ChatEnvironments(Riddles(), ByteFormat(), {}, ToolsConfig(), variants=ways).identity != _source().identity


@pytest.mark.parametrize("content", ["[", "{}", "[]", '["no place for the question"]', "[1]"])
def test_ways_to_put_a_question_that_are_none_are_named(tmp_path, content):
    (tmp_path / "ways.json").write_text(content)
    with pytest.raises(ValueError, match=r"environment.prompt_variants=.*ways\.json"):
        read_variants(str(tmp_path / "ways.json"))


def test_tok_03_only_what_the_policy_sampled_is_trained_on():
    trajectory, heard = _play(_source(tools=[Calculator()]), CALL, "14")
    assert "tool\n14" in heard[1]
    sampled = bytes(t for t in trajectory.tokens[trajectory.loss_mask == 1].tolist() if t < 256)
    assert sampled.decode() == CALL + "14"
    assert int(trajectory.loss_mask.sum()) == len(CALL) + len("14") + 2  # and the two ends of turn that it sampled
    assert np.all(trajectory.behaviour_logprobs[trajectory.loss_mask == 0] == 0)
    assert np.all(trajectory.policy_versions[trajectory.loss_mask == 0] == -1)


def test_calls_of_one_turn_are_answered_in_order_whatever_comes_first():
    slow = Slow()
    source = _source(tools=[slow, Calculator()], timeout_s=0.05)
    trajectory, heard = _play(source, '<tool_call>{"name": "slow"}</tool_call>' + CALL, "14")
    assert heard[1].index("error: no answer within 0.05 s") < heard[1].index("tool\n14")
    assert slow.cancelled == 1
    assert trajectory.reward_parts[3] == 0.5


def test_malformed_calls_are_answered_and_bounded():
    malformed = "<tool_call>{</tool_call>"
    trajectory, heard = _play(_source(tools=[Calculator()], max_malformed=2), malformed, malformed, "14")
    assert heard[1].count("error: the call is not JSON") == 1
    assert trajectory.success
    assert trajectory.reward_parts[2] == 0.0  # the format is not rewarded
    trajectory, heard = _play(_source(tools=[Calculator()], max_malformed=2), *[malformed] * 4)
    assert len(heard) == 3
    assert trajectory.finish_reason == FinishReason.ANSWERED
    assert not trajectory.success


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ('{"name": "abacus"}', "no tool 'abacus'; there are: calculator"),
        ('{"name": "calculator"}', "argument 'expression' is missing"),
        ('{"name": "calculator", "arguments": {"expression": 3}}', "argument 'expression' is a string"),
        ('{"name": "calculator", "arguments": {"expression": "1", "x": 1}}', "no argument 'x'"),
        ('{"name": "calculator", "arguments": {"expression": "1/0"}}', "division by zero"),
    ],
)
def test_a_wrong_call_is_answered_by_what_is_wrong(call, answer):
    trajectory, heard = _play(_source(tools=[Calculator()]), f"<tool_call>{call}</tool_call>", "14")
    assert f"error: {answer}" in heard[1]
    assert trajectory.reward_parts[3] == 0.0


def test_a_long_answer_loses_its_middle():
    source = _source(tools=[Calculator()], max_result_characters=10)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1234567890123456789 + 0"}}</tool_call>'
    _, heard = _play(source, call, "14")
    assert "tool\n12345\n[9 characters left out]\n56789" in heard[1]


def test_calls_beyond_those_that_a_turn_may_make_are_answered_and_not_made():
    made = []

    class Counted(Slow):
        name = "counted"

        async def call(self, arguments):
            made.append(1)
            return "fine"

    source = _source(tools=[Counted()], max_calls=2)
    trajectory, heard = _play(source, '<tool_call>{"name": "counted"}</tool_call>' * 5, "14")
    assert len(made) == 2
    assert (heard[1].count("fine"), heard[1].count("error: not made; 2 calls")) == (2, 3)
    assert trajectory.reward_parts[-1] == pytest.approx(2 / 5)
    assert source.outcomes == {"counted/ok": 2, "counted/wrong_call": 3}


def test_a_broken_tool_fails_the_episode_and_is_named():
    source = _source(tools=[Broken()])
    with pytest.raises(EpisodeFailed, match="no such machine") as failed:
        _play(source, '<tool_call>{"name": "broken"}</tool_call>')
    assert failed.value.stage == "step"
    assert isinstance(failed.value.__cause__, ToolBroken)  # what the fault is counted as
    assert failed.value.__cause__.tool == "broken"  # and where
    assert source.outcomes == {"broken/broken": 1}


def test_a_tool_that_raises_anything_else_is_broken_too():
    class Odd(Slow):
        name = "odd"

        async def call(self, arguments):
            raise KeyError("lost")

    with pytest.raises(EpisodeFailed, match="tool odd: KeyError") as failed:
        _play(_source(tools=[Odd()]), '<tool_call>{"name": "odd"}</tool_call>')
    assert isinstance(failed.value.__cause__, ToolBroken)
    assert failed.value.__cause__.tool == "odd"


def test_without_tools_a_call_is_an_answer_like_any_other():
    trajectory, heard = _play(_source(), CALL, "14")
    assert "no" in heard[1]
    assert trajectory.success


@pytest.mark.parametrize("content", [None, 7, ["a"], {"text": "a"}, b"a"])
def test_what_an_environment_says_is_text_or_no_message(content):
    with pytest.raises(TypeError, match="is text, and not"):
        Message("user", content)


def test_of_many_tasks_with_long_prompts_little_is_kept():
    pool = InstancePool(Riddles())
    for index in range(100):
        pool.check_reset(Task("riddles", "train", 1, index), (Message("user", "x" * 10**5 + str(index)),))
    assert sum(len(repr(kept)) for kept in pool._first_messages.values()) < 10**4
    with pytest.raises(ResetMismatch):
        pool.check_reset(Task("riddles", "train", 1, 5), (Message("user", "x" * 10**5),))


def test_instances_are_used_again_one_episode_at_a_time():
    source = _source()
    for _ in range(5):
        _play(source, "14")
    assert source.pool.num_made == 1

    async def together():
        episodes = [source() for _ in range(3)]
        for episode in episodes:
            await episode.reset(TASK)
        return [id(episode._inner) for episode in episodes], [await episode.close() for episode in episodes]

    inner, _ = asyncio.run(together())
    assert len(set(inner)) == 3


@pytest.mark.parametrize("call", ["reset", "step", "score"])
def test_env_01_an_instance_that_raised_is_replaced(call):
    source = _source(Riddles(**{call: OSError("gone")}))
    with pytest.raises(EpisodeFailed, match="gone"):
        _play(source, "14")
    assert source.pool.num_discarded == 1
    source.pool._factory.faults = {}
    trajectory, _ = _play(source, "14")
    assert trajectory.success
    assert source.pool.num_made == 2


def test_env_12_an_instance_that_remembers_its_last_episode_is_found_out():
    source = _source(Riddles(leaky=True))
    _play(source, "14")
    with pytest.raises(EpisodeFailed, match="starts differently"):
        _play(source, "14")
    assert source.pool.num_discarded == 1
    trajectory, _ = _play(source, "14")  # with a fresh one
    assert trajectory.success


def test_an_episode_that_has_used_up_its_time_gets_no_further_turn():
    source = _source()
    policy = ScriptedPolicy((*b"13", END), (*b"14", END))
    environment = EnvironmentConfig(max_turns=5, max_tokens=2000, episode_timeout_s=1e-9)
    config = EpisodeConfig(environment, RewardConfig())
    trajectory = asyncio.run(run_episode(policy, source(), TASK, seed=0, temperature=1.0, config=config))
    assert trajectory.finish_reason == FinishReason.OUT_OF_TIME
    assert trajectory.num_turns == 1
