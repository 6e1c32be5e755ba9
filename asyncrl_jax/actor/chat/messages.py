"""What a conversation is made of, before it is tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message."""

    role: Role
    content: str
    name: str = ""  # of the tool that answers, for role "tool"

    def as_dict(self) -> dict[str, Any]:
        """As chat templates and chat interfaces want it."""
        message = {"role": self.role, "content": self.content}
        return message | ({"name": self.name} if self.name else {})


def read_opening(path: str) -> tuple[Message, ...]:
    """Messages that stand before a task's own: a JSON list of objects with `role` and `content`.

    Raises:
      ValueError: if the file is not that.
    """
    try:
        return tuple(Message(entry["role"], entry["content"]) for entry in json.loads(Path(path).read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--config.environment.opening={path}: no list of messages there ({error!r})") from error


def opened(opening: Sequence[Message], messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with the opening behind their system message, where there is one, else at their start."""
    head = 1 if messages and messages[0].role == "system" else 0
    return (*messages[:head], *opening, *messages[head:])
