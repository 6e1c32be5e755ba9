"""Episodes cut into steps, their scores checked and summed up, and what an episode then is worth."""

import asyncio
import math
import random

import numpy as np
import pytest

from asyncrl_jax.actor.chat.formats import ByteFormat, plain_text
from asyncrl_jax.actor.chat.tokenizer import ByteTokenizer
from asyncrl_jax.actor.envs.arithmetic import Arithmetic, encode
from asyncrl_jax.actor.episode import EpisodeConfig, EpisodeFailed, run_episode
from asyncrl_jax.actor.process_rewards.base import ProcessScorer, aggregated, checked
from asyncrl_jax.actor.process_rewards.steps import Step, steps_of
from asyncrl_jax.actor.rewards import InvalidReward, step_gap, without_lone_steps, without_steps
from asyncrl_jax.actor.tally import Tally
from asyncrl_jax.actor.verifiers import ScoreFailed
from asyncrl_jax.config import EnvironmentConfig, RewardConfig
from asyncrl_jax.config_environment import ProcessRewardConfig
from asyncrl_jax.types import Task
from examples.step_scores import scores as example_scores
from tests.actor.scripted import ScriptedPolicy
from tests.builders import make_ticket, make_trajectory

BYTES = ByteTokenizer()


def cut(*pieces, step_end=""):
    """Steps of an episode whose pieces are, in turn, the environment's and the policy's."""
    tokens, mask = [], []
    for number, piece in enumerate(pieces):
        said = BYTES.encode(piece)
        tokens += said
        mask += [number % 2] * len(said)
    return steps_of(np.array(tokens, np.int32), np.array(mask, np.uint8), BYTES.decode, step_end)


def test_a_turn_is_a_step_with_what_stood_before_it():
    assert cut("ask", "one", "hm", "two") == [Step("ask", "one", 6), Step("hm", "two", 11)]
    assert cut("ask", "one", "trailing") == [Step("ask", "one", 6)]


@pytest.mark.parametrize(
    ("turn", "steps"),
    [
        ("a\nb", ["a\n", "b"]),
        ("a\nb\n", ["a\n", "b\n"]),
        ("\n\na\n\n\nb\n \n", ["\n\na\n", "\n\nb\n \n"]),  # blanks are no step of their own
        ("\n", ["\n"]),
        ("ab", ["ab"]),
        ("é\nü", ["é\n", "ü"]),  # two bytes a letter
    ],
)
def test_a_text_ends_steps_within_a_turn(turn, steps):
    found = cut("ask", turn, "hm", "z", step_end="\n")
    assert [step.text for step in found] == [*steps, "z"]
    assert [step.before for step in found] == ["ask"] + [""] * (len(steps) - 1) + ["hm"]
    ends = np.cumsum([len(step.encode()) for step in steps]) + 3
    assert [step.end for step in found] == [*ends, ends[-1] + 3]


def plainly_cut(text, step_end):
    """Texts of the steps of one turn, looked for byte by byte."""
    steps, begun = [], 0
    for end in range(1, len(text) + 1):
        said = text[begun:end].lstrip()
        while said.startswith(step_end):
            said = said.removeprefix(step_end).lstrip()
        if step_end in said:
            steps.append(text[begun:end])
            begun = end
    if begun < len(text) and (not steps or text[begun:].strip()):
        steps.append(text[begun:])
    elif begun < len(text):
        steps[-1] += text[begun:]
    return steps


@pytest.mark.parametrize("step_end", ["\n", "\n\n", "ab", "aa"])
def test_steps_are_those_that_are_found_byte_by_byte(step_end):
    drawn = random.Random(7)
    for _ in range(300):
        turn = "".join(drawn.choice("aab \n") for _ in range(drawn.randint(1, 40)))
        assert [step.text for step in cut("ask", turn, step_end=step_end)] == plainly_cut(turn, step_end), repr(turn)


@pytest.mark.parametrize("turn", ["x" * 3000 + "\n", "x" * 3000 + "\n" + "y" * 3000, "x\n" * 3000, "\n" * 3000])
def test_what_a_policy_writes_is_made_into_text_a_few_times_and_not_once_for_each_token(turn):
    tokens = np.array(BYTES.encode("?" + turn), np.int32)
    mask = np.ones(len(tokens), np.uint8)
    mask[0] = 0
    num_made = 0

    def text(some):
        nonlocal num_made
        num_made += len(some)
        return BYTES.decode(some)

    steps_of(tokens, mask, text, "\n")
    assert num_made < 20 * len(tokens)


def test_marks_of_turns_are_no_text():
    chat = ByteFormat()
    assert plain_text(chat, [*BYTES.encode("yes"), BYTES.TURN_END]) == "yes"
    assert Arithmetic.text(encode("<1+2>")) == "<1+2>"


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ([0.5], "wrong_count"),
        ([0.5, math.nan], "not_finite"),
        ([0.5, np.float32("inf")], "not_finite"),
        ([0.5, "1"], "not_a_number"),
        ([0.5, None], "not_a_number"),
        ([0.5, True], "not_a_number"),
        ([0.5, 10**4000], "out_of_range"),
        ([0.5, -1e-9], "out_of_range"),
    ],
)
def test_scores_that_are_none_are_refused_by_name(scores, reason):
    with pytest.raises(InvalidReward) as caught:
        checked(scores, 2)
    assert caught.value.reason == reason


def test_the_step_part_is_the_least_mean_or_last_score():
    scores_K = checked([0.5, 0.25, 1], 3)
    assert scores_K.dtype == np.float32
    assert [aggregated(scores_K, rule) for rule in ("min", "last")] == [0.25, 1.0]
    assert aggregated(scores_K, "mean") == pytest.approx(1.75 / 3)


# ---------------------------------------------------------------------------------------------- of a whole episode


class Scores:
    """A process reward model that gives what it is told, or raises it."""

    def __init__(self, scores):
        self.scores, self.seen = scores, None

    async def score(self, steps):
        self.seen = steps
        if isinstance(self.scores, Exception):
            raise self.scores
        return self.scores

    async def close(self):
        pass


def play(model, **settings):
    """The episode of a task of sums that calls the calculator right, then answers wrongly."""
    problem = asyncio.run(_problem())
    turns = [encode(problem.calls[0]), encode("#9999$")]
    reward = RewardConfig(process=ProcessRewardConfig(url="http://localhost/", **settings))
    process = None if model is None else ProcessScorer(model, Arithmetic.text, reward.process)
    episode = run_episode(
        ScriptedPolicy(*turns),
        Arithmetic(),
        Task("arithmetic", "train", 1, 0),
        seed=0,
        temperature=1.0,
        config=EpisodeConfig(EnvironmentConfig(), reward, process),
    )
    return asyncio.run(episode)


async def _problem():
    environment = Arithmetic()
    await environment.reset(Task("arithmetic", "train", 1, 0))
    return environment._problem


def test_the_process_models_step_part_takes_the_place_of_the_environments():
    model = Scores([0.5, 0.25])
    alone, scored = play(None), play(model)
    assert alone.reward_parts[1] > 0, "the environment says something else"
    assert alone.step_scores is None
    np.testing.assert_array_equal(scored.reward_parts, [0.0, 0.25, alone.reward_parts[2], 1.0])
    assert scored.reward == pytest.approx(alone.reward + 0.4 * (0.25 - alone.reward_parts[1]))
    assert scored.step_scores.tolist() == [0.5, 0.25]
    first, second = model.seen
    assert (first.before[0], first.text[0], second.text) == ("^", "<", "#9999$")
    assert second.before.endswith(";")
    assert (
        scored.step_ends.tolist()
        == [first.end, second.end]
        == [second.end - 6 - len(second.before), len(scored.tokens)]
    )


@pytest.mark.parametrize(
    ("scores", "kind", "signature"),
    [
        ([0.5], "data", "process/InvalidReward/wrong_count"),
        ([0.5, math.nan], "data", "process/InvalidReward/not_finite"),
        (ScoreFailed("timeout", "late"), "infrastructure", "process/ScoreFailed/timeout"),
    ],
)
def test_what_is_no_score_fails_the_episode_and_counts_at_the_rewards_breaker(scores, kind, signature):
    with pytest.raises(EpisodeFailed) as caught:
        play(Scores(scores))
    assert caught.value.stage == "process"
    tally = Tally("a")
    tally.fault("arithmetic", caught.value)
    assert tally.take()["targets"]["reward:arithmetic"][kind] == {signature: 1}


# ------------------------------------------------------------------------------------------------ of a whole group


def member(final, step, *, scored=True, config=RewardConfig()):  # noqa: B008
    parts = np.array([final, step, 1.0, 0.0], np.float32)
    weights = (config.final, config.step, config.format, config.tool)
    steps = {"step_scores": np.array([step], np.float32), "step_ends": np.array([2], np.int32)} if scored else {}
    reward = float(np.dot(parts, weights))
    return make_trajectory([1, 2], [-1, 0], reward=reward, reward_parts=parts, success=final == 1.0, **steps)


def test_a_process_score_makes_no_signal_of_a_group_that_fails_unless_asked():
    members = [member(0.0, step) for step in (0.1, 0.5, 0.9)]
    assert len({m.reward for m in members}) == 3
    assert {m.reward for m in without_lone_steps(members, RewardConfig())} == {0.1}
    assert [m.reward_parts[1] for m in without_lone_steps(members, RewardConfig())] == [0.0] * 3
    asked = RewardConfig(process=ProcessRewardConfig(all_fail=True))
    assert [m.reward for m in without_lone_steps(members, asked)] == [m.reward for m in members]
    some = [*members, member(1.0, 0.2)]
    assert [m.reward for m in without_lone_steps(some, RewardConfig())] == [m.reward for m in some]
    of_environment = [member(0.0, step, scored=False) for step in (0.1, 0.9)]
    assert [m.reward for m in without_lone_steps(of_environment, RewardConfig())] == [m.reward for m in of_environment]


def test_what_is_held_out_leaves_nothing_of_the_process_model():
    (found,) = without_steps([member(1.0, 0.7)], RewardConfig())
    assert (found.reward, found.reward_parts[1], found.step_scores, found.step_ends) == (1.1, 0.0, None, None)


def test_a_tally_sums_how_better_members_score_against_worse_ones():
    """Gaps of 0.8 − 0.3 and 0.2 − 0.6; groups that ended alike, or whose steps nobody scored, say nothing."""
    groups = [
        [member(1.0, 0.7), member(1.0, 0.9), member(0.0, 0.3)],
        [member(1.0, 0.2), member(0.0, 0.6)],
        [member(0.0, 0.2), member(0.0, 0.6)],
        [member(1.0, 0.2, scored=False), member(0.0, 0.6, scored=False)],
    ]
    assert [step_gap(group) for group in groups] == [pytest.approx(0.5), pytest.approx(-0.4), None, None]
    assert step_gap([member(0.5, 0.8), member(0.25, 0.1)]) == pytest.approx(0.7), "partial credit counts by its order"
    tally = Tally("a")
    for group in groups:
        tally.group(make_ticket("1-1", level=2), group)
    sums = tally.take()["buckets"]["arithmetic/2"]
    assert (sums["groups"], sums["contrasts"]) == (4, 2)
    assert (sums["step_gap"], sums["step_gap_squared"]) == (pytest.approx(0.1), pytest.approx(0.41))


def test_the_examples_endpoint_knows_the_flawless_solution_from_one_that_stops_early():
    problem = asyncio.run(_problem())
    assert len(problem.calls) == 2
    before = [f"^{problem.expression}=", *[f"{value};" for value in problem.running[1:]]]

    def scored(*said):
        return example_scores([{"before": b, "text": text} for b, text in zip(before, said, strict=False)])

    assert scored(*problem.calls, f"#{problem.running[-1]}$") == [0.9, 0.9, 0.9]
    assert scored(problem.calls[0], f"#{problem.running[1]}$") == [0.9, 0.1]
    assert scored(problem.calls[1], problem.calls[0]) == [0.1, 0.9]
