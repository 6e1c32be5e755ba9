"""Group streams: actors submit one message per ticket, the learner reads, trains, and completes."""

from __future__ import annotations

import dataclasses
import threading
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
from asyncrl_jax.transport.payloads import STAGED_S, PayloadStore, is_reference
from asyncrl_jax.transport.tasks import Delivery
from asyncrl_jax.types import Group, Outcome, Ticket

_MAX_STAGINGS = 3


@dataclasses.dataclass(slots=True)
class _Submission:
    """A group on its way, and what became of it."""

    key: str
    staged: bytes
    arguments: list[str | int]
    outcome: int | Exception = dataclasses.field(  # what SUBMIT returned, or what ended the call
        default_factory=lambda: RuntimeError("not sent: the sender was interrupted")
    )


class GroupWriter:
    """Puts finished groups where the learner reads them: a ticket has one queued group at most, ever.

    Safe to use from several threads: groups that are finished at the same time share a round trip.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        config: RedisConfig,
        limits: Limits,
        payloads: PayloadStore | None = None,
    ) -> None:
        """Args: payloads: takes what is larger than `redis.inline_bytes`; None: Redis holds everything."""
        self._redis = client
        self._keys = keys
        self._partitions = config.partitions
        self._inline_bytes = config.inline_bytes
        self._limits = limits
        self._payloads = payloads
        self._submit = client.register_script(scripts.SUBMIT)
        self._lock = threading.Lock()  # of what is waiting
        self._turn = threading.Lock()  # to send
        self._waiting: list[_Submission] = []

    def submit(self, delivery: Delivery, group: Group) -> bool:
        """Queues the group and ends the task, in one step; `enqueued_at` is set to now.

        Returns False if the ticket is settled or has a queued group already: this attempt was waste, and is counted.

        Raises:
          InvalidGroup: if the group breaks the limits; nothing was sent.
        """
        return self.submit_many([(delivery, group)])[0]

    def submit_many(self, finished: Sequence[tuple[Delivery, Group]]) -> list[bool]:
        """`submit` of each, in one round trip. Raises as `submit`, before anything is sent."""
        encoded = []
        for delivery, group in finished:
            if group.ticket is not delivery.ticket and group.ticket != delivery.ticket:
                raise InvalidGroup("ticket_mismatch", f"group of another ticket than {delivery.ticket.ticket_id}")
            stamped = dataclasses.replace(group, enqueued_at=time.time())
            encoded.append((delivery, encode_group(stamped, self._limits)))
        return self._send([self._submission(delivery, data) for delivery, data in encoded])

    def submit_encoded(self, delivery: Delivery, data: bytes) -> bool:
        """As `submit`, for bytes that are taken as they are; the learner's side checks them."""
        return self._send([self._submission(delivery, data)])[0]

    def _submission(self, delivery: Delivery, data: bytes) -> _Submission:
        ticket_id, submission = delivery.ticket.ticket_id, uuid.uuid4().hex
        if self._payloads is not None and len(data) > self._inline_bytes:
            data = self._payloads.put(ticket_id, submission, data)
        partition = partition_of(ticket_id, self._partitions)
        arguments: list[str | int] = [ticket_id, delivery.entry_id, partition, submission]
        return _Submission(self._keys.payload(submission), data, arguments)

    def _send(self, submissions: list[_Submission]) -> list[bool]:
        """Sends them together with those of other threads: who has the turn takes along all that wait."""
        with self._lock:
            self._waiting += submissions
        with self._turn:
            with self._lock:
                taken, self._waiting = self._waiting, []
            if taken:
                self._exchange(taken)
        for submission in submissions:
            if isinstance(submission.outcome, Exception):
                raise submission.outcome
        return [submission.outcome == 1 for submission in submissions]

    def _exchange(self, taken: list[_Submission]) -> None:
        try:
            pending = taken
            for _ in range(_MAX_STAGINGS):
                for submission, answer in zip(pending, self._stage_and_queue(pending), strict=True):
                    submission.outcome = answer
                pending = [submission for submission in pending if submission.outcome == -1]
                if not pending:
                    return
            raise RuntimeError(
                f"Redis dropped {len(pending)} payloads before their groups were queued: set its maxmemory-policy to "
                "noeviction, and its memory larger"
            )
        except Exception as error:  # noqa: BLE001  raised by every thread whose group was in this round trip
            for submission in taken:
                if submission.outcome not in (0, 1):
                    submission.outcome = error

    def _stage_and_queue(self, submissions: list[_Submission]) -> list[int]:
        keys = self._keys.settlement()
        arguments = [name for submission in submissions for name in submission.arguments]
        # One transaction, so that a server that syncs before it replies does so once, not once for each payload.
        with self._redis.pipeline(transaction=True) as pipe:
            for submission in submissions:
                pipe.set(submission.key, submission.staged, ex=STAGED_S)
            pipe.evalsha(self._submit.sha, len(keys), *keys, self._keys.group_prefix, *arguments)
            try:
                return [int(answer) for answer in pipe.execute()[-1]]
            except redis.exceptions.NoScriptError:  # a new server; the payloads are staged
                answers = self._submit(keys=keys, args=[self._keys.group_prefix, *arguments])
                return [int(answer) for answer in answers]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A queued group as read, not decoded yet."""

    partition: int
    entry_id: str
    data: bytes  # the encoded group, or a reference to where it lies
    deliveries: int  # times the entry was handed out, this one included
    ticket: Ticket  # as the ledger has it, not as the message claims
    payloads: PayloadStore | None = dataclasses.field(default=None, compare=False)  # where references lead

    def decode(self, limits: Limits) -> Group:
        """The group, checked, and of the ticket that the ledger issued.

        Raises:
          InvalidGroup: whatever `codec.decode_group` and `PayloadStore.get` refuse, "payload_missing", and
            "ticket_mismatch".
        """
        group = decode_group(self._payload(limits), limits)
        if group.ticket != self.ticket:
            raise InvalidGroup("ticket_mismatch", f"the message states {group.ticket}", self.ticket.ticket_id)
        return group

    def _payload(self, limits: Limits) -> bytes:
        if not self.data:
            raise InvalidGroup("payload_missing", "Redis holds no bytes of this group", self.ticket.ticket_id)
        if not is_reference(self.data):
            return self.data
        if self.payloads is None:
            raise InvalidGroup("payload_missing", "this reader has no store beside the stream", self.ticket.ticket_id)
        return self.payloads.get(self.data, limits.max_message_bytes)


class GroupReader:
    """The learner's end of the group streams.

    Every entry that `read` returned stays pending until `complete` or `dead_letter`; a restarted reader of the
    same name gets it again. An entry that kills its reader is found by being handed out alone after the restart, and
    goes to the dead letters once it was delivered `max_deliveries` times; entries whose reader came back for more are
    cleared of suspicion, however often they are redelivered.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        consumer: str,
        config: RedisConfig,
        payloads: PayloadStore | None = None,
    ) -> None:
        """Args:
        consumer: stable name of this reader, the same after a restart.
        payloads: where writers put what is larger than `redis.inline_bytes`.
        """
        self._redis: Any = client  # Any: redis-py types a reply for all client settings at once
        self._keys = keys
        self._config = config
        self._streams = {keys.groups(partition): partition for partition in range(config.partitions)}
        self._consumer = StreamConsumer(client, list(self._streams), GROUP_CONSUMERS, consumer)
        self._complete = self._redis.register_script(scripts.COMPLETE)
        self._dead_letters = DeadLetters(client, keys)
        self._payloads = payloads
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
        pairs = list(pairs)
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
        for entry, _ in pairs:
            if self._payloads is not None and is_reference(entry.data):
                self._payloads.delete(entry.data)
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

    def sweep_payloads(self) -> int:
        """Deletes payloads beside the stream that no queued group refers to any more. Returns how many.

        Such are left by writers that were killed before their group was queued, and by tickets settled elsewhere.
        """
        if self._payloads is None:
            return 0
        places = self._redis.hgetall(self._keys.group_entries)
        queued = {
            f"{ticket.decode(errors='replace')}.{place.decode(errors='replace').rpartition(' ')[2]}"
            for ticket, place in places.items()
        }
        return self._payloads.sweep(queued)

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
            pipe.mget([self._payload_key(entry.fields) for entry in raw])
            places, issued, payloads = pipe.execute()
        accepted = []
        for entry, ticket_id, place, ticket, data in zip(raw, tickets, places, issued, payloads, strict=True):
            partition = self._streams[entry.stream]
            if place is None or place.split()[:2] != f"{partition} {entry.entry_id}".encode().split():
                self._bury(entry.stream, entry.entry_id, "not_live", "the ledger has no queued group here", "")
                continue
            name = ticket_id.decode()
            if entry.deliveries > self._config.max_deliveries:
                detail = f"its reader died {entry.deliveries - 1} times"
                self._bury(entry.stream, entry.entry_id, "poison", detail, name)
                continue
            try:
                of_ticket = decode_ticket(ticket or b"")
            except InvalidGroup as error:
                self._bury(entry.stream, entry.entry_id, "bad_ledger", f"the ledger's ticket: {error}", name)
                continue
            inline = entry.fields.get(b"payload", b"")  # where earlier releases wrote it
            accepted.append(
                Entry(partition, entry.entry_id, data or inline, entry.deliveries, of_ticket, self._payloads)
            )
        return accepted

    def _payload_key(self, fields: dict[bytes, bytes]) -> str:
        """Of an entry, which may be a forged one: nothing is done to the key but reading it."""
        return self._keys.payload(fields.get(b"submission", b"").decode(errors="replace"))

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
