"""The code of docs/environments.md, as it stands there."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from asyncrl_jax.actor.envs.overlap import check_splits
from asyncrl_jax.actor.envs.registry import make_environments
from asyncrl_jax.config import Config, override
from asyncrl_jax.types import Task

DOCUMENT = Path(__file__).parents[3] / "docs" / "environments.md"
BLOCKS = {"my_tasks": "def double(", "my_environment": "class Countdown:", "my_agent": "async def solve("}
TASKS = ["function:my_tasks:double", "function:my_tasks:digits", "text:my_environment:COUNTDOWN"]


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    for module, start in BLOCKS.items():
        (code,) = [block for block in blocks if start in block]
        (tmp_path / f"{module}.py").write_text(code)
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


def environments(name):
    return make_environments(override(Config(), {"environment.name": name, "model.vocab_size": 258}))


@pytest.mark.parametrize("name", [*TASKS, "agent:my_agent:solve"])
def test_documented_code_is_an_environment(name):
    assert f"--config.environment.name={name}" in DOCUMENT.read_text()
    assert environments(name).name == name


@pytest.mark.parametrize("name", TASKS)
def test_documented_tasks_are_apart_and_leave_room(name):
    found = check_splits(environments(name), (1, 2, 3), 50)
    assert not found.exact
    assert found.lengths[1] < Config().environment.max_tokens


def test_the_documented_environment_of_several_turns_is_played():
    environment = environments("text:my_environment:COUNTDOWN")()

    async def play(answers):
        await environment.reset(Task("text:my_environment:COUNTDOWN", "train", 1, 3))
        for answer in answers:
            observation = await environment.step([*answer.encode(), 257])
        score = await environment.score()
        await environment.close()
        return observation.done, score.success, score.parts["final"]

    assert asyncio.run(play(["16", "15"])) == (True, True, 1.0)
    assert asyncio.run(play(["16", "9"])) == (True, False, 0.5)
    assert asyncio.run(play(["16"])) == (False, False, 0.5)
