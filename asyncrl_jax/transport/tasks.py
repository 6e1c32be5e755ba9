"""The tasks stream as an actor host sees it: tickets come in, and each is submitted, failed or given back."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import redis

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport import scripts
from asyncrl_jax.transport.codec import InvalidGroup, decode_ticket
from asyncrl_jax.transport.consumer import RawEntry, StreamConsumer
from asyncrl_jax.transport.dead_letters import DeadLetters
from asyncrl_jax.transport.keys import TASK_CONSUMERS, Keys
from asyncrl_jax.types import Outcome, Ticket


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """A ticket held by this consumer, until it is submitted, failed, released, or idle for too long."""

    ticket: Ticket
    entry_id: str  # in the tasks stream
    deliveries: int  # times the ticket was handed out, this one included


class TaskStream:
    """One consumer of the tasks stream.

    A delivery is held only while `keep_alive` names it: after `claim_idle_s` without that, any consumer, this one
    included, may be given the ticket again. A ticket handed out more than `max_deliveries` times fails.
    """

    def __init__(self, client: redis.Redis, keys: Keys, consumer: str, config: RedisConfig) -> None:
        """Args: consumer: stable name of this host, the same after a restart."""
        self._redis: Any = client  # Any: redis-py types a reply for all client settings at once
        self._keys = keys
        self._config = config
        self._consumer = consumer
        self._stream = StreamConsumer(client, [keys.tasks], TASK_CONSUMERS, consumer)
        self._fail = self._redis.register_script(scripts.FAIL)
        self._release = self._redis.register_script(scripts.RELEASE)
        self._dead_letters = DeadLetters(client, keys)
        self._recovered: set[str] | None = set()  # entries of an earlier process handed out so far; None: all of them
        self._next_look_at = 0.0

    def claim(self, count: int, block_ms: int) -> list[Delivery]:
        """At most `count` tickets: those of an earlier process of this name, then idle ones, then new ones.

        Waits up to `block_ms`, and 5 s at most, for a new one; 0 does not wait. May return early with none.
        """
        entries: list[RawEntry] = []
        if self._recovered is not None:
            entries = self._stream.take_own(self._keys.tasks, count, self._recovered)
            self._recovered = self._recovered | {entry.entry_id for entry in entries} if entries else None
        if len(entries) < count and time.monotonic() >= self._next_look_at:
            idle = self._stream.take_idle(self._keys.tasks, self._config.claim_idle_s, count - len(entries))
            entries += idle
            if not idle:
                self._next_look_at = time.monotonic() + self._config.claim_idle_s / 4
        if len(entries) < count:
            entries += self._stream.read_new(count - len(entries), 0 if entries else block_ms)
        return self._accept(entries)

    def keep_alive(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Holds the deliveries for another `claim_idle_s`. Returns those still held.

        One that is missing was settled by someone else (its deadline passed, say) or claimed by another consumer: work
        on it is wasted and should be cancelled.
        """
        held = self._stream.keep(self._keys.tasks, [delivery.entry_id for delivery in deliveries])
        return [delivery for delivery in deliveries if delivery.entry_id in held]

    def fail(self, delivery: Delivery, reason: str) -> bool:
        """Settles the ticket as failed, if it is still held. Returns whether this call did."""
        return self._give_up(self._fail, delivery, Outcome.FAILED.value, reason[:200])

    def release(self, delivery: Delivery) -> bool:
        """Gives the ticket back at once, for any consumer; this delivery does not count against it.

        Returns whether it was still held.
        """
        return self._give_up(self._release, delivery, delivery.deliveries - 1)

    def _give_up(self, script: Any, delivery: Delivery, *arguments: str | int) -> bool:
        held = [self._keys.group_prefix, self._consumer, delivery.ticket.ticket_id, delivery.entry_id]
        return bool(script(keys=self._keys.settlement(), args=[*held, *arguments]))

    def _accept(self, entries: list[RawEntry]) -> list[Delivery]:
        if not entries:
            return []
        tickets = [entry.fields.get(b"ticket", b"") for entry in entries]
        known = self._redis.hmget(self._keys.task_entries, tickets)
        accepted = []
        for entry, ticket_id, at in zip(entries, tickets, known, strict=True):
            delivery = self._check(entry, ticket_id, at)
            if delivery is not None:
                accepted.append(delivery)
        return accepted

    def _check(self, entry: RawEntry, ticket_id: bytes, at: bytes | None) -> Delivery | None:
        """The delivery to hand out, or None after the entry was put away."""
        if at is None or at.decode() != entry.entry_id:
            # Settled, queued, or never issued: the ledger does not know the ticket by this entry.
            self._bury(entry, "not_live", "the ledger holds no live ticket for this entry", "")
            return None
        earlier = int(entry.fields.get(b"deliveries", b"0"))
        if entry.deliveries + earlier > self._config.max_deliveries:
            detail = f"handed out {entry.deliveries + earlier - 1} times without an end"
            self._bury(entry, "max_deliveries", detail, ticket_id.decode())
            return None
        try:
            ticket = decode_ticket(entry.fields.get(b"payload", b""))
        except InvalidGroup as error:
            self._bury(entry, error.reason, error.detail, ticket_id.decode())
            return None
        return Delivery(ticket, entry.entry_id, entry.deliveries + earlier)

    def _bury(self, entry: RawEntry, reason: str, detail: str, ticket_id: str) -> None:
        self._dead_letters.bury(
            entry.stream,
            TASK_CONSUMERS,
            entry.entry_id,
            reason=reason,
            detail=detail,
            ticket_id=ticket_id,
            outcome=Outcome.FAILED,
        )
