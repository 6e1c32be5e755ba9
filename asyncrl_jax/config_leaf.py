"""What a settings tree is made of. Every `config*.py` declares its leaves with these."""

from __future__ import annotations

import dataclasses
from typing import Any

COLDEST_HOTTEST = (1e-3, 1e3)  # temperatures of sampling: logits divided by less would overflow


def setting(default: Any, meaning: str) -> Any:
    """A config leaf with its meaning, which `--help` prints."""
    return dataclasses.field(default=default, metadata={"help": meaning})


def branch(cls: type) -> Any:
    """A config subtree."""
    return dataclasses.field(default_factory=cls)


def require(ok: bool, name: str, value: object, need: str) -> None:
    """Refuses a setting.

    Raises:
      ValueError: unless `ok`; it names the flag, its value and what is needed.
    """
    if not ok:
        raise ValueError(f"--config.{name}={value}: {need}")
