"""What an environment is to an actor: token in, token out, one object an episode so that episodes share no state."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from asyncrl_jax.types import Task


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """The environment's answer to one turn of the policy."""

    tokens: tuple[int, ...]  # put into the context before the policy speaks again; never trained on
    done: bool  # the episode is over


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """How one episode went."""

    parts: Mapping[str, float]  # by every name of REWARD_PARTS, each in [0, 1]
    success: bool  # the final answer is right


class Environment(Protocol):
    """One episode. The same task gives the same prompt on every process.

    `score` may be asked after any ending, also when tokens or turns ran out; `close` may be called more than once, and
    after a `reset` that raised.
    """

    @property
    def vocab_size(self) -> int:
        """Tokens the environment writes are below this."""
        ...

    @property
    def stop_tokens(self) -> frozenset[int]:
        """A turn of the policy ends with one of these."""
        ...

    @property
    def turn_tokens(self) -> int:
        """Most tokens of the next turn, which may then end without a stop token; 0 for no limit of its own."""
        ...

    @property
    def limits_own_score(self) -> bool:
        """`score` ends by itself; it may wait long for others that are scored first, so no limit is put on it."""
        ...

    async def reset(self, task: Task) -> tuple[int, ...]:
        """Starts the episode and returns the prompt."""
        ...

    async def step(self, tokens: Sequence[int]) -> Observation:
        """Answers one turn, which ends with a stop token unless it has `turn_tokens`."""
        ...

    async def score(self) -> Score: ...

    async def close(self) -> None: ...

    def demonstrate(self, rng: random.Random) -> list[tuple[int, ...]]:
        """Turns of a scripted policy for the task of the last `reset`, for warm-start demonstrations."""
        ...


class EnvironmentMaker(Protocol):
    """What an environment is for all episodes; called, it gives one for one episode. A class will do."""

    @property
    def name(self) -> str:
        """What tasks and the config carry."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_levels(self) -> int: ...

    @property
    def identity(self) -> str:
        """Changes whenever tasks, protocol or tokens do."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens say, without marks of turns: for what scores text."""
        ...

    def __call__(self) -> Environment: ...
