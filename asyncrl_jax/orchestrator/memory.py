"""States of policies as JSON and back: what one orchestrator leaves to the next."""

from __future__ import annotations

import dataclasses
import functools
import logging
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_LEAVES = frozenset((float, int, str, bool, type(None)))
_hints: Any = functools.cache(typing.get_type_hints)


def dump(states: Any) -> dict[str, Any]:
    """JSON-ready values of a frozen dataclass, by field. Cost: linear; nothing is copied that JSON takes as it is."""
    return {name: _plain(getattr(states, name)) for name in _names(type(states))}


def _plain(value: Any) -> Any:
    if type(value) in _LEAVES:
        return value
    if dataclasses.is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # what is as by default is left out
        defaults = typing.cast(Any, type(value))._field_defaults
        fields = zip(value._fields, value, strict=True)
        return {name: _plain(item) for name, item in fields if name not in defaults or item != defaults[name]}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


_names: Any = functools.cache(_field_names)


def load(default: _T, found: Mapping[str, Any]) -> _T:
    """What `dump` gave, field by field; the default's field for none, and for what does not fit."""
    hints = _hints(type(default))
    values = {}
    for name, hint in hints.items():
        if name not in found:
            continue
        try:
            values[name] = _restore(hint, found[name])
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            log.error("the state %s does not fit and starts anew: %s", name, error)
    return dataclasses.replace(typing.cast(Any, default), **values)


def _restore(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = _hints(kind)
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} is no {kind}")
        names = [name for name in hints if name in value]
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
