"""Environments in processes of their own: what they do there stays there."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from asyncrl_jax.actor.envs import isolated
from asyncrl_jax.actor.envs.isolated import (
    EnvironmentDied,
    EnvironmentProcesses,
    EnvironmentRaised,
    IsolatedTasks,
    IsolationLimits,
    Known,
)
from asyncrl_jax.actor.envs.third_party import third_party_factory
from asyncrl_jax.actor.usage import usage_of
from asyncrl_jax.types import Task

ROUGH = "text:rough:ROUGH"
DIES, SEGFAULTS, BLOCKS, HANGS, LEAKS, WAITS, NAPS, FINE = 5, 6, 7, 8, 9, 10, 11, 100
GARBLES, EXITS, GIVES_UP, FLOODS, UNSPEAKABLE, NUMPY, HANGS_IN_A_THREAD = range(13, 20)


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    tests = str(Path(__file__).parents[1])
    monkeypatch.syspath_prepend(tests)
    monkeypatch.setenv("PYTHONPATH", tests)
    sys.modules.pop("rough", None)


def play(script, processes=1, **limits):
    """Runs `script(tasks)` and returns what it returns; every process has ended then."""

    async def run():
        tasks = IsolatedTasks(
            third_party_factory(ROUGH, 1), EnvironmentProcesses(Known(ROUGH, 1), processes, IsolationLimits(**limits))
        )
        try:
            return await asyncio.wait_for(script(tasks), 60)
        finally:
            await tasks.processes.close()

    return asyncio.run(run())


async def episode(tasks, index, text="right", instance=None):
    """(pid of the process that played it, score) of one episode."""
    instance = instance or tasks()
    try:
        await instance.reset(Task(ROUGH, "train", 1, index))
        observation = await instance.step(text)
        return int(observation.messages[0].content), await instance.score()
    finally:
        await instance.close()


def test_an_episode_is_what_it_would_be_in_the_actor_but_elsewhere():
    async def script(tasks):
        instance = tasks()
        return [await episode(tasks, FINE, text, instance) for text in ("right", "wrong")]  # used again

    (pid, right), (_, wrong) = play(script)
    assert pid != os.getpid()
    assert (right.final, right.success, wrong.final, wrong.success) == (1.0, True, 0.0, False)


def test_env_01_what_an_environment_raises_is_raised_here_and_costs_its_episode_alone():
    async def script(tasks):
        results = await asyncio.gather(*(episode(tasks, i) for i in (1, 2, FINE)), return_exceptions=True)
        return results, tasks.processes.counters

    (data, odd, (_, score)), counters = play(script)
    assert isinstance(data, ValueError)  # whose fault it is is told by its type
    assert isinstance(odd, EnvironmentRaised)
    assert "Odd: broken" in str(odd)
    assert score.success
    assert (counters.environments_started, counters.environments_died) == (1, 0)


@pytest.mark.parametrize("index", [DIES, SEGFAULTS])
def test_a_death_is_laid_to_whose_code_was_running_and_the_others_are_told_apart(index):
    async def script(tasks):
        await episode(tasks, FINE)  # the process is there
        waiting = [asyncio.create_task(episode(tasks, WAITS)) for _ in range(5)]
        await asyncio.sleep(0.3)
        results = await asyncio.gather(episode(tasks, index), *waiting, return_exceptions=True)
        again = await episode(tasks, FINE)
        return results, again, tasks.processes.counters

    (culprit, *others), (_, score), counters = play(script)
    assert isinstance(culprit, EnvironmentDied)
    assert culprit.culprit
    assert [type(other) for other in others] == [EnvironmentDied] * 5
    assert not any(other.culprit for other in others)
    assert score.success
    assert (counters.environments_started, counters.environments_died) == (2, 1)


def test_a_task_that_killed_a_process_is_played_again_in_one_of_its_own():
    async def script(tasks):
        with pytest.raises(EnvironmentDied):
            await episode(tasks, DIES)
        waiting = asyncio.create_task(episode(tasks, WAITS))
        await asyncio.sleep(0.01)
        with pytest.raises(EnvironmentDied):
            await episode(tasks, DIES)
        return await waiting, tasks.processes.counters

    (_, score), counters = play(script)
    assert score.success is True
    assert counters.environments_died == 2


def test_orch_06_env_02_one_that_blocks_its_process_leaves_the_actors_loop_alone_and_is_killed(monkeypatch):
    monkeypatch.setattr(isolated, "WATCH_S", 0.1)

    async def script(tasks):
        await episode(tasks, FINE)
        late, blocked = 0.0, asyncio.create_task(episode(tasks, BLOCKS))
        while not blocked.done():
            due = time.monotonic() + 0.02
            await asyncio.sleep(0.02)
            late = max(late, time.monotonic() - due)
        again = await episode(tasks, FINE)
        return blocked.exception(), late, again, tasks.processes.counters

    error, late, (_, score), counters = play(script, stuck_s=0.5)
    assert isinstance(error, EnvironmentDied)
    assert error.culprit
    assert late < 0.4
    assert score.success
    assert (counters.environments_stuck, counters.environments_died) == (1, 0)


def test_env_10_a_call_that_never_returns_is_left_and_its_instance_forgotten():
    async def script(tasks):
        instance = tasks()
        await instance.reset(Task(ROUGH, "train", 1, HANGS))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(instance.step("x"), 0.2)
        await instance.close()
        return await episode(tasks, FINE), [process.num_episodes for process in tasks.processes.running]

    (_, score), running = play(script)
    assert score.success
    assert running == [0]


@pytest.mark.parametrize(
    ("index", "told"), [(EXITS, "enough"), (GIVES_UP, ""), (FLOODS, "bytes"), (UNSPEAKABLE, "text")]
)
def test_env_01_whatever_an_environment_raises_or_says_ends_its_call_at_once_and_takes_nobody_with_it(index, told):
    async def script(tasks):
        results = await asyncio.wait_for(
            asyncio.gather(episode(tasks, index), episode(tasks, WAITS), return_exceptions=True), 20
        )
        return results, tasks.processes.counters

    (error, (_, score)), counters = play(script)
    assert isinstance(error, ValueError if index == FLOODS else EnvironmentRaised)
    assert told in str(error)
    assert score.success
    assert (counters.environments_started, counters.environments_died) == (1, 0)


def test_rewards_may_be_numpys():
    _, score = play(lambda tasks: episode(tasks, NUMPY))
    assert (score.final, score.success) == (1.0, True)


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        '"x"',
        "7",
        "nonsense",
        "{}",
        '{"abandoned": []}',
        '{"id": []}',
        '{"id": 2}',
        '{"id": 2, "error": 5}',
        '{"id": 2, "error": [5, 5]}',
        "[" * 10**5,
    ],
)
def test_a_process_that_says_what_is_no_answer_is_replaced_at_once(line):
    async def script(tasks):
        await tasks.processes.start()
        error = (await asyncio.gather(episode(tasks, GARBLES, line), return_exceptions=True))[0]
        return error, await episode(tasks, FINE), tasks.processes.counters

    error, (_, score), counters = play(script)
    assert isinstance(error, EnvironmentDied)
    assert score.success
    assert counters.environments_died == 1


def test_env_09_calls_that_are_given_up_and_never_end_do_not_take_all_threads(monkeypatch):
    monkeypatch.setattr(isolated, "WATCH_S", 0.05)
    monkeypatch.setattr(isolated, "SETTLED_EPISODES", 2)
    monkeypatch.setattr(isolated, "MORE_CALLS", 3)

    async def script(tasks):
        first, _ = await episode(tasks, FINE)
        for _ in range(4):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(episode(tasks, HANGS_IN_A_THREAD), 0.2)
        await asyncio.sleep(0.5)
        return first, await episode(tasks, FINE), tasks.processes.counters

    first, (then, score), counters = play(script)
    assert first != then
    assert score.success
    assert counters.environments_leaking == 1


def test_env_09_a_process_that_takes_more_and_more_is_replaced_when_its_episodes_have_ended(monkeypatch):
    monkeypatch.setattr(isolated, "WATCH_S", 0.05)
    monkeypatch.setattr(isolated, "SETTLED_EPISODES", 2)

    async def script(tasks):
        first = [(await episode(tasks, FINE))[0] for _ in range(3)]
        await asyncio.sleep(0.2)
        slow = tasks()
        await slow.reset(Task(ROUGH, "train", 1, FINE))  # stays in the first process
        for _ in range(5):
            await episode(tasks, LEAKS)
        await asyncio.sleep(0.2)
        then, _ = await episode(tasks, FINE)
        alive = usage_of(first[0]) is not None
        await slow.step("right")
        score = await slow.score()
        await slow.close()
        for _ in range(100):
            if usage_of(first[0]) is None or not usage_of(first[0]).rss_bytes:
                break
            await asyncio.sleep(0.02)
        gone = usage_of(first[0]) is None or not usage_of(first[0]).rss_bytes
        return first, then, alive, score.success, gone, tasks.processes.counters

    first, then, alive, success, gone, counters = play(script, more_memory_bytes=2**27)
    assert len(set(first)) == 1
    assert then != first[0]
    assert alive  # its last episode was let end
    assert success
    assert gone
    assert counters.environments_leaking == 1


def test_a_start_is_not_cut_short_by_the_limit_of_who_waits_for_it():
    async def script(tasks):
        results = await asyncio.gather(
            *(asyncio.wait_for(episode(tasks, FINE), 0.001) for _ in range(3)), return_exceptions=True
        )
        await tasks.processes.start()
        return results, await episode(tasks, FINE), tasks.processes.counters

    results, (_, score), counters = play(script)
    assert [type(result) for result in results] == [TimeoutError] * 3
    assert score.success
    assert counters.environments_started == 1


def test_one_that_is_closed_while_it_starts_leaves_no_process():
    async def script(tasks):
        starting = asyncio.create_task(tasks.processes.start())
        await asyncio.sleep(0.05)
        await tasks.processes.close()
        await asyncio.gather(starting, return_exceptions=True)
        return usage_of(os.getpid()).processes

    assert play(script) == usage_of(os.getpid()).processes


def test_one_that_was_replaced_is_forgotten_once_it_has_ended():
    async def script(tasks):
        processes = tasks.processes
        await processes.start()
        (ended,) = processes.running
        ended.retired = True
        await ended.close()
        await processes.start()
        (leaving,) = processes.running
        leaving.retired = True
        await processes.start()
        return processes._leaving == {leaving}, len(processes.running)

    assert play(script) == (True, 1)


def test_several_processes_share_the_episodes():
    async def script(tasks):
        return {pid for pid, _ in await asyncio.gather(*(episode(tasks, WAITS) for _ in range(6)))}

    assert len(play(script, processes=2)) == 2


def test_an_environment_that_cannot_be_made_says_so():
    with pytest.raises(ValueError, match="text:rough:NONE"):
        third_party_factory("text:rough:NONE", 1)
    with pytest.raises(ValueError, match=r"text:os:path.*no name"):
        third_party_factory("text:os:path", 1)
