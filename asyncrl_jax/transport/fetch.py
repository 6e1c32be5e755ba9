"""Reads queued groups by ticket, without taking part in the consumer group: for processes that only follow a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

from asyncrl_jax.transport.codec import Limits, decode_ticket
from asyncrl_jax.transport.groups import Entry
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.payloads import PayloadStore
from asyncrl_jax.types import Group


def fetch_groups(
    client: redis.Redis, keys: Keys, ticket_ids: Sequence[str], limits: Limits, payloads: PayloadStore | None = None
) -> list[Group]:
    """The queued groups of these tickets, in the same order.

    Args:
      client: of the server.
      keys: names of keys.
      ticket_ids: of tickets that are live.
      limits: what a message may be.
      payloads: where writers put what is larger than `redis.inline_bytes`.

    Raises:
      LookupError: if a ticket has no queued group, as after it was settled.
      InvalidGroup: as `Entry.decode`.
    """
    reader: Any = client  # Any: redis-py types a reply for all client settings at once
    if not ticket_ids:
        return []
    with reader.pipeline(transaction=True) as pipe:
        pipe.hmget(keys.group_entries, ticket_ids)
        pipe.hmget(keys.tickets, ticket_ids)
        places, tickets = pipe.execute()
    known = list(zip(ticket_ids, places, tickets, strict=True))
    if missing := [ticket_id for ticket_id, place, ticket in known if place is None or ticket is None]:
        raise LookupError(f"tickets {missing[:8]} have no queued group")
    where = [place.decode().split() for place in places]
    found = reader.mget([keys.payload(submission) for _, _, submission in where])
    return [
        Entry(int(partition), entry_id, data or b"", 1, decode_ticket(ticket), payloads).decode(limits)
        for (partition, entry_id, _), data, ticket in zip(where, found, tickets, strict=True)
    ]
