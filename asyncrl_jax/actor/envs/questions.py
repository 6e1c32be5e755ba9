"""Questions with known answers from a file, scored by math-verify: `--config.environment.name=math:<file>`.

The file has one JSON object a line: {"question": …, "answer": …} and, if there are several levels, "level": 1, 2, …
A question is held out by a hash of its text, one in ten, so that no question is in both splits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.envs.text import TextEnvironment, TextObservation, TextScore
from asyncrl_jax.actor.tools.base import Tool
from asyncrl_jax.actor.verifiers import VerifierPool
from asyncrl_jax.types import Task

INSTRUCTION = "Solve the problem. Put the final answer into \\boxed{}."
HELDOUT_BYTES = 26  # held out when the first byte of the question's SHA-256 is below this: 10 %

Question = tuple[str, str]  # question and answer


def read_questions(path: Path) -> dict[tuple[str, int], list[Question]]:
    """Questions by split and level.

    Raises:
      ValueError: if the file can't be read, a line is not as above, or a split has no question; it names the line.
    """
    found: dict[tuple[str, int], list[Question]] = {}
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config.environment.name=math:{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            question, answer, level = str(entry["question"]), str(entry["answer"]), int(entry.get("level", 1))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: needs a question and an answer ({error!r})") from error
        heldout = hashlib.sha256(question.encode()).digest()[0] < HELDOUT_BYTES
        found.setdefault(("heldout" if heldout else "train", level), []).append((question, answer))
    num_levels = max((level for _, level in found), default=0)
    for level in range(1, num_levels + 1):
        for split in ("train", "heldout"):
            if (split, level) not in found:
                raise ValueError(f"{path}: level {level} has no question in split {split}; more questions are needed")
    if not num_levels:
        raise ValueError(f"{path}: no questions")
    return found


class QuestionTasks:
    """Questions of one file; indices beyond its end begin again."""

    tools: Mapping[str, Tool] = {}
    limits_own_score = True

    def __init__(self, path: str, verifiers: VerifierPool) -> None:
        """Raises:
        ValueError: see `read_questions`.
        """
        self.name = f"math:{path}"
        self.questions = read_questions(Path(path))
        self.num_levels = max(level for _, level in self.questions)
        self.identity = f"math-{hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]}"
        self.verifiers = verifiers

    def __call__(self) -> TextEnvironment:
        return _QuestionEpisode(self)


class _QuestionEpisode:
    def __init__(self, tasks: QuestionTasks) -> None:
        self._tasks = tasks
        self._gold = ""
        self._answer: str | None = None

    async def reset(self, task: Task) -> Sequence[Message]:
        questions = self._tasks.questions[task.split, task.level]
        question, self._gold = questions[task.index % len(questions)]
        self._answer = None
        return [Message("system", INSTRUCTION), Message("user", question)]

    async def step(self, text: str) -> TextObservation:
        self._answer = text
        return TextObservation((), done=True)

    async def score(self) -> TextScore:
        if self._answer is None:
            return TextScore(0.0, success=False, well_formed=False)
        final = await self._tasks.verifiers.score("asyncrl_jax.actor.verifiers:math_score", [self._answer, self._gold])
        return TextScore(final, success=final == 1.0, well_formed="\\boxed{" in self._answer)

    async def close(self) -> None:
        self._answer = None
