"""Conversations as tokens that only ever grow.

A session of an engine is a sequence that is appended to, so a conversation is rendered once at its start and, after
each turn of the policy, only by what is new. Tokens of the past are never made again from text: what the policy sampled
stays as it was sampled, also where a template would now render it differently (many drop the thinking of past turns).

    prompt(messages)  │ sampled … end of turn │  reply(messages)  │ sampled … end of turn │ …
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.chat.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

ToolSchema = dict[str, Any]  # as the `tools` of chat interfaces: {"type": "function", "function": {…}}


class ChatFormat(Protocol):
    """How a conversation becomes tokens."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_tokens(self) -> frozenset[int]:
        """A turn of the policy ends with one of these."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """The start of a conversation, up to where the policy speaks."""
        ...

    def reply(self, messages: Sequence[Message], *, ended: bool = True) -> tuple[int, ...]:
        """What stands between the policy's turn and where it speaks again.

        Args: ended: the policy has sampled the end of its turn; if not, it is the first of the tokens here.
        """
        ...


class ByteFormat:
    """Roles and contents as bytes between two marks; tools are described in the first message by the environment."""

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.stop_tokens = frozenset({ByteTokenizer.TURN_END})

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        described = [Message("system", "\n".join(str(tool["function"]) for tool in tools))] if tools else []
        return self.reply([*described, *messages])

    def reply(self, messages: Sequence[Message], *, ended: bool = True) -> tuple[int, ...]:
        tokens: list[int] = [] if ended else [ByteTokenizer.TURN_END]
        for message in messages:
            text = f"{message.role}\n{message.content}"
            tokens += [ByteTokenizer.TURN_START, *self.tokenizer.encode(text), ByteTokenizer.TURN_END]
        return (*tokens, ByteTokenizer.TURN_START, *self.tokenizer.encode("assistant\n"))


_PROBE_TOOL: ToolSchema = {
    "type": "function",
    "function": {"name": "probe", "description": "none", "parameters": {"type": "object", "properties": {}}},
}


class TemplateFormat:
    """The chat template that comes with a tokenizer.

    Invariants:
      * `reply` gives all of its messages in one rendering, as the template of the whole conversation does, and begins
        right behind the stop token.
      * Tools are told of: by the template, or where it has no place for them by the system message.
    """

    _PROBE = "\u2063answer\u2063"  # content of a turn that is looked for in renderings; no template contains it

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        """Raises:
        ValueError: if the tokenizer has no chat template, or one that does not end turns by a token.
        """
        self.tokenizer = tokenizer
        if not tokenizer.inner.chat_template:
            raise ValueError("the tokenizer has no chat template: environment.tokenizer must name an instruct model")
        tail = self._after_answer(self._base, generation_prompt=False)
        if not tail:
            raise ValueError("the chat template writes nothing after an answer, so a turn has no end")
        self._end_of_turn = tokenizer.encode(tail)[0]
        ends = {self._end_of_turn, tokenizer.inner.eos_token_id} - {None}
        self.stop_tokens = frozenset(ends)
        plain = self._render(self._base, generation_prompt=True)
        self._shows_tools = self._render(self._base, generation_prompt=True, tools=[_PROBE_TOOL]) != plain

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        if tools and not self._shows_tools:
            messages, tools = _with_tools_told(messages, tools), ()
        text = self._render([message.as_dict() for message in messages], generation_prompt=True, tools=tools)
        return self.tokenizer.encode(text)

    def reply(self, messages: Sequence[Message], *, ended: bool = True) -> tuple[int, ...]:
        conversation = [*self._base, *[message.as_dict() for message in messages]]
        tokens = self.tokenizer.encode(self._after_answer(conversation, generation_prompt=True))
        assert tokens[0] == self._end_of_turn
        return tokens[1:] if ended else tokens

    @property
    def _base(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "question"}, {"role": "assistant", "content": self._PROBE}]

    def _after_answer(self, conversation: list[dict[str, Any]], *, generation_prompt: bool) -> str:
        text = self._render(conversation, generation_prompt=generation_prompt)
        if text.count(self._PROBE) != 1:
            raise ValueError("the chat template does not render an answer as it was given")
        return text.split(self._PROBE)[1]

    def _render(
        self, conversation: list[dict[str, Any]], *, generation_prompt: bool, tools: Sequence[ToolSchema] = ()
    ) -> str:
        text = self.tokenizer.inner.apply_chat_template(
            conversation, tools=list(tools) or None, add_generation_prompt=generation_prompt, tokenize=False
        )
        return str(text)


def _with_tools_told(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """The messages with a system message that describes the tools and how they are called."""
    described = "\n".join(json.dumps(tool["function"]) for tool in tools)
    told = (
        f"You can use these tools:\n{described}\nTo call one, write "
        '<tool_call>{"name": "…", "arguments": {…}}</tool_call>; the answer comes as the next message.'
    )
    if messages and messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{told}"), *messages[1:]]
    return [Message("system", told), *messages]


def plain_text(chat: ChatFormat, tokens: Sequence[int]) -> str:
    """What tokens say, without marks of turns."""
    return chat.tokenizer.decode([token for token in tokens if token not in chat.tokenizer.marks])


def chat_format(tokenizer: str) -> ChatFormat:
    """The format of `environment.tokenizer`: "byte", or a directory with a tokenizer and its chat template.

    Raises:
      ValueError: if there is none.
    """
    return ByteFormat() if tokenizer == "byte" else TemplateFormat(HuggingFaceTokenizer(tokenizer))
