"""The user's code that an environment's name points at."""

from __future__ import annotations

import importlib
from typing import Any


def user_code(name: str) -> Any:
    """What stands at `kind:module:attribute`, the name of an environment.

    Raises:
      ValueError: if it can't be imported, with the setting that named it.
    """
    _, _, address = name.partition(":")
    module, _, attribute = address.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--config.environment.name={name}: {error}") from error
