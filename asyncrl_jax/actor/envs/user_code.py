"""The user's code that an environment's name points at."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import xxhash


def user_code(name: str) -> Any:
    """What stands at `kind:module:attribute`, the name of an environment.

    Raises:
      ValueError: if it can't be imported, with the setting that named it.
    """
    kind, _, address = name.partition(":")
    module, _, attribute = address.partition(":")
    if not module or not attribute:
        raise ValueError(f"--config.environment.name={name}: name it as {kind}:<module>:<name>")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        hint = "; is its directory on PYTHONPATH?" if error.name == module.partition(".")[0] else ""
        raise ValueError(f"--config.environment.name={name}: {error}{hint}") from error
    except AttributeError as error:
        raise ValueError(f"--config.environment.name={name}: {error}") from error
    except Exception as error:
        raise ValueError(f"--config.environment.name={name}: {type(error).__name__}: {error}") from error


def user_function(name: str) -> tuple[Callable[..., Any], str]:
    """(the function that stands there, a digest of its source).

    Raises:
      ValueError: as `user_code`, and if it is no function whose source can be read.
    """
    found = user_code(name)
    try:
        source = inspect.getsource(found)
    except (TypeError, OSError):
        source = ""
    if not callable(found) or not source:
        raise ValueError(
            f"--config.environment.name={name}: a function written in Python is needed, this is {found!r:.100}"
        )
    return found, xxhash.xxh3_64_hexdigest(source.encode())
