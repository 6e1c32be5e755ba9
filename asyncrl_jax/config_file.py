"""`config.json`: the settings of a run as a file, which any role can be started from."""

from __future__ import annotations

import json
import os
import typing
from pathlib import Path
from typing import Any

from asyncrl_jax.config import Config, from_json, leaf_types, to_json


def read_config(path: Path) -> Config:
    """The config in a file.

    Raises:
      ValueError: if there is no such file, it is not JSON, or a setting in it is refused.
    """
    try:
        leaves = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(leaves, dict):
        raise ValueError(f"{path}: holds a {type(leaves).__name__}, not settings by name")
    try:
        _check_types(leaves)
        return from_json(leaves)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_config(path: Path, config: Config) -> None:
    """Writes the file, whole or not at all."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(to_json(config), indent=2) + "\n")
    os.replace(draft, path)


def _check_types(leaves: dict[str, Any]) -> None:
    """Refuses JSON values of another type than the leaf's; unknown names are left to `from_json`."""
    for name, (kind, _, _) in leaf_types().items():
        if name not in leaves:
            continue
        value = leaves[name]
        element = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None
        values = value if element and isinstance(value, list) else [value]
        expected = element or kind
        accepted = (int, float) if expected is float else (expected,)
        if (element and not isinstance(value, list)) or any(type(v) not in accepted for v in values):
            meaning = f"a list of {element.__name__}s" if element else f"a value of type {kind.__name__}"
            raise ValueError(f"{name} = {value!r}: {meaning} is needed")
