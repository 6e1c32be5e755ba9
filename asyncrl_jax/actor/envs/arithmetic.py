"""Chains of sums from reasoning-gym, solved with a calculator: a tiny agentic task with tools and several turns.

Text of one episode, policy turns in brackets, the rest forced by the environment:

    ^18+99-37= [<18+99>] 117; [<117-37>] 80; [#80$]

A call `<a+b>` or `<a-b>` is answered by its result and `;`, a malformed one by `!;`. `#n$` is the final answer. One
symbol is one token.

| level | terms | digits of a term | demonstrated by default |
|---|---|---|---|
| 1 | 2-3 | 1 | yes |
| 2 | 3-4 | 1-2 | yes |
| 3 | 5 | 1-2 | no: a chain longer than any demonstration shows |

Every task is one whose flawless solution fits in `SOLUTION_TOKENS` tokens and `SOLUTION_TURNS` turns; others are never
made. Levels 1 and 2 always fit (57 tokens at most). Of level 3 all chains of 1 digit do, and the half of those of 2
digits whose intermediate results are short.

The held-out split is decided by a hash of the expression alone, so no expression is in both splits, at any level.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any, ClassVar

import asyncrl_jax.actor.envs.pycosat_stub  # noqa: F401, before any import of reasoning_gym

# isort: split
from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

from asyncrl_jax.actor.envs.base import Observation, Score
from asyncrl_jax.types import Task

ALPHABET = "_^=<>;#$!+-0123456789"  # a token id is a position here; 0 is padding
SOLUTION_TOKENS = 64
SOLUTION_TURNS = 5
SPLITS = ("train", "heldout")
HELDOUT_BYTES = 26  # an expression is held out when the first byte of its SHA-256 is below this: 10 %

_ID_OF = {symbol: i for i, symbol in enumerate(ALPHABET)}
_CALL = re.compile(r"<(-?\d{1,4})([+-])(\d{1,4})>")
_ANSWER = re.compile(r"#(-?\d{1,6})\$")
_MAX_DRAWS = 10_000  # of a rejection sampler that accepts more than 3 % of its draws


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """Shape of the expressions of one level; both ends are included."""

    min_terms: int
    max_terms: int
    min_digits: int
    max_digits: int


LEVELS = {
    1: Level(min_terms=2, max_terms=3, min_digits=1, max_digits=1),
    2: Level(min_terms=3, max_terms=4, min_digits=1, max_digits=2),
    3: Level(min_terms=5, max_terms=5, min_digits=1, max_digits=2),
}


def encode(text: str) -> tuple[int, ...]:
    """Token ids of `text`.

    Raises:
      ValueError: for a symbol outside the alphabet.
    """
    try:
        return tuple(_ID_OF[symbol] for symbol in text)
    except KeyError as error:
        raise ValueError(f"symbol {error.args[0]!r} of {text!r} is not in the alphabet {ALPHABET!r}") from None


def decode(tokens: Sequence[int]) -> str:
    """Text of token ids; an id that the alphabet lacks, which a policy may sample, reads `?`."""
    return "".join(ALPHABET[t] if 0 <= t < len(ALPHABET) else "?" for t in tokens)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One expression with what its flawless solution goes through."""

    expression: str  # without blanks: "18+99-37"
    terms: tuple[int, ...]
    operators: tuple[str, ...]  # one fewer than terms, "+" or "-"
    entry: dict[str, Any]  # reasoning-gym's item, which its scorer wants back

    @functools.cached_property
    def running(self) -> tuple[int, ...]:
        """Value of the chain after each term: as many as terms, the last is the answer."""
        values = [self.terms[0]]
        for operator, term in zip(self.operators, self.terms[1:], strict=True):
            values.append(apply(values[-1], operator, term))
        return tuple(values)

    @functools.cached_property
    def calls(self) -> tuple[str, ...]:
        """The calls of the flawless solution, in order."""
        return tuple(
            f"<{before}{operator}{term}>"
            for before, operator, term in zip(self.running, self.operators, self.terms[1:], strict=False)
        )

    @property
    def solution_tokens(self) -> int:
        """Length of the flawless solution with its prompt, in tokens."""
        results = self.running[1:]
        return (
            len(f"^{self.expression}=")
            + sum(len(call) + len(f"{result};") for call, result in zip(self.calls, results, strict=True))
            + len(f"#{results[-1]}$")
        )


def apply(left: int, operator: str, right: int) -> int:
    """`left + right` or `left - right`."""
    return left + right if operator == "+" else left - right


def calculate(call: str) -> int | None:
    """Result of a call such as `<18+99>`, or None when it is malformed."""
    match = _CALL.fullmatch(call)
    return None if match is None else apply(int(match[1]), match[2], int(match[3]))


def is_heldout(expression: str) -> bool:
    """Whether the expression, written without blanks, belongs to the held-out split."""
    return hashlib.sha256(expression.encode()).digest()[0] < HELDOUT_BYTES


@functools.cache
def _dataset(level: int) -> ChainSumDataset:
    # Items are drawn by seed + index, without a bound on the index: seed 0 leaves the whole seed to the index.
    return ChainSumDataset(ChainSumConfig(seed=0, **dataclasses.asdict(LEVELS[level])))


@functools.lru_cache(maxsize=8192)  # a group asks for one problem as often as it has members; evaluations repeat theirs
def make_problem(split: str, level: int, index: int) -> Problem:
    """The problem at `index` of the endless list of a split and level, at a cost that does not grow with the index.

    Raises:
      ValueError: for a split, level or index that does not exist.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: use one of {', '.join(SPLITS)}")
    if level not in LEVELS:
        raise ValueError(f"level {level}: levels are {', '.join(map(str, LEVELS))}")
    if index < 0:
        raise ValueError(f"index {index}: at least 0")
    for draw in range(_MAX_DRAWS):
        digest = hashlib.blake2b(f"{level}/{split}/{index}/{draw}".encode(), digest_size=8).digest()
        entry = _dataset(level)[int.from_bytes(digest)]
        parts = entry["metadata"]["expression"].split()
        expression = "".join(parts)
        if is_heldout(expression) != (split == "heldout"):
            continue
        problem = Problem(expression, tuple(map(int, parts[0::2])), tuple(parts[1::2]), entry)
        if problem.solution_tokens <= SOLUTION_TOKENS:
            return problem
    raise AssertionError(f"no problem in {_MAX_DRAWS} draws for {split} level {level} index {index}")


def shared_expressions(num_tasks_per_level: int) -> set[str]:
    """Expressions found in both splits among the first tasks of every level: empty unless the split is broken."""
    seen = {
        split: {make_problem(split, level, i).expression for level in LEVELS for i in range(num_tasks_per_level)}
        for split in SPLITS
    }
    return seen["train"] & seen["heldout"]


def _identity() -> str:
    facts = (ALPHABET, LEVELS, HELDOUT_BYTES, SOLUTION_TOKENS, _CALL.pattern, _ANSWER.pattern)
    digest = hashlib.sha256(repr((facts, metadata.version("reasoning_gym"))).encode()).hexdigest()
    return f"arithmetic-{digest[:16]}"


class Arithmetic:
    """One episode of the task above.

    Reward parts: `final` is reasoning-gym's own verdict on the answer; `step` the share of the flawless solution's
    calls that were made, in order, so that repeating or inventing calls gains nothing; `format` is 1 when every turn
    was well-formed and the last one an answer; `tool` the share of calls that were well-formed, 0 when none was made.
    """

    name: ClassVar[str] = "arithmetic"
    vocab_size: ClassVar[int] = len(ALPHABET)
    num_levels: ClassVar[int] = len(LEVELS)
    identity: ClassVar[str] = _identity()
    stop_tokens: ClassVar[frozenset[int]] = frozenset(encode(">$"))
    turn_tokens: ClassVar[int] = 0
    limits_own_score: ClassVar[bool] = False
    text = staticmethod(decode)

    def __init__(self) -> None:
        self._problem: Problem | None = None
        self._level = 0
        self._calls: list[str] = []
        self._answer: str | None = None
        self._well_formed = True

    async def reset(self, task: Task) -> tuple[int, ...]:
        if task.environment != self.name:
            raise ValueError(f"a task of environment {task.environment!r}, not {self.name!r}")
        self._problem = make_problem(task.split, task.level, task.index)
        self._level = task.level
        return encode(f"^{self._problem.expression}=")

    async def step(self, tokens: Sequence[int]) -> Observation:
        text = decode(tokens)
        if text.endswith("$"):
            match = _ANSWER.fullmatch(text)
            self._answer = match[1] if match else None
            self._well_formed &= match is not None
            return Observation((), done=True)
        result = calculate(text)
        self._calls.append(text)
        self._well_formed &= result is not None
        return Observation(encode("!;" if result is None else f"{result};"), done=False)

    async def score(self) -> Score:
        problem = self._reset_problem()
        right = self._answer is not None and (
            _dataset(self._level).score_answer(self._answer, problem.entry) == 1.0  # it also gives part marks
        )
        made = 0
        for call in self._calls:
            made += made < len(problem.calls) and call == problem.calls[made]
        well_formed_calls = sum(calculate(call) is not None for call in self._calls)
        parts = {
            "final": float(right),
            "step": made / len(problem.calls),
            "format": float(self._well_formed and self._answer is not None),
            "tool": well_formed_calls / len(self._calls) if self._calls else 0.0,
        }
        return Score(parts, success=right)

    async def close(self) -> None:
        self._problem = None

    def demonstrate(self, rng: random.Random) -> list[tuple[int, ...]]:
        return [encode(turn) for turn in careless_turns(self._reset_problem(), rng)]

    def _reset_problem(self) -> Problem:
        if self._problem is None:
            raise RuntimeError("the episode has not been reset, or is closed")
        return self._problem


def careless_turns(problem: Problem, rng: random.Random) -> list[str]:
    """Turns of a solver who knows the protocol well and the task badly, so that reinforcement has something to teach.

    15 % are flawless. Of the rest 72 % stop after one call, 14 % answer an earlier value without the tool, 7 % get
    one sign wrong and 7 % make one malformed call before the right one.
    """
    flawless = [*problem.calls, f"#{problem.running[-1]}$"]
    if rng.random() < 0.15:
        return flawless
    fault = rng.random()
    if fault < 0.72:
        return [problem.calls[0], f"#{problem.running[1]}$"]
    if fault < 0.86:
        return [f"#{rng.choice(problem.running[:-1])}$"]
    position = rng.randrange(len(problem.calls))
    if fault < 0.93:
        operators = list(problem.operators)
        operators[position] = "-" if operators[position] == "+" else "+"
        wrong = dataclasses.replace(problem, operators=tuple(operators))
        return [*wrong.calls, f"#{wrong.running[-1]}$"]
    malformed = f"<{problem.running[position]}{problem.operators[position]}>"
    return [*flawless[:position], malformed, *flawless[position:]]
