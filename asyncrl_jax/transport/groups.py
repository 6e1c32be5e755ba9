"""Group streams: actors submit one message per ticket, the learner reads, trains, and completes."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import redis

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport import scripts
from asyncrl_jax.transport.codec import InvalidGroup, Limits, decode_group, decode_ticket, encode_group
from asyncrl_jax.transport.consumer import RawEntry, StreamConsumer
from asyncrl_jax.transport.dead_letters import DeadLetters
from asyncrl_jax.transport.keys import GROUP_CONSUMERS, Keys, partition_of
from asyncrl_jax.transport.tasks import Delivery
from asyncrl_jax.types import Group, Outcome, Ticket


class GroupWriter:
    """Puts finished groups where the learner reads them: a ticket has one queued group at most, ever."""

    def __init__(self, client: redis.Redis, keys: Keys, config: RedisConfig, limits: Limits) -> None:
        self._keys = keys
        self._partitions = config.partitions
        self._limits = limits
        self._submit = client.register_script(scripts.SUBMIT)

    def submit(self, delivery: Delivery, group: Group) -> bool:
        """Queues the group and ends the task, in one step; `enqueued_at` is set to now.

        Returns False if the ticket is settled or has a queued group already: this attempt was waste, and is counted.

        Raises:
          InvalidGroup: if the group breaks the limits; nothing was sent.
        """
        if group.ticket != delivery.ticket:
            raise InvalidGroup("ticket_mismatch", f"group of another ticket than {delivery.ticket.ticket_id}")
        return self.submit_encoded(
            delivery, encode_group(dataclasses.replace(group, enqueued_at=time.time()), self._limits)
        )

    def submit_encoded(self, delivery: Delivery, data: bytes) -> bool:
        """As `submit`, for bytes that are taken as they are; the learner's side checks them."""
        ticket_id = delivery.ticket.ticket_id
        partition = partition_of(ticket_id, self._partitions)
        arguments: list[str | int | bytes] = [ticket_id, delivery.entry_id, partition, uuid.uuid4().hex, data]
        return bool(self._submit(keys=self._keys.settlement(), args=[self._keys.group_prefix, *arguments]))


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A queued group as read, not decoded yet."""

    partition: int
    entry_id: str
    data: bytes
    deliveries: int  # times the entry was handed out, this one included
    ticket: Ticket  # as the ledger has it, not as the message claims

    def decode(self, limits: Limits) -> Group:
        """The group, checked, and of the ticket that the ledger issued.

        Raises:
          InvalidGroup: whatever `codec.decode_group` refuses, and "ticket_mismatch".
        """
        group = decode_group(self.data, limits)
        if group.ticket != self.ticket:
            raise InvalidGroup("ticket_mismatch", f"the message states {group.ticket}", self.ticket.ticket_id)
        return group


class GroupReader:
    """The learner's end of the group streams.

    Every entry that `read` returned stays pending until `complete`, `ack` or `dead_letter`; a restarted reader of the
    same name gets it again. An entry that kills its reader is found by being handed out alone after the restart, and
    goes to the dead letters once it was delivered `max_deliveries` times; entries whose reader came back for more are
    cleared of suspicion, however often they are redelivered.
    """

    def __init__(self, client: redis.Redis, keys: Keys, consumer: str, config: RedisConfig) -> None:
        """Args: consumer: stable name of this reader, the same after a restart."""
        self._redis: Any = client  # Any: redis-py types a reply for all client settings at once
        self._keys = keys
        self._config = config
        self._streams = {keys.groups(partition): partition for partition in range(config.partitions)}
        self._consumer = StreamConsumer(client, list(self._streams), GROUP_CONSUMERS, consumer)
        self._complete = self._redis.register_script(scripts.COMPLETE)
        self._dead_letters = DeadLetters(client, keys)
        self._held: dict[str, set[str]] = {stream: set() for stream in self._streams}
        self._ready: list[RawEntry] = []  # taken from Redis beyond what was asked for
        self._on_trial: RawEntry | None = None  # the redelivered entry that the last `read` handed out
        self._recovered = False
        self._next_look_at = 0.0

    def read(self, count: int, block_ms: int) -> list[Entry]:
        """At most `count` entries: own pending ones of an earlier process, then idle ones, then new ones.

        Redelivered entries come one at a time. Waits up to `block_ms`, and 5 s at most, for new ones; 0 does not wait.
        """
        if self._on_trial is not None:
            self._consumer.keep(self._on_trial.stream, [self._on_trial.entry_id], deliveries=1)
            self._on_trial = None
        while (old := self._take_pending()) is not None:
            accepted = self._accept([old])
            if accepted:
                self._on_trial = old
                return accepted
        if not self._ready:
            each = max(1, count // len(self._streams))
            new = self._consumer.read_new(each, block_ms)
            # A consumer group that was lost and made anew delivers the stream from its start, with what is held here.
            self._ready = [entry for entry in new if entry.entry_id not in self._held[entry.stream]]
            for entry in self._ready:
                self._held[entry.stream].add(entry.entry_id)
        entries, self._ready = self._ready[:count], self._ready[count:]
        return self._accept(entries)

    def fetch(self, partition: int, entry_id: str) -> bytes | None:
        """The bytes of an entry that is not completed yet, or None."""
        found = self._redis.xrange(self._keys.groups(partition), entry_id, entry_id)
        return found[0][1].get(b"payload", b"") if found else None

    def ack(self, entries: Sequence[Entry]) -> None:
        """Acknowledges and deletes entries in one transaction, without settling their tickets."""
        with self._redis.pipeline(transaction=True) as pipe:
            for entry in entries:
                stream = self._keys.groups(entry.partition)
                pipe.xack(stream, GROUP_CONSUMERS, entry.entry_id)
                pipe.xdel(stream, entry.entry_id)
                self._held[stream].discard(entry.entry_id)
            pipe.execute()

    def complete(
        self, pairs: Iterable[tuple[Entry, str]], outcome: Outcome, update: int | None, reason: str = ""
    ) -> int:
        """Acknowledges and deletes entries and settles their tickets, in one step for each partition.

        Nothing happens for a pair whose ticket the ledger does not have in that entry. Safe to repeat.

        Args:
          pairs: entries, each with its ticket id.
          update: update count of the durable checkpoint, for trained ones.

        Returns the number of tickets settled by this call.
        """
        by_partition: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for entry, ticket_id in pairs:
            by_partition[entry.partition].append((entry.entry_id, ticket_id))
        settled = 0
        for partition, places in by_partition.items():
            at = "" if update is None else update
            arguments: list[str | int] = [self._keys.group_prefix, partition, outcome.value, reason[:200], at]
            arguments += [name for place in places for name in place]
            settled += int(self._complete(keys=self._keys.settlement(), args=arguments))
            self._held[self._keys.groups(partition)].difference_update(entry_id for entry_id, _ in places)
        return settled

    def dead_letter(self, entry: Entry, reason: str, detail: str, ticket_id: str | None = None) -> bool:
        """Moves an entry to the dead letters and settles its ticket as quarantined, in one step.

        Args:
          ticket_id: as the message states it, which may be a lie: it is noted, and the ledger's ticket is settled.

        Returns whether the entry was still there.
        """
        if ticket_id not in (None, entry.ticket.ticket_id):
            detail = f"{detail} (it states ticket {ticket_id})"
        return self._bury(self._keys.groups(entry.partition), entry.entry_id, reason, detail, entry.ticket.ticket_id)

    def depth(self) -> int:
        """Entries not yet read by any learner. Counted without `lag`, which Redis 6.2 lacks."""
        unread = sum(max(0, self._redis.xlen(stream) - self._consumer.num_pending(stream)) for stream in self._streams)
        return unread + len(self._ready)

    def _take_pending(self) -> RawEntry | None:
        """One entry that was delivered before: to an earlier process of this name, or to anyone and left idle."""
        if not self._recovered:
            for stream, held in self._held.items():
                for entry in self._consumer.take_own(stream, 1, held):
                    held.add(entry.entry_id)
                    return entry
            self._recovered = True
        if time.monotonic() >= self._next_look_at:
            for stream, held in self._held.items():
                for entry in self._consumer.take_idle(stream, self._config.claim_idle_s, 1, held):
                    held.add(entry.entry_id)
                    return entry
            self._next_look_at = time.monotonic() + self._config.claim_idle_s / 4
        return None

    def _accept(self, raw: list[RawEntry]) -> list[Entry]:
        """Entries whose ticket the ledger knows by this very entry; all others are put away."""
        if not raw:
            return []
        tickets = [entry.fields.get(b"ticket", b"") for entry in raw]
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hmget(self._keys.group_entries, tickets)
            pipe.hmget(self._keys.tickets, tickets)
            places, payloads = pipe.execute()
        accepted = []
        for entry, ticket_id, place, payload in zip(raw, tickets, places, payloads, strict=True):
            partition = self._streams[entry.stream]
            if place is None or place.decode().split()[:2] != [str(partition), entry.entry_id]:
                self._bury(entry.stream, entry.entry_id, "not_live", "the ledger has no queued group here", "")
            elif entry.deliveries > self._config.max_deliveries:
                detail = f"its reader died {entry.deliveries - 1} times"
                self._bury(entry.stream, entry.entry_id, "poison", detail, ticket_id.decode())
            else:
                data = entry.fields.get(b"payload", b"")
                accepted.append(Entry(partition, entry.entry_id, data, entry.deliveries, decode_ticket(payload)))
        return accepted

    def _bury(self, stream: str, entry_id: str, reason: str, detail: str, ticket_id: str) -> bool:
        moved = self._dead_letters.bury(
            stream,
            GROUP_CONSUMERS,
            entry_id,
            reason=reason,
            detail=detail,
            ticket_id=ticket_id,
            outcome=Outcome.QUARANTINED,
        )
        self._held[stream].discard(entry_id)
        return moved
