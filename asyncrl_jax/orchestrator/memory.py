"""States of policies as JSON and back: what one orchestrator leaves to the next."""

from __future__ import annotations

import dataclasses
import logging
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_T = TypeVar("_T")


def dump(states: Any) -> dict[str, Any]:
    """JSON-ready values of a frozen dataclass, by field."""
    return dataclasses.asdict(states)


def load(default: _T, found: Mapping[str, Any]) -> _T:
    """What `dump` gave, field by field; the default's field for none, and for what does not fit."""
    hints = typing.get_type_hints(type(default))
    values = {}
    for name, hint in hints.items():
        if name not in found:
            continue
        try:
            values[name] = _restore(hint, found[name])
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            log.error("the state %s does not fit and starts anew: %s", name, error)
    return dataclasses.replace(typing.cast(Any, default), **values)


def _restore(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} is no {kind}")
        names = [field.name for field in dataclasses.fields(kind) if field.name in value]
        return typing.cast(Any, kind)(**{name: _restore(hints[name], value[name]) for name in names})
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _restore(next(argument for argument in arguments if argument is not type(None)), value)
    if origin is tuple:
        repeated = len(arguments) == 2 and arguments[1] is Ellipsis
        inner = [arguments[0]] * len(value) if repeated else arguments
        return tuple(_restore(one, item) for one, item in zip(inner, value, strict=True))
    if origin in (dict, Mapping):
        return {key: _restore(arguments[1], item) for key, item in value.items()}
    if kind is float and isinstance(value, int | float):
        return float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind}")
    return value
