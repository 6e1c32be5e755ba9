"""Keys of a run that hold another Redis type than `keys.py` says: what no role can work with, and a human can mend."""

from __future__ import annotations

from typing import Any

import redis

from asyncrl_jax.transport.keys import Keys

_TYPES = {
    "hash": (
        *("tickets", "task_entries", "group_entries", "counts", "versions", "lines", "heartbeats", "state", "leader"),
        *("evaluation_requests", "evaluation_holders", "evaluation_results", "operator", "settings"),
    ),
    "stream": ("ledger", "tasks", "dead", "decisions", "observations"),
    "set": ("rolled_back", "reserved", "cuts"),
    "zset": ("leases", "heartbeat_expiry", "redo", "evaluation_queue", "evaluation_expiry"),
    "string": ("ticket_count", "dead_size", "epoch", "learner", "latest", "phase", "directives"),
}
_NUMBERS = ("ticket_count", "dead_size", "epoch", "latest")
_LATEST_YEAR, _LATEST_MS = 2200, 7_258_118_400_000  # of the id of a stream's entry


def explained(error: redis.ResponseError, client: redis.Redis, keys: Keys) -> str | None:
    """The error in one line, with every key that holds what it cannot and the way out; None if it has another cause."""
    expected = {getattr(keys, name): kind for kind, names in _TYPES.items() for name in names}
    pipe: Any = client.pipeline(transaction=False)
    for name in expected:
        pipe.type(name)
    found = dict(zip(expected, (kind.decode() for kind in pipe.execute()), strict=True))
    odd = [(name, kind) for name, kind in expected.items() if found[name] not in (kind, "none")]
    wrong = [f"{name} is a {found[name]}, not a {kind} (redis-cli DEL it)" for name, kind in odd]
    numbers = [getattr(keys, name) for name in _NUMBERS if found[getattr(keys, name)] == "string"]
    values: list[Any] = client.mget(numbers) if numbers else []
    wrong += [f"{name} is no number" for name, value in zip(numbers, values, strict=True) if not value.isdigit()]
    for name in [getattr(keys, name) for name in _TYPES["stream"]]:
        if found[name] == "stream":
            last: Any = client.xinfo_stream(name)
            if int(last["last-generated-id"].split(b"-")[0]) > _LATEST_MS:
                late = f"{name} has an entry of {_LATEST_YEAR} or later, after which none can be added"
                wrong.append(f"{late} (redis-cli XDEL it, then XSETID to the one before)")
    if not wrong:
        return None
    return f"{'; '.join(wrong)}: something else wrote there. Mend it and start again ({error})"
