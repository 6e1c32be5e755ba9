"""Text environments as environments of tokens: conversation, tools, and instances that are used again."""

from __future__ import annotations

import collections
import logging
import random
from collections.abc import Mapping, Sequence

import xxhash

from asyncrl_jax.actor.chat.formats import ChatFormat, plain_text
from asyncrl_jax.actor.chat.messages import Message, opened, varied
from asyncrl_jax.actor.chat.tool_calls import MalformedCall, parse_tool_calls
from asyncrl_jax.actor.envs.base import Observation, Score
from asyncrl_jax.actor.envs.text import TextEnvironment, TextEnvironmentFactory
from asyncrl_jax.actor.tools.base import Tool, answer_calls, schema_of
from asyncrl_jax.config_environment import ToolsConfig
from asyncrl_jax.types import Task

log = logging.getLogger(__name__)

_REMEMBERED_TASKS = 4096  # whose first messages are compared when an instance is used again


class ResetMismatch(RuntimeError):
    """An instance that was used again started the same task differently: something of its last episode is left."""


class InstancePool:
    """Idle instances of a text environment.

    Invariants:
      * One instance plays one episode at a time.
      * An instance that raised, or that was never closed, is not used again.
      * The same task starts with the same messages, whichever instance plays it.
    """

    def __init__(self, factory: TextEnvironmentFactory, *, reuse: bool = True) -> None:
        self.num_made = 0
        self.num_discarded = 0
        self._factory = factory
        self._reuse = reuse
        self._idle: list[TextEnvironment] = []
        self._first_messages: dict[Task, str] = {}  # their digest: prompts may be long

    def take(self) -> TextEnvironment:
        if self._idle:
            return self._idle.pop()
        self.num_made += 1
        return self._factory()

    def give_back(self, instance: TextEnvironment) -> None:
        if self._reuse:
            self._idle.append(instance)

    def discard(self) -> None:
        self.num_discarded += 1

    def check_reset(self, task: Task, messages: tuple[Message, ...]) -> None:
        """Raises:
        ResetMismatch: if another instance started this task with other messages.
        """
        digest = xxhash.xxh3_128_hexdigest(repr(messages).encode("utf-8", errors="backslashreplace"))
        if self._first_messages.setdefault(task, digest) != digest:
            raise ResetMismatch(f"task {task} starts differently than before: a reset leaves something behind")
        while len(self._first_messages) > _REMEMBERED_TASKS:
            del self._first_messages[next(iter(self._first_messages))]


class ChatEpisode:
    """One episode of a text environment, token in, token out.

    A turn with tool calls is answered by the tools, all at once and in order; a turn without by the environment. The
    reward parts: `final` and `step` are the environment's; `format` is 1 if no call was malformed and the answer had
    the form asked for; `tool` is the share of calls that succeeded, 0 when none was made.
    """

    def __init__(self, source: ChatEnvironments) -> None:
        self.name = source.name
        self.vocab_size = source.vocab_size
        self.stop_tokens = source.stop_tokens
        self.turn_tokens = source.turn_tokens
        self.limits_own_score = source.limits_own_score
        self._source = source
        self._inner: TextEnvironment | None = None
        self._healthy = True
        self._num_calls = 0
        self._num_right_calls = 0
        self._num_malformed = 0

    async def reset(self, task: Task) -> tuple[int, ...]:
        if task.environment != self.name:
            raise ValueError(f"a task of environment {task.environment!r}, not {self.name!r}")
        self._inner = self._source.pool.take()
        self._healthy = False  # until the reset has been seen to work
        messages = tuple(await self._inner.reset(task))
        self._source.pool.check_reset(task, messages)
        self._healthy = True
        shown = opened(self._source.opening, varied(self._source.variants, task, messages))
        return self._source.format.prompt(shown, self._source.schemas)

    async def step(self, tokens: Sequence[int]) -> Observation:
        ended = bool(tokens) and tokens[-1] in self.stop_tokens
        text = self._source.format.tokenizer.decode(tokens[:-1] if ended else tokens)
        calls = parse_tool_calls(text) if self._source.tools else []
        if not calls:
            return await self._answer(text, ended=ended)
        self._num_malformed += sum(isinstance(call, MalformedCall) for call in calls)
        if self._num_malformed > self._source.config.max_malformed:
            return Observation((), done=True)
        answers = await answer_calls(
            calls,
            self._source.tools,
            max_calls=self._source.config.max_calls,
            timeout_s=self._source.config.timeout_s,
            max_characters=self._source.config.max_result_characters,
            outcomes=self._source.outcomes,
        )
        self._num_calls += len(answers)
        self._num_right_calls += sum(right for _, right in answers)
        return Observation(self._source.format.reply([message for message, _ in answers], ended=ended), done=False)

    async def _answer(self, text: str, *, ended: bool) -> Observation:
        self._healthy = False
        observation = await self._reset_inner().step(text)
        self._healthy = True
        reply = () if observation.done else self._source.format.reply(observation.messages, ended=ended)
        return Observation(reply, observation.done)

    async def score(self) -> Score:
        self._healthy = False
        score = await self._reset_inner().score()
        self._healthy = True
        parts = {
            "final": score.final,
            "step": score.step,
            "format": float(score.well_formed and self._num_malformed == 0),
            "tool": self._num_right_calls / self._num_calls if self._num_calls else 0.0,
        }
        return Score(parts, score.success)

    async def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is None:
            return
        if not self._healthy:
            self._source.pool.discard()
            await inner.close()
            return
        await inner.close()
        self._source.pool.give_back(inner)

    def demonstrate(self, rng: random.Random) -> list[tuple[int, ...]]:  # noqa: ARG002
        raise ValueError(
            f"--config.environment.name={self.name}: it has no scripted policy, so no demonstrations; start from a "
            "pretrained model, with --config.warm_start.num_steps=0"
        )

    def _reset_inner(self) -> TextEnvironment:
        if self._inner is None:
            raise RuntimeError("the episode has not been reset, or is closed")
        return self._inner


class ChatEnvironments:
    """Makes the episodes of one text environment, which share its instances and its tools."""

    def __init__(
        self,
        factory: TextEnvironmentFactory,
        format: ChatFormat,  # noqa: A002, the field's word
        tools: Mapping[str, Tool],
        config: ToolsConfig,
        *,
        turn_tokens: int = 0,
        opening: Sequence[Message] = (),
        variants: Sequence[str] = (),
        outcomes: collections.Counter[str] | None = None,
        reuse_instances: bool = True,
    ) -> None:
        """Args:
        tools: offered beside the environment's own.
        turn_tokens: most of one turn, 0 for no limit.
        opening: what every conversation starts with, behind its system message.
        variants: other ways to put a training task's question; see `varied`.
        outcomes: counts calls by "tool/outcome".
        """
        self.name = factory.name
        self.num_levels = factory.num_levels
        self.vocab_size = format.tokenizer.vocab_size
        self.stop_tokens = format.stop_tokens
        self.turn_tokens = turn_tokens
        self.limits_own_score = factory.limits_own_score
        self.tools = {**tools, **factory.tools}
        self.schemas = [schema_of(self.tools[name]) for name in sorted(self.tools)]
        told = (opening, variants) if variants else opening
        shown = xxhash.xxh3_64_hexdigest(repr(told).encode()) if told else ""
        self.identity = f"{factory.identity}/{format.tokenizer.identity}/{','.join(sorted(self.tools))}/{shown}"
        self.opening = tuple(opening)
        self.variants = tuple(variants)
        self.outcomes = collections.Counter() if outcomes is None else outcomes
        self.format = format
        self.config = config
        self.pool = InstancePool(factory, reuse=reuse_instances)

    def text(self, tokens: Sequence[int]) -> str:
        return plain_text(self.format, tokens)

    def __call__(self) -> ChatEpisode:
        return ChatEpisode(self)
