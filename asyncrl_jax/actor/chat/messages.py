"""What a conversation is made of, before it is tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.types import Task

_PROMPT = "{prompt}"

Role = Literal["system", "user", "assistant", "tool"]


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message."""

    role: Role
    content: str
    name: str = ""  # of the tool that answers, for role "tool"

    def __post_init__(self) -> None:
        """Raises TypeError for what is no text: it would be shown to the policy as Python writes it."""
        if not (isinstance(self.content, str) and isinstance(self.name, str)):
            raise TypeError(f"a message of {self.role} is text, and not {type(self.content).__name__}")

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


def read_variants(path: str) -> tuple[str, ...]:
    """Texts of which one takes the place of a task's question: a JSON list of strings with `{prompt}` in each.

    Raises:
      ValueError: if the file is not that.
    """
    name = f"--config.environment.prompt_variants={path}"
    try:
        variants = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: no list of texts there ({error!r})") from error
    if not (isinstance(variants, list) and variants and all(isinstance(v, str) and _PROMPT in v for v in variants)):
        raise ValueError(f"{name}: a list of texts is needed, each with {_PROMPT} where the question goes")
    return tuple(variants)


def varied(variants: Sequence[str], task: Task, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with the user's last one put in another way: one of the variants, or as it was, by the task.

    All members of a group see the same, so that their rewards compare like with like. Held-out tasks stay as they are.
    """
    last = max((at for at, message in enumerate(messages) if message.role == "user"), default=None)
    drawn = derive_seed(task.environment, task.level, task.index, "prompt") % (len(variants) + 1)
    if task.split != "train" or last is None or drawn == 0:
        return tuple(messages)
    content = variants[drawn - 1].replace(_PROMPT, messages[last].content)
    return (*messages[:last], dataclasses.replace(messages[last], content=content), *messages[last + 1 :])


def opened(opening: Sequence[Message], messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with the opening behind their system message, where there is one, else at their start."""
    head = 1 if messages and messages[0].role == "system" else 0
    return (*messages[:head], *opening, *messages[head:])
