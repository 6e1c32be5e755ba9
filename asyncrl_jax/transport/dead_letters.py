"""Entries that could not be used: kept with their bytes, the reason, and where they came from.

There are never more than MAX_LETTERS of them, nor more than MAX_BYTES in all: the oldest make room, and are counted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import redis

from asyncrl_jax.transport import scripts
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.types import Outcome

MAX_LETTERS = 1000
MAX_BYTES = 64 * 2**20  # of all letters
MAX_LETTER_BYTES = 2**20  # of one; what is longer is cut

_LONGEST_DETAIL = 500  # characters


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """One entry that was put away."""

    stream: str  # it came from
    entry_id: str  # it had there
    reason: str  # short and stable
    detail: str
    ticket_id: str  # as the entry states it; "" if it states none
    payload: bytes  # its start, when it is longer than a letter may be; a reference, when it lies in a file


class DeadLetters:
    """The dead-letter stream of a run."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._redis: Any = client  # Any: redis-py types a reply for all client settings at once
        self._keys = keys
        self._dead_letter = self._redis.register_script(scripts.DEAD_LETTER)

    def bury(
        self, stream: str, group: str, entry_id: str, *, reason: str, detail: str, ticket_id: str, outcome: Outcome
    ) -> bool:
        """Moves an entry here and settles its ticket, in one step. Safe to repeat.

        Args:
          group: consumer group that holds the entry.
          ticket_id: settled if the ledger knows it by this very entry; "" settles none.

        Returns whether the entry was still in its stream.
        """
        arguments = [stream, group, entry_id, reason, detail[:_LONGEST_DETAIL], ticket_id, outcome.value]
        limits = [MAX_LETTERS, MAX_BYTES, MAX_LETTER_BYTES]
        keys = [*self._keys.settlement(), self._keys.dead, self._keys.dead_size]
        return bool(self._dead_letter(keys=keys, args=[self._keys.group_prefix, *arguments, *limits]))

    def read(self, count: int = 100) -> list[DeadLetter]:
        """The newest letters, newest first."""
        return [
            DeadLetter(
                stream=fields[b"stream"].decode(),
                entry_id=fields[b"entry"].decode(),
                reason=fields[b"reason"].decode(),
                detail=fields[b"detail"].decode(errors="replace"),
                ticket_id=fields.get(b"ticket", b"").decode(errors="replace"),
                payload=fields.get(b"payload", b""),
            )
            for _, fields in self._redis.xrevrange(self._keys.dead, count=count)
        ]

    def num_dropped(self) -> int:
        """Letters that made room for newer ones."""
        return int(self._redis.hget(self._keys.counts, "letters_dropped") or 0)

    def __len__(self) -> int:
        return int(self._redis.xlen(self._keys.dead))
