"""An OpenAI-compatible endpoint that records: an agent program pointed at it is trained on the tokens it caused.

    agent ── POST /v1/chat/completions ──▶ Endpoint ──▶ Conversation.next_request() ──▶ the episode samples
      ▲                                                                                      │
      └───────────── completion ◀── Conversation.answer(text, …) ◀───────────────────────────┘

Each episode has a key of its own, which the agent sends as its API key; so any number of agents share one endpoint, and
nobody without a key can use it. A conversation only grows: a request must repeat what was said so far and add to it.
One that rewrites the past is refused with status 409, since its tokens would not be those the policy saw.

Temperature, top_p and the like come from the run and not from the request: the log-probs that are trained on are those
of the distribution that was sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from asyncrl_jax.actor.chat.messages import Message, Role
from asyncrl_jax.actor.chat.tool_calls import ToolCall, parse_tool_calls

MAX_BODY_BYTES = 8 * 2**20
START_LIMIT_S = 30.0

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class RefusedRequest(ValueError):
    """A request that can't be served; `status` is for HTTP."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclasses.dataclass(frozen=True)
class Request:
    """What the agent adds to its conversation before the policy speaks."""

    messages: tuple[Message, ...]  # new ones, of a chat; empty for a completion
    text: str  # new text, of a completion; empty for a chat
    tools: tuple[Mapping[str, Any], ...]  # offered at the start of the conversation
    first: bool
    max_tokens: int  # that the agent wants at most; 0 if it does not say


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the policy said."""

    text: str
    finish: Literal["stop", "length"]
    num_prompt_tokens: int
    num_tokens: int


class Conversation:
    """One agent's conversation, between its requests and the episode that samples the answers.

    Invariant: what the agent has been answered is a prefix of what it continues from.
    """

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self.num_refused = 0
        self._requests: asyncio.Queue[tuple[Request, asyncio.Future[Answer]]] = asyncio.Queue()
        self._pending: asyncio.Future[Answer] | None = None
        self._said: list[dict[str, Any]] = []  # messages, as the agent must repeat them
        self._text = ""  # of completions, likewise
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._busy = asyncio.Lock()
        self._closed = False

    async def next_request(self) -> Request:
        """Waits for the agent to ask."""
        request, self._pending = await self._requests.get()
        return request

    def answer(self, answer: Answer) -> None:
        """Answers the last request."""
        assert self._pending is not None
        if not self._pending.done():  # the agent may have hung up
            self._pending.set_result(answer)
        self._pending = None

    def close(self) -> None:
        """Refuses what is asked and what will be."""
        self._closed = True
        waiting = [self._pending] if self._pending is not None else []
        while not self._requests.empty():
            waiting.append(self._requests.get_nowait()[1])
        for future in waiting:
            if not future.done():
                future.set_exception(RefusedRequest(410, "the episode is over"))
                future.exception()  # it is nobody's fault if the agent is gone

    async def chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], max_tokens: int = 0
    ) -> Answer:
        """One chat completion.

        Raises:
          RefusedRequest: if the messages do not continue the conversation, or the episode is over.
        """
        async with self._busy:
            past, first = len(self._said), not self._said
            told = [_essence(message) for message in messages]
            if self._text:
                raise self._refused("the conversation began as a text, and is continued as one")
            if told[:past] != [_essence(m) for m in self._said]:
                raise self._refused("the messages do not begin with what was said so far")
            if not first and tuple(tools) != self._tools:
                raise self._refused("the tools have changed in the middle of a conversation")
            new = tuple(_message(message) for message in messages[past:])
            if not new or any(message.role == "assistant" for message in new):
                raise self._refused("new messages are needed, and none of them the assistant's")
            answer = await self._ask(Request(new, "", tuple(tools), first, max_tokens))
            self._tools = tuple(tools)
            self._said = [*messages, assistant_message(answer.text, offered=bool(tools))]
            return answer

    async def complete(self, prompt: str, max_tokens: int = 0) -> Answer:
        """One text completion.

        Raises:
          RefusedRequest: if the prompt does not continue the text, or the episode is over.
        """
        async with self._busy:
            if self._said:
                raise self._refused("the conversation began as messages, and is continued by messages")
            if not prompt.startswith(self._text) or len(prompt) == len(self._text):
                raise self._refused("the prompt does not continue what was said so far")
            answer = await self._ask(Request((), prompt.removeprefix(self._text), (), not self._text, max_tokens))
            self._text = prompt + answer.text
            return answer

    async def _ask(self, request: Request) -> Answer:
        if self._closed:
            raise RefusedRequest(410, "the episode is over")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((request, future))
        return await future

    def _refused(self, detail: str) -> RefusedRequest:
        self.num_refused += 1
        return RefusedRequest(409, detail)


def assistant_message(text: str, *, offered: bool) -> dict[str, Any]:
    """The policy's turn as a message of the interface; with tools offered, its well-formed calls are `tool_calls`."""
    calls = [call for call in parse_tool_calls(text) if isinstance(call, ToolCall)] if offered else []
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["content"] = text[: text.index("<tool_call>")] or None
        message["tool_calls"] = [
            {
                "id": f"call_{position}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for position, call in enumerate(calls)
        ]
    return message


def _essence(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What must not change when a message is repeated; clients add and drop other fields."""
    calls = message.get("tool_calls") or []
    try:
        made = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    except (TypeError, LookupError, AttributeError):
        raise RefusedRequest(
            400, "tool_calls is a list of objects, each with a function's name and arguments"
        ) from None
    if not all(isinstance(part, str) for call in made for part in call):
        raise RefusedRequest(400, "name and arguments of a tool call are texts")
    return message.get("role"), _content(message) or "", made


def _message(message: Mapping[str, Any]) -> Message:
    role, name = message.get("role"), message.get("name") or ""
    if not isinstance(role, str) or role not in _ROLES:
        raise RefusedRequest(400, f"role {role!r:.40}: use system, user, assistant or tool")
    if not isinstance(name, str):
        raise RefusedRequest(400, f"name is a {type(name).__name__}")
    return Message(_ROLES[role], _content(message), name)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):  # parts: text only
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise RefusedRequest(400, "content: only text is understood")
        return "".join(map(str, parts))
    if content is not None and not isinstance(content, str):
        raise RefusedRequest(400, f"content is a {type(content).__name__}")
    return content or ""


class Endpoint:
    """The HTTP side; started once for an actor host."""

    def __init__(self, host: str, port: int) -> None:
        """Args: host: to bind to, loopback unless agents run elsewhere; port: 0 for a free one."""
        self._host = host
        self._port = port
        self._conversations: dict[str, Conversation] = {}
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    @property
    def base_url(self) -> str:
        """What agents are pointed at."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    async def start(self) -> None:
        """Serves from now on; does nothing the second time.

        Raises:
          RuntimeError: if it can't, for instance because the port is in use.
        """
        async with self._starting:
            if self._serving is not None:
                return
            from asyncrl_jax.actor.chat.endpoint_app import make_app, make_server

            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            try:
                listening = socket.create_server((self._host, self._port), family=family, backlog=1024)
            except OSError as error:
                raise RuntimeError(f"the endpoint can't listen on {self._host}:{self._port}: {error}") from error
            self._port = listening.getsockname()[1]
            self._server = make_server(make_app(self))
            serving = self._server.serve(sockets=[listening])
            self._serving = asyncio.create_task(serving, name="recording endpoint")
            async with asyncio.timeout(START_LIMIT_S):
                while not self._server.started:
                    await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Ends all conversations and stops serving."""
        for conversation in self._conversations.values():
            conversation.close()
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving

    @contextlib.contextmanager
    def conversation(self) -> Any:
        """A conversation of one episode; its key stops working afterwards."""
        conversation = Conversation()
        self._conversations[conversation.key] = conversation
        try:
            yield conversation
        finally:
            del self._conversations[conversation.key]
            conversation.close()

    def find(self, authorization: str) -> Conversation:
        """The conversation whose key the request carries.

        Raises:
          RefusedRequest: if there is none.
        """
        key = authorization.removeprefix("Bearer ")
        for known, conversation in self._conversations.items():
            if hmac.compare_digest(known.encode(), key.encode()):
                return conversation
        raise RefusedRequest(401, "an API key of a running episode is needed")


def chat_body(answer: Answer, *, offered: bool) -> dict[str, Any]:
    """An answer as the chat interface words it."""
    message = assistant_message(answer.text, offered=offered)
    finish = "tool_calls" if message.get("tool_calls") else answer.finish
    return _body("chat.completion", {"index": 0, "message": message, "finish_reason": finish}, answer)


def completion_body(answer: Answer) -> dict[str, Any]:
    """An answer as the completion interface words it."""
    choice = {"index": 0, "text": answer.text, "finish_reason": answer.finish, "logprobs": None}
    return _body("text_completion", choice, answer)


def _body(kind: str, choice: dict[str, Any], answer: Answer) -> dict[str, Any]:
    usage = {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
    }
    identity = f"cmpl-{secrets.token_hex(8)}"
    return {
        "id": identity,
        "object": kind,
        "created": int(time.time()),
        "model": "policy",
        "choices": [choice],
        "usage": usage,
    }


async def as_stream(body: dict[str, Any]) -> AsyncIterator[str]:
    """A finished answer as server-sent events: one with all of it, one with the end."""
    (choice,) = body["choices"]
    kind = "chat.completion.chunk" if "message" in choice else "text_completion"
    if "message" in choice:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(delta["tool_calls"])]
        pieces: list[dict[str, Any]] = [{"delta": delta}, {"delta": {}, "finish_reason": choice["finish_reason"]}]
    else:
        pieces = [{"text": choice["text"]}, {"text": "", "finish_reason": choice["finish_reason"]}]
    for piece in pieces:
        chunk = body | {"object": kind, "choices": [{"index": 0, "finish_reason": None} | piece]}
        del chunk["usage"]
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"
