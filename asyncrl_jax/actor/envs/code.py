"""Programming tasks with partial credit: the program is run in a sandbox against tests that it does not see.

A task asks for a program that reads standard input and writes standard output. `format` is 1 if it compiles, `step` is
the share of tests passed, `final` is 1 if all are.

| level | asks for |
|---|---|
| 1 | one operation on two whole numbers |
| 2 | one operation on a list of whole numbers |
| 3 | two operations on a list, one after the other |
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence

from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.envs.text import TextEnvironment, TextObservation, TextScore
from asyncrl_jax.actor.tools.base import Tool
from asyncrl_jax.actor.tools.sandbox import Sandbox
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.types import Task

NUM_TESTS = 5
NUM_SHOWN = 1  # tests that the prompt shows; all count

_FENCED = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)

_TWO_NUMBERS: dict[str, Callable[[int, int], int]] = {
    "their sum": lambda a, b: a + b,
    "their difference, the first minus the second": lambda a, b: a - b,
    "their product": lambda a, b: a * b,
    "the larger of them": max,
    "the smaller of them": min,
    "the square of the first plus the second": lambda a, b: a * a + b,
    "the distance between them": lambda a, b: abs(a - b),
}
_LISTS: dict[str, Callable[[list[int]], list[int]]] = {
    "sorted from small to large": sorted,
    "in reverse order": lambda values: values[::-1],
    "with negative ones left out": lambda values: [v for v in values if v >= 0],
    "with each one doubled": lambda values: [2 * v for v in values],
    "with each one squared": lambda values: [v * v for v in values],
    "without repetitions, each at its first place": lambda values: list(dict.fromkeys(values)),
    "as running sums": lambda values: [sum(values[: i + 1]) for i in range(len(values))],
    "with only even ones kept": lambda values: [v for v in values if v % 2 == 0],
}


@dataclasses.dataclass(frozen=True)
class Example:
    """What a program is given, and what it must print."""

    stdin: str
    stdout: str


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is asked for, and the tests."""

    question: str
    tests: tuple[Example, ...]


def is_heldout(question: str) -> bool:
    """Whether a question belongs to the held-out split: by its hash, so that none is in both."""
    return hashlib.sha256(question.encode()).digest()[0] % 2 == 1


def make_problem(task: Task) -> Problem:
    """The problem a task names; the same on every process.

    Raises:
      ValueError: for a level that does not exist.
    """
    for draw in itertools.count():
        problem = _draw_problem(task, random.Random(derive_seed(0, "code", task.split, task.level, task.index, draw)))
        if is_heldout(problem.question) == (task.split == "heldout"):
            return problem
    raise AssertionError("there is always a next draw")


def _draw_problem(task: Task, rng: random.Random) -> Problem:
    if task.level == 1:
        name = rng.choice(sorted(_TWO_NUMBERS))
        pairs = [(rng.randint(-50, 50), rng.randint(-50, 50)) for _ in range(NUM_TESTS)]
        tests = [Example(f"{a} {b}\n", str(_TWO_NUMBERS[name](a, b))) for a, b in pairs]
        question = f"Read two whole numbers from one line and print {name}."
    elif task.level in (2, 3):
        names = [rng.choice(sorted(_LISTS)) for _ in range(task.level - 1)]
        lists = [[rng.randint(-20, 20) for _ in range(rng.randint(1, 8))] for _ in range(NUM_TESTS)]
        tests = [Example(_line(values) + "\n", _line(_apply(names, values))) for values in lists]
        question = f"Read whole numbers from one line and print them on one line {', then '.join(names)}."
    else:
        raise ValueError(f"level {task.level} of environment code: levels are 1 to 3")
    shown = "\n".join(f"Input: {test.stdin.strip()}\nOutput: {test.stdout}" for test in tests[:NUM_SHOWN])
    return Problem(f"{question} Write a Python program between ```python and ```.\n{shown}", tuple(tests))


def extract_program(text: str) -> str | None:
    """The last fenced block; None if there is none."""
    blocks = _FENCED.findall(text)
    return blocks[-1] if blocks else None


async def run_tests(program: str, tests: Sequence[Example], sandbox: Sandbox) -> tuple[bool, float]:
    """(whether it compiles, share of tests passed); the tests run at the same time, each in a sandbox of its own."""
    compiles = (await sandbox.run(f"compile({program!r}, 'program', 'exec')")).succeeded
    if not compiles:
        return False, 0.0
    runs = await asyncio.gather(*[sandbox.run(program, test.stdin) for test in tests])
    passed = [
        run.succeeded and run.stdout.split() == test.stdout.split() for run, test in zip(runs, tests, strict=True)
    ]
    return True, sum(passed) / len(passed)


def _line(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def _apply(names: Sequence[str], values: list[int]) -> list[int]:
    for name in names:
        values = list(_LISTS[name](values))
    return values


class CodeTasks:
    """Generated programming problems, scored in a sandbox."""

    tools: Mapping[str, Tool] = {}
    limits_own_score = True
    name = "code"
    num_levels = 3
    identity = "code-2"

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    def __call__(self) -> TextEnvironment:
        return _CodeEpisode(self.sandbox)


class _CodeEpisode:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._problem: Problem | None = None
        self._program: str | None = None

    async def reset(self, task: Task) -> Sequence[Message]:
        self._problem, self._program = make_problem(task), None
        return [Message("user", self._problem.question)]

    async def step(self, text: str) -> TextObservation:
        self._program = extract_program(text)
        return TextObservation((), done=True)

    async def score(self) -> TextScore:
        assert self._problem is not None
        if self._program is None:
            return TextScore(0.0, success=False, well_formed=False)
        compiles, share = await run_tests(self._program, self._problem.tests, self._sandbox)
        return TextScore(float(share == 1.0), success=share == 1.0, step=share, well_formed=compiles)

    async def close(self) -> None:
        self._problem = None
