"""Environments that come with the package, played for real: scorers in processes, programs in sandboxes."""

import asyncio
import dataclasses
import random
import shutil

import pytest

from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.envs import code, reasoning, registry
from asyncrl_jax.actor.envs.code import CodeTasks, make_problem
from asyncrl_jax.actor.envs.function import FunctionTasks
from asyncrl_jax.actor.envs.questions import QuestionTasks
from asyncrl_jax.actor.envs.reasoning import ReasoningTasks, extract_answer, make_entry, num_levels
from asyncrl_jax.actor.envs.registry import make_environments
from asyncrl_jax.actor.tools.sandbox import Limits, Sandbox
from asyncrl_jax.actor.verifiers import VerifierPool
from asyncrl_jax.config import Config, override
from asyncrl_jax.types import Task


def double(seed, level):
    n = random.Random(seed).randrange(10**level)
    return f"Twice {n}?", lambda answer: float(answer.strip() == str(2 * n))


def only_a_question(seed, level):
    return "Twice 2?"


def raises(seed, level):
    raise KeyError("seed")


no_function = 3


async def _play(factory, task, answer_of):
    environment = factory()
    messages = await environment.reset(task)
    await environment.step(answer_of(messages))
    score = await environment.score()
    await environment.close()
    return score


def test_an_answer_stands_in_the_last_pair_of_tags():
    assert extract_answer("<answer>1</answer> no, <answer> 2\n</answer>") == "2"
    assert extract_answer("2") is None
    assert extract_answer("<answer>" * 50_000) is None  # at once, not after looking for an end from each of them


def test_a_reasoning_task_is_the_same_everywhere_and_scored_by_its_data_set():
    task = Task("reasoning_gym:leg_counting", "train", 2, 5)
    entry = make_entry("leg_counting", task)
    assert entry == make_entry("leg_counting", task)
    assert entry["question"] != make_entry("leg_counting", dataclasses.replace(task, split="heldout"))["question"]

    async def scenario():
        verifiers = VerifierPool()
        tasks = ReasoningTasks("leg_counting", verifiers)
        try:
            return [
                await _play(tasks, task, lambda _, a=answer: a)
                for answer in (f"<answer>{entry['answer']}</answer>", "<answer>-1</answer>", entry["answer"])
            ]
        finally:
            await verifiers.close()

    right, wrong, without_tags = asyncio.run(scenario())
    assert (right.final, right.success, right.well_formed) == (1.0, True, True)
    assert wrong.final < 1.0
    assert not wrong.success
    assert not without_tags.well_formed


def test_levels_follow_the_curriculum_of_the_data_set():
    assert num_levels("chain_sum") == reasoning.MAX_LEVELS
    lengths = [len(make_entry("chain_sum", Task("", "train", level, 0))["question"]) for level in (1, 5)]
    assert lengths[0] < lengths[1]
    assert num_levels("gsm_symbolic") == 1  # has no curriculum
    with pytest.raises(ValueError, match="reasoning_gym:nothing: no such data set"):
        num_levels("nothing")


def test_a_plain_function_is_an_environment():
    tasks = FunctionTasks(f"{__name__}:double", num_levels=2)
    task = Task(tasks.name, "train", 2, 3)
    answer = lambda messages: str(2 * int(messages[0].content.split()[1][:-1]))  # noqa: E731
    assert asyncio.run(_play(tasks, task, answer)).success
    assert not asyncio.run(_play(tasks, task, lambda _: "x")).success


@pytest.mark.parametrize("kind", ["function", "agent"])
@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("no_such_module:f", "No module named 'no_such_module'; is its directory on PYTHONPATH?"),
        (__name__, f"{__name__}: name it as KIND:<module>:<name>"),
        (f"{__name__}:dubble", "has no attribute 'dubble'"),
        (f"{__name__}:no_function", "a function written in Python is needed, this is 3"),
        ("time:sleep", "a function written in Python is needed, this is <built-in function sleep>"),
        ("broken_at_import:f", "broken_at_import:f: ZeroDivisionError: division by zero"),
        ("needs_another:f", "No module named 'nosuch'$"),
    ],
)
def test_a_function_that_can_not_be_had_is_refused_by_name(kind, address, complaint, tmp_path, monkeypatch):
    (tmp_path / "broken_at_import.py").write_text("1 / 0\n")
    (tmp_path / "needs_another.py").write_text("import nosuch\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = override(Config(), {"environment.name": f"{kind}:{address}"})
    with pytest.raises(ValueError, match=complaint.replace("KIND", kind).replace("?", r"\?")):
        make_environments(config)


def test_a_function_that_returns_something_else_fails_with_what_it_returned():
    tasks = FunctionTasks(f"{__name__}:only_a_question", num_levels=1)
    with pytest.raises(TypeError, match="only_a_question returned 'Twice 2\\?', not a question and what scores"):
        asyncio.run(_play(tasks, Task(tasks.name, "train", 1, 0), str))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"environment.name": "agent:m:f"}, r"pip install 'asyncrl-jax\[agents\]'"),
        ({"environment.name": "gymnasium:x"}, r"pip install 'asyncrl-jax\[gym\]'"),
        ({"environment.name": "math:x"}, r"pip install 'asyncrl-jax\[math\]'"),
        ({"environment.name": "openenv:x"}, r"pip install 'asyncrl-jax\[openenv\]'"),
        ({"environment.name": "verifiers:x"}, r"pip install 'asyncrl-jax\[verifiers\]'"),
        ({"environment.name": "reasoning_gym:x"}, "pip install --no-deps reasoning-gym"),
        ({"environment.name": "code", "tools.mcp": ("x",)}, r"tools.mcp=x: needs pip install 'asyncrl-jax\[mcp\]'"),
        ({"environment.name": "code", "environment.tokenizer": "x"}, r"tokenizer=x: needs .*'asyncrl-jax\[hf\]'"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_what_installs_it(changes, remedy, monkeypatch):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=remedy):
        make_environments(override(Config(), changes))
    with pytest.raises(ValueError, match=r"function:no\.where:f"):
        FunctionTasks("no.where:f", 1)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_code_problems_are_the_same_everywhere_and_their_tests_are_right(level):
    problems = [make_problem(Task("code", "train", level, index)) for index in range(20)]
    assert problems == [make_problem(Task("code", "train", level, index)) for index in range(20)]
    assert len({problem.question for problem in problems}) > 10
    assert all(len(problem.tests) == code.NUM_TESTS for problem in problems)


def test_no_code_problem_is_in_both_splits():
    """By the hash of its question: a list of one number is asked for soon again."""
    asked = {
        split: {make_problem(Task("code", split, level, i)).question for level in (1, 2, 3) for i in range(300)}
        for split in ("train", "heldout")
    }
    assert all(code.is_heldout(question) == (split == "heldout") for split in asked for question in asked[split])
    assert min(map(len, asked.values())) > 800


def test_a_program_gets_partial_credit():
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    tasks = CodeTasks(Sandbox(limits=Limits(wall_s=5.0)))
    index = next(i for i in range(100) if "their sum" in make_problem(Task("code", "train", 1, i)).question)
    task = Task("code", "train", 1, index)
    first = make_problem(task).tests[0]
    programs = {
        "all": "a, b = map(int, input().split()); print(a + b)",
        "one": f"print({first.stdout})",
        "none": "print('x')",
        "syntax": "print(",
    }

    async def scenario():
        return {
            name: await _play(tasks, task, lambda _, p=program: f"```python\n{p}\n```")
            for name, program in programs.items()
        } | {"nothing": await _play(tasks, task, lambda _: "no program")}

    scores = asyncio.run(scenario())
    assert (scores["all"].final, scores["all"].step, scores["all"].success) == (1.0, 1.0, True)
    assert (scores["one"].final, scores["one"].well_formed) == (0.0, True)
    assert 0.2 <= scores["one"].step < 1.0
    assert (scores["none"].step, scores["none"].well_formed) == (0.0, True)
    assert not scores["syntax"].well_formed
    assert not scores["nothing"].well_formed


def test_a_gymnasium_environment_of_text_is_played():
    gymnasium = pytest.importorskip("gymnasium")

    class Echo(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Text(100)

        def __init__(self, prefix="w"):
            self.prefix = prefix

        def reset(self, *, seed=None, options=None):
            self.word = f"{self.prefix}{seed % 97}"
            return f"say {self.word}", {}

        def step(self, action):
            return "done", float(action == self.word), True, False, {}

    gymnasium.register("Echo-v0", Echo, disable_env_checker=True)
    config = override(Config(), {"environment.name": "gymnasium:Echo-v0", "model.vocab_size": 258})
    episode = make_environments(config)()

    async def scenario(right):
        tokens = await episode.reset(Task("gymnasium:Echo-v0", "train", 1, 0))
        word = bytes(t for t in tokens if t < 256).decode().split("say ")[1].split("assistant")[0]
        await episode.step(tuple(word.encode()) if right else (65,))
        score = await episode.score()
        await episode.close()
        return score

    assert asyncio.run(scenario(True)).success
    assert not asyncio.run(scenario(False)).success
    config = override(config, {"environment.arguments": '{"prefix": "v"}'})
    made = make_environments(config)
    assert b"say v" in bytes(t for t in asyncio.run(made().reset(Task(made.name, "train", 1, 0))) if t < 256)
    assert "prefix" in made.identity
    with pytest.raises(ValueError, match="unexpected keyword argument 'suffix'"):
        make_environments(override(config, {"environment.arguments": '{"suffix": 1}'}))
    config = override(config, {"environment.arguments": ""})
    with pytest.raises(ValueError, match="is no Text space"):
        make_environments(override(config, {"environment.name": "gymnasium:CartPole-v1"}))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"environment.name": "chess"}, "environment.name=chess: not known"),
        ({"environment.arguments": "{}"}, "arguments={}: arithmetic takes none; gymnasium:<id> and verifiers:<id> do"),
        ({"environment.name": "verifiers:x", "environment.processes": 0}, "processes=0: at least 1: verifiers env"),
        (
            {"environment.prompt_variants": "a.json"},
            "prompt_variants=a.json: empty: arithmetic puts its questions itself",
        ),
        (
            {"environment.name": "agent:x:play", "environment.opening": "a.json"},
            "opening=a.json: empty: agent:x:play puts its questions itself",
        ),
        ({"tools.names": ("python",)}, "tools.names=python: empty: arithmetic brings its own tools"),
        (
            {"environment.name": "agent:m:f", "tools.mcp": ("x", "y")},
            "tools.mcp=x,y: empty: agent:m:f brings its own tools",
        ),
        ({"environment.name": "code", "tools.names": ("abacus",)}, "no tool 'abacus'"),
        ({"environment.name": "code"}, "model.vocab_size=32: environment code has 258 tokens"),
        ({"environment.name": "code", "environment.tokenizer": "/nowhere"}, "no tokenizer there"),
        ({"environment.name": "reasoning_gym:gsm_symbolic", "model.vocab_size": 258}, "has 1 levels"),
    ],
)
def test_what_an_actor_could_not_play_is_refused_at_the_start(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_environments(override(Config(), changes))


def test_questions_of_a_file_are_split_by_their_text_and_scored_by_their_value(tmp_path):
    pytest.importorskip("math_verify")
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(f'{{"question": "half of {n}?", "answer": "{n}/2"}}\n' for n in range(60)))

    async def scenario():
        verifiers = VerifierPool(timeout_s=30.0)
        tasks = QuestionTasks(str(path), verifiers)
        try:
            play = lambda answer: _play(tasks, Task(tasks.name, "train", 1, 3), answer)  # noqa: E731
            half = lambda messages: f"\\boxed{{{int(messages[1].content.split()[2][:-1]) / 2}}}"  # noqa: E731
            return tasks.questions, await play(half), await play(lambda _: "\\boxed{-1}"), await play(lambda _: "?")
        finally:
            await verifiers.close()

    questions, right, wrong, unboxed = asyncio.run(scenario())
    assert right.success
    assert not wrong.success
    assert not unboxed.well_formed
    assert not set(questions["train", 1]) & set(questions["heldout", 1])
    assert len(questions["train", 1]) + len(questions["heldout", 1]) == 60


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"question": "?"}', "line 1: needs"),
        ("[]", "line 1: needs"),
        ("x", "line 1: needs"),
        ("", "no questions"),
        ('{"question": "?", "answer": 1}', "no question in split heldout"),
    ],
)
def test_a_file_of_questions_that_is_wrong_is_refused_with_its_line(tmp_path, text, complaint):
    (tmp_path / "questions.jsonl").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        QuestionTasks(str(tmp_path / "questions.jsonl"), VerifierPool())


def test_messages_read_as_chat_templates_want_them():
    assert Message("tool", "4", "calculator").as_dict() == {"role": "tool", "content": "4", "name": "calculator"}
    assert Message("user", "?").as_dict() == {"role": "user", "content": "?"}
