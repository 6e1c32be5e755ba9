"""Tool calls in what the policy wrote: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number a turn."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

MAX_DEPTH = 64  # of lists and objects in each other: what goes on to be written as JSON again must not be deeper

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z|(?=<tool_call>))", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A well-formed call."""

    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class MalformedCall:
    """Something that was meant as a call; `problem` is for the policy to read."""

    problem: str


def parse_tool_calls(text: str) -> list[ToolCall | MalformedCall]:
    """The calls of a turn, in order; an empty list if it makes none."""
    return [_parse(match[1], closed=match[2] == "</tool_call>") for match in _CALL.finditer(text)]


def _parse(body: str, *, closed: bool) -> ToolCall | MalformedCall:
    if not closed:
        return MalformedCall("the call has no </tool_call>")
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"the call is not JSON: {error}"[:200])
    if not is_plain(call):
        return MalformedCall("the call has half a character, or is nested too deeply")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return MalformedCall('a call is {"name": "…", "arguments": {…}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return MalformedCall("arguments are an object, {}")
    return ToolCall(call["name"], arguments)


def is_plain(value: Any) -> bool:
    """Whether what JSON said can be said again, by any program: not nested too deeply, and all of its text is text.

    JSON can say half of a character (a lone surrogate), which neither UTF-8 nor a tokenizer takes.
    """
    level, depth = [value], 0
    while level:
        level = [inner for outer in level if isinstance(outer, (dict, list)) for inner in _inner(outer)]
        depth += 1
        if depth > MAX_DEPTH:
            return False
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _inner(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer
