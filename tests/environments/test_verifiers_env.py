"""Environments of the real package, played against the recording endpoint by a policy that says given turns."""

import asyncio
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from asyncrl_jax.actor.chat.tokenizer import ByteTokenizer
from asyncrl_jax.actor.envs import isolated
from asyncrl_jax.actor.envs.registry import make_environments
from asyncrl_jax.actor.envs.verifiers_env import check_starts
from asyncrl_jax.actor.episode import EpisodeConfig, EpisodeFailed, run_episode
from asyncrl_jax.actor.services import Services
from asyncrl_jax.actor.tally import Tally
from asyncrl_jax.config import Config, EnvironmentConfig, RewardConfig
from asyncrl_jax.types import REWARD_PARTS, FinishReason, Task
from tests.actor.scripted import ScriptedPolicy

pytestmark = pytest.mark.environments

NAME = "verifiers:vf-sums"
FINAL = REWARD_PARTS.index("final")
END = ByteTokenizer.TURN_END


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def settings(kind, **named):
    fields = {f: named.pop(f) for f in ("call_timeout_s", "max_turns", "max_tokens") if f in named}
    fields = {"max_tokens": 4000, "max_turns": 10} | fields
    return EnvironmentConfig(
        name=NAME,
        arguments=json.dumps({"kind": kind, **named}),
        level_weights=(1.0,),
        demonstrated_levels=(1,),
        **fields,
    )


def play(config, script):
    """What `script(episode, services)` returns; `episode(index, *turns)` plays one and returns (trajectory, policy)."""

    async def run():
        services = Services(config)
        source = make_environments(_run(config), services)
        rules = EpisodeConfig(config, RewardConfig())

        async def episode(index, *turns, split="train"):
            policy = ScriptedPolicy(*([*turn.encode(), END] for turn in turns))
            task = Task(NAME, split, 1, index)
            return await run_episode(policy, source(), task, seed=1, temperature=1.0, config=rules), policy

        try:
            await services.start()
            return await asyncio.wait_for(script(episode, services), 120)
        finally:
            await services.close()

    return asyncio.run(run())


def _run(config):
    plain = Config()
    model = dataclasses.replace(plain.model, vocab_size=300, max_positions=8192)
    learner = dataclasses.replace(plain.learner, pack_tokens=8192)
    return dataclasses.replace(plain, environment=config, model=model, learner=learner)


def heard(policy):
    return ["".join(chr(t) if t < 256 else "|" for t in new) for new in policy.heard]


def test_one_turn_is_scored_by_the_rubric_and_its_tokens_are_those_that_were_sampled():
    async def script(episode, services):
        return await episode(3, "3"), await episode(3, "4"), await episode(3, "4" * 30), services.values()

    (won, policy), (near, _), (lost, _), values = play(settings("single"), script)
    assert heard(policy)[0] == "|system\nAnswer.||user\nsay 3||assistant\n"
    assert won.tokens[won.loss_mask == 1].tolist() == [ord("3"), END]
    np.testing.assert_array_equal(won.behaviour_logprobs[won.loss_mask == 1], [-ord("3"), -END])
    assert won.finish_reason is FinishReason.ANSWERED
    assert [t.reward_parts[FINAL] for t in (won, near, lost)] == [1.0, pytest.approx(0.2), 0.0]
    assert [t.success for t in (won, near, lost)] == [True, False, False]
    assert (values["rubric/right"], values["rubric/short"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert (values["environments_started"], values["environments_died"]) == (1, 0)


def test_several_turns_continue_one_conversation_and_nothing_of_it_is_written_twice():
    async def script(episode, services):
        return await episode(5, "7", "6", "5")

    (trajectory, policy) = play(settings("multi"), script)
    assert heard(policy) == ["|user\nsay 5||assistant\n", "|user\nand 1?||assistant\n", "|user\nand 0?||assistant\n"]
    assert trajectory.num_turns == 3
    assert trajectory.finish_reason is FinishReason.ANSWERED
    sampled = trajectory.tokens[trajectory.loss_mask == 1].tolist()
    assert sampled == [ord("7"), END, ord("6"), END, ord("5"), END]


def test_calls_of_its_tools_are_answered_by_it_and_its_rubric_sees_them():
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'

    async def script(episode, services):
        return await episode(5, call, "5"), await episode(5, "5"), services.values()

    (trajectory, policy), (alone, _), values = play(settings("tool"), script)
    assert "Adds two numbers" in heard(policy)[0]  # the schema is shown
    assert heard(policy)[1] == "|tool\n5||assistant\n"
    assert (trajectory.reward_parts[FINAL], trajectory.success) == (1.0, True)
    assert (alone.reward_parts[FINAL], alone.success) == (0.75, False)
    assert values["rubric/total_tool_calls"] == 0.5


def test_a_malformed_call_is_answered_by_the_environment_and_an_empty_turn_is_an_answer():
    async def script(episode, services):
        wrong = '<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>'
        return await episode(5, wrong, "5"), await episode(5, "")

    (trajectory, policy), (empty, _) = play(settings("tool"), script)
    assert "tool" in heard(policy)[1]
    assert trajectory.reward_parts[FINAL] == 1.0
    assert (empty.reward_parts[FINAL], empty.finish_reason) == (0.0, FinishReason.ANSWERED)


@pytest.mark.parametrize(("said", "detail"), [("raise", "lost"), ("nan", "nan"), ("none", "NoneType"), ("big", "7.0")])
def test_rew_a_reward_that_is_none_fails_its_episode_as_the_rewards_fault_and_is_never_zero(said, detail):
    async def script(episode, services):
        with pytest.raises(EpisodeFailed, match=detail) as failed:
            await episode(1, said)
        return failed.value, await episode(1, "1")

    error, (fine, _) = play(settings("odd"), script)
    assert error.stage == "score"
    assert fine.success
    tally = Tally("actor-0")
    tally.fault(NAME, error)
    assert tally.take()["targets"][f"reward:{NAME}"]["data"]


def test_a_failure_of_what_it_needs_is_no_reward_of_zero():
    async def script(episode, services):
        with pytest.raises(EpisodeFailed, match="no sandbox") as failed:
            await episode(5, "break")
        return failed.value

    assert play(settings("multi"), script).stage == "step"


def test_env_10_one_that_hangs_is_given_up_and_its_work_really_stops(monkeypatch, tmp_path):
    monkeypatch.setenv("VF_SUMS_CANCELLED", str(tmp_path / "cancelled"))

    async def script(episode, services):
        (processes,) = services._processes
        with pytest.raises(EpisodeFailed, match="no answer within 4 s"):
            await episode(1, "hang")
        fine, _ = await episode(1, "1")
        return fine, [process.num_episodes for process in processes.running], processes.counters

    fine, under_way, counters = play(settings("rough", call_timeout_s=4.0), script)
    assert fine.success
    assert under_way == [0]
    assert (tmp_path / "cancelled").exists()
    assert (counters.environments_started, counters.environments_died) == (1, 0)


def test_env_02_a_death_is_laid_to_its_episode_and_the_others_of_the_process_are_told_apart():
    async def script(episode, services):
        waiting = [asyncio.create_task(episode(index, "wait")) for index in range(2, 5)]
        await asyncio.sleep(0.5)
        results = await asyncio.gather(episode(1, "die"), *waiting, return_exceptions=True)
        fine, _ = await episode(1, "1")
        return results, fine, services.values()

    results, fine, values = play(settings("rough"), script)
    assert [type(result) for result in results] == [EpisodeFailed] * 4
    assert [result.__cause__.culprit for result in results] == [True, False, False, False]
    assert fine.success
    assert (values["environments_started"], values["environments_died"]) == (2, 1)


def test_orch_06_one_that_blocks_is_killed_and_the_next_episode_is_played(monkeypatch):
    monkeypatch.setattr(isolated, "WATCH_S", 0.1)

    async def script(episode, services):
        with pytest.raises(EpisodeFailed):
            await episode(1, "block")
        await services.start()  # which may take longer than an episode may
        fine, _ = await episode(2, "2")
        return fine, services.values()

    fine, values = play(settings("rough", call_timeout_s=3.0), script)
    assert fine.success
    assert values["environments_stuck"] == 1


def test_data_03_held_out_tasks_are_never_training_tasks():
    async def script(episode, services):
        seen = {"train": set(), "heldout": set()}
        for split, found in seen.items():
            for index in range(8):
                _, policy = await episode(index, "x", split=split)
                found.add(heard(policy)[0])
        return seen

    for own in (True, False):
        seen = play(settings("single", num_rows=60, own_heldout=own), script)
        assert seen["train"]
        assert seen["heldout"]
        assert not seen["train"] & seen["heldout"]


@pytest.mark.parametrize(
    ("named", "detail"), [({"leak": True}, "40 prompts"), ({"num_rows": 1, "own_heldout": False}, "no rows")]
)
def test_an_environment_that_cannot_be_trained_on_is_refused_before_a_run(named, detail, capfd):
    assert "did not start" in check_starts(settings("single", **named))
    assert detail in capfd.readouterr().err
    assert check_starts(settings("single")) == ""


def test_one_whose_rewards_need_a_group_is_refused_by_name(capfd):
    assert "did not start" in check_starts(settings("group"))
    assert "scores groups" in capfd.readouterr().err
