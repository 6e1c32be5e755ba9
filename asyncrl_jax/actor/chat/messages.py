"""What a conversation is made of, before it is tokens."""

from __future__ import annotations

import dataclasses
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
