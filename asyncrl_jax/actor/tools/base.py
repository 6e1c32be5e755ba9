"""What a tool is to an episode. A call that fails or hangs costs a message, not the episode."""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.chat.tool_calls import MalformedCall, ToolCall

log = logging.getLogger(__name__)

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}


class ToolFailed(Exception):
    """A call failed in a way that the policy may learn from; the message is for it to read.

    `outcome` is what it is counted as: failed, or which limit ended it.
    """

    def __init__(self, message: str, outcome: str = "failed") -> None:
        super().__init__(message)
        self.outcome = outcome


class ToolBroken(RuntimeError):
    """The tool itself does not work, whatever is asked of it: a fault of the infrastructure, not of the policy.

    `tool` is its name, set where calls are made.
    """

    tool = ""


class Tool(Protocol):
    """Something a policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    limits_itself: bool  # a call ends by itself; it may wait long for others, so no limit is put on it

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The answer, for the policy to read.

        Raises:
          ToolFailed: if the call was wrong.
          ToolBroken: if the tool is.
        """
        ...


def schema_of(tool: Tool) -> dict[str, Any]:
    """As the `tools` of chat interfaces and chat templates."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


async def answer_calls(
    calls: Sequence[ToolCall | MalformedCall],
    tools: Mapping[str, Tool],
    *,
    max_calls: int,
    timeout_s: float,
    max_characters: int,
    outcomes: collections.Counter[str],
) -> list[tuple[Message, bool]]:
    """Makes the calls of one turn at the same time.

    Args:
      calls: of the turn, in order.
      tools: by name.
      max_calls: that are made; those behind them are wrong, so that one turn can't take the tools from all others.
      timeout_s: for each call of a tool that does not limit itself; what is still running then is cancelled.
      max_characters: of one answer; the middle of a longer one is left out.
      outcomes: counts the calls, by "tool/outcome"; outcomes are ok, failed, timeout, output_limit, wrong_call, broken.

    Returns:
      For each call, in order, its tool message, and whether it was well-formed and succeeded.

    Raises:
      ToolBroken: from a tool; the other calls are cancelled.
    """
    faults: tuple[Exception, ...] = ()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_answer(call, tools, timeout_s)) for call in calls[:max_calls]]
    except* ToolBroken as broken:
        faults = broken.exceptions
    if faults:  # the first is what the fault is counted as
        outcomes.update(f"{fault.tool}/broken" for fault in faults if isinstance(fault, ToolBroken))
        raise faults[0] from None
    answers = [task.result() for task in tasks]
    answers += [_unmade(call, max_calls) for call in calls[max_calls:]]
    outcomes.update(f"{name if name in tools else 'unknown'}/{outcome}" for name, _, outcome in answers)
    return [
        (Message("tool", _shortened(text, max_characters), name), outcome == "ok") for name, text, outcome in answers
    ]


def _unmade(call: ToolCall | MalformedCall, max_calls: int) -> tuple[str, str, str]:
    name = call.name if isinstance(call, ToolCall) else ""
    return name, f"error: not made; {max_calls} calls a turn are", "wrong_call"


async def _answer(call: ToolCall | MalformedCall, tools: Mapping[str, Tool], timeout_s: float) -> tuple[str, str, str]:
    """(tool, answer, outcome) of one call."""
    if isinstance(call, MalformedCall):
        return "", f"error: {call.problem}", "wrong_call"
    if call.name not in tools:
        return call.name, f"error: no tool {call.name!r}; there are: {', '.join(sorted(tools))}", "wrong_call"
    tool = tools[call.name]
    try:
        problem = _problem(call.arguments, tool.parameters)
        if problem:
            return call.name, f"error: {problem}", "wrong_call"
        async with asyncio.timeout(None if tool.limits_itself else timeout_s) as limit:
            return call.name, await tool.call(call.arguments), "ok"
    except ToolFailed as error:
        return call.name, f"error: {error}", error.outcome
    except ToolBroken as error:
        error.tool = call.name
        raise
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            return call.name, f"error: no answer within {timeout_s:g} s", "timeout"
        broken = ToolBroken(f"tool {call.name}: {repr(error)[:500]}")
        broken.tool = call.name
        raise broken from error


def _problem(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """What is wrong with the arguments; names and plain types are checked, the tool checks the rest."""
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"no argument {name!r}; there are: {', '.join(sorted(properties))}"
        schema = properties[name]  # or True, for whatever there is
        kind = str(schema.get("type")) if isinstance(schema, Mapping) else ""
        wrong = kind in _TYPES and (
            not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")
        )
        if wrong:
            return f"argument {name!r} is a {kind}"
    return ""


def _shortened(text: str, max_characters: int) -> str:
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
