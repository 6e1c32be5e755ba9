"""Environments whose code is not this package's: they are played in processes of their own."""

from __future__ import annotations

import json
from typing import Any

from asyncrl_jax.actor.envs.text import TextEnvironmentFactory
from asyncrl_jax.actor.envs.user_code import user_code

_MEMBERS = ("name", "num_levels", "identity", "limits_own_score", "tools")


def read_arguments(arguments: str) -> dict[str, Any]:
    """`--config.environment.arguments`.

    Raises:
      ValueError: if it is no JSON object.
    """
    try:
        found = json.loads(arguments or "{}")
    except ValueError as error:
        raise ValueError(f"--config.environment.arguments={arguments}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f'--config.environment.arguments={arguments}: a JSON object is needed, as {{"size": 4}}')
    return found


def third_party_factory(name: str, num_levels: int, arguments: str = "") -> TextEnvironmentFactory | None:
    """The environment of `--config.environment.name`, None if it is none of these.

    Args: arguments: as `environment.arguments`.

    Raises:
      ValueError: if it can't be made.
    """
    kind, _, rest = name.partition(":")
    if kind == "function":
        from asyncrl_jax.actor.envs.function import FunctionTasks

        return FunctionTasks(rest, num_levels)
    if kind == "gymnasium":
        from asyncrl_jax.actor.envs.gym import GymnasiumTasks

        return GymnasiumTasks(rest, num_levels, read_arguments(arguments))
    if kind == "text":
        return _own_factory(rest)
    return None


def _own_factory(address: str) -> TextEnvironmentFactory:
    """The user's own `TextEnvironmentFactory` at `module:name`."""
    factory: TextEnvironmentFactory = user_code(f"text:{address}")
    missing = [member for member in _MEMBERS if not hasattr(factory, member)]
    if missing or factory.name != f"text:{address}":
        detail = f"it has no {', '.join(missing)}" if missing else f"its name is {factory.name!r}"
        raise ValueError(f"--config.environment.name=text:{address}: {detail}; see asyncrl_jax/actor/envs/text.py")
    return factory
