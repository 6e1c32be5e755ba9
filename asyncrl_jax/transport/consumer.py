"""One consumer of one or more streams: new entries, pending ones, and nothing lost when Redis comes back empty."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import redis

from asyncrl_jax.transport import scripts

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_LONGEST_BLOCK_MS = 5000  # below the client's socket timeout, so that a hung server is noticed


class RawEntry(NamedTuple):
    """An entry as it lies in a stream."""

    stream: str
    entry_id: str
    deliveries: int  # this one included
    fields: dict[bytes, bytes]


class StreamConsumer:
    """A named member of a consumer group.

    The group starts at entry 0, so what producers wrote before the first consumer came is read too. The consumer name
    must be stable across restarts: what was delivered and not acknowledged is found again by it.
    """

    def __init__(self, client: redis.Redis, streams: Sequence[str], group: str, consumer: str) -> None:
        self._redis: Any = client  # Any: redis-py types a reply for all client settings at once
        self._streams = tuple(streams)
        self._group = group
        self._consumer = consumer
        self._claim = self._redis.register_script(scripts.CLAIM)
        self._keep = self._redis.register_script(scripts.KEEP)
        self._create_groups()

    def read_new(self, count: int, block_ms: int) -> list[RawEntry]:
        """At most `count` entries of each stream that no consumer has seen; waits up to `block_ms` (0: not at all)."""
        wanted = dict.fromkeys(self._streams, ">")
        block = min(block_ms, _LONGEST_BLOCK_MS) if block_ms > 0 else None
        answer = self._with_groups(
            lambda: self._redis.xreadgroup(self._group, self._consumer, wanted, count=count, block=block)
        )
        return [
            RawEntry(stream.decode(), entry_id.decode(), 1, fields)
            for stream, entries in answer or []
            for entry_id, fields in entries
        ]

    def take_own(self, stream: str, limit: int, left_out: Collection[str]) -> list[RawEntry]:
        """Entries delivered to this consumer, by an earlier process of its name, and not acknowledged."""
        return self._take(stream, "own", 0, limit, left_out)

    def take_idle(self, stream: str, idle_s: float, limit: int, left_out: Collection[str] = ()) -> list[RawEntry]:
        """Entries of any consumer that nobody kept alive for `idle_s`: their consumer died, or the reply was lost."""
        return self._take(stream, "any", idle_s, limit, left_out)

    def keep(self, stream: str, entry_ids: Sequence[str], deliveries: int | None = None) -> set[str]:
        """Resets the idle time of entries, and their delivery count if given. Returns those still held."""
        if not entry_ids:
            return set()
        count = "" if deliveries is None else deliveries
        held = self._with_groups(
            lambda: self._keep(keys=[stream], args=[self._group, self._consumer, count, *entry_ids])
        )
        return {entry_id.decode() for entry_id in held}

    def num_pending(self, stream: str) -> int:
        """Entries delivered to any consumer of the group and not acknowledged."""
        return int(self._with_groups(lambda: self._redis.xpending(stream, self._group))["pending"])

    def _take(self, stream: str, whose: str, idle_s: float, limit: int, left_out: Collection[str]) -> list[RawEntry]:
        arguments: list[str | int] = [self._group, self._consumer, whose, int(idle_s * 1000), limit, *left_out]
        taken, lost = self._with_groups(lambda: self._claim(keys=[stream], args=arguments))
        if lost:
            _log.warning("%d pending entries of %s were deleted by someone else: %s", len(lost), stream, lost[:5])
        return [
            RawEntry(stream, entry_id.decode(), deliveries, dict(zip(fields[::2], fields[1::2], strict=True)))
            for entry_id, deliveries, fields in taken
        ]

    def _create_groups(self) -> None:
        for stream in self._streams:
            try:
                self._redis.xgroup_create(stream, self._group, id="0", mkstream=True)
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    def _with_groups(self, call: Callable[[], _T]) -> Any:
        """`call()`; once more, with groups made anew, if Redis lost them in a reset."""
        try:
            return call()
        except redis.ResponseError as error:
            # A reader that was waiting when the streams went is told in another way than one that comes later.
            if not any(sign in str(error) for sign in ("NOGROUP", "UNBLOCKED")):
                raise
            _log.warning("Redis was reset: making consumer group %s of %s again", self._group, self._streams)
            self._create_groups()
            return call()
