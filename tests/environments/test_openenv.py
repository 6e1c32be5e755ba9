"""The adapter against a real OpenEnv server, which the test starts."""

import asyncio
import contextlib
import io
import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from asyncrl_jax.actor.envs.openenv import OpenEnvFailed, OpenEnvTasks
from asyncrl_jax.types import Task

pytestmark = pytest.mark.environments

START_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def url():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = Path(__file__).with_name("openenv_server.py")
    process = subprocess.Popen([sys.executable, program, str(port)])
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def play(url, script):
    async def run():
        tasks = OpenEnvTasks(url, 1)
        try:
            return await asyncio.wait_for(script(tasks), 30)
        finally:
            await tasks.close()

    return asyncio.run(run())


def task_of(tasks, index):
    return Task(tasks.name, "train", 1, index)


def test_an_episode_from_reset_to_score_in_a_session_that_is_used_again(url):
    async def script(tasks):
        instance, results = tasks(), []
        for index in (1, 2, 3, 4, 1):
            (first,) = await instance.reset(task_of(tasks, index))
            told = await instance.step("cheat")
            ended = await instance.step(told.messages[0].content)
            results.append((first.content, told.done, ended.done, await instance.score()))
            await instance.close()
        return results

    one, *others, again = play(url, script)
    assert one[0] == again[0]  # the seed is the task's
    assert {one[0]} < {first for first, *_ in (one, *others)}
    assert one[0].startswith("a number that ends in ")
    assert (one[1], one[2]) == (False, True)
    assert (one[3].final, one[3].success) == (1.0, True)


def test_sessions_are_apart(url):
    async def script(tasks):
        instances = [tasks() for _ in range(8)]
        await asyncio.gather(*(one.reset(task_of(tasks, i)) for i, one in enumerate(instances)))
        told = await asyncio.gather(*(one.step("cheat") for one in instances))
        await asyncio.gather(*(one.step(said.messages[0].content) for one, said in zip(instances, told, strict=True)))
        return [(await one.score()).success for one in instances]

    assert play(url, script) == [True] * 8


def test_an_error_of_the_server_is_the_episodes_and_the_instance_connects_anew(url):
    async def script(tasks):
        instance = tasks()
        await instance.reset(task_of(tasks, 1))
        with pytest.raises(OpenEnvFailed, match="broken"):
            await instance.step("break")
        await instance.reset(task_of(tasks, 1))
        return (await instance.step("x")).done

    assert play(url, script)


NONSENSE = [
    "no JSON",
    [],
    {"type": "observation"},
    {"type": "observation", "data": 5},
    {"type": "observation", "data": {"observation": []}},
    {"type": "observation", "data": {"observation": {"text": "x"}, "reward": "much", "done": True}},
    {"type": "observation", "data": {"observation": {"text": "x"}, "reward": 1.0, "done": "no"}},
]


class Talker:
    """Answers resets well and steps by the index that they ask for; counts who is connected."""

    def __init__(self):
        self.num_connected = 0

    async def __call__(self, socket):
        self.num_connected += 1
        try:
            async for message in socket:
                asked = json.loads(message)
                answer = {
                    "type": "observation",
                    "data": {"observation": {"text": "ask"}, "reward": None, "done": False},
                }
                if asked["type"] == "step":
                    answer = NONSENSE[int(asked["data"]["text"])]
                await socket.send(answer if isinstance(answer, str) else json.dumps(answer))
        finally:
            self.num_connected -= 1


def test_an_answer_that_is_none_costs_the_episode_and_leaves_no_session_open(monkeypatch):
    from websockets.asyncio.server import serve

    schema = {"action": {"properties": {"text": {"type": "string"}}}}
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(json.dumps(schema).encode()))

    async def run():
        talker = Talker()
        async with serve(talker, "127.0.0.1", 0) as server:
            tasks = OpenEnvTasks(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 1)
            for index in range(len(NONSENSE)):
                for _ in range(3):
                    instance = tasks()
                    await instance.reset(task_of(tasks, 1))
                    with pytest.raises(ValueError, match=r"an answer|done is|reward is|JSON|Expecting"):
                        await instance.step(str(index))
                    await instance.close()
            for _ in range(3):  # whose instance is not used again, though nothing failed
                instance = tasks()
                await instance.reset(task_of(tasks, 1))
                await instance.close()
            await asyncio.sleep(0.1)
            found = talker.num_connected, len(tasks.sockets)
            await tasks.close()
            return found

    assert asyncio.run(asyncio.wait_for(run(), 60)) == (1, 1)


def test_what_is_no_server_is_named():
    with pytest.raises(ValueError, match="no OpenEnv server"):
        OpenEnvTasks("http://127.0.0.1:9", 1)
    with pytest.raises(ValueError, match="http://"):
        OpenEnvTasks("localhost:8000", 1)
