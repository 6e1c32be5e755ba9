"""An environment that speaks text: what most task packages are. `ChatEpisode` makes it one of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.tools.base import Tool
from asyncrl_jax.types import Task


@dataclasses.dataclass(frozen=True, slots=True)
class TextObservation:
    """The environment's answer to one turn."""

    messages: tuple[Message, ...]  # before the policy speaks again
    done: bool


@dataclasses.dataclass(frozen=True, slots=True)
class TextScore:
    """How the episode went, as far as the environment can say."""

    final: float  # in [0, 1]
    success: bool
    step: float = 0.0  # in [0, 1]; of intermediate steps, for environments that know them
    well_formed: bool = True  # the answer had the form that was asked for


class TextEnvironment(Protocol):
    """One episode at a time; an instance is used for another one after `close`, unless it raised.

    The same task gives the same first messages on every process and every instance.
    """

    async def reset(self, task: Task) -> Sequence[Message]:
        """Starts an episode and returns its first messages."""
        ...

    async def step(self, text: str) -> TextObservation:
        """Answers a turn without tool calls."""
        ...

    async def score(self) -> TextScore:
        """May be asked after any ending."""
        ...

    async def close(self) -> None:
        """Ends the episode; may be called more than once."""
        ...


class TextEnvironmentFactory(Protocol):
    """Makes instances of one kind of text environment, and says what its tasks are."""

    name: str
    num_levels: int
    identity: str  # changes whenever tasks or scoring do
    limits_own_score: bool  # see `Environment`
    tools: Mapping[str, Tool]  # of the environment itself, offered beside those of the config

    def __call__(self) -> TextEnvironment: ...
