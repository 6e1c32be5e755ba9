"""The ticket ledger: at any moment issued = pending + the sum of outcomes, by unique ticket.

It holds by construction: a ticket enters the hash of live tickets in the same step as its `issued` event, and leaves it
in the same step as its one `outcome` event. The events, not the counters, are the ledger; `recompute` checks them.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

import redis

from asyncrl_jax.transport import fencing, scripts
from asyncrl_jax.transport.codec import InvalidGroup, decode_ticket, encode_ticket
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.repeats import Repeats
from asyncrl_jax.types import Outcome, Ticket

_log = logging.getLogger(__name__)
_log.addFilter(Repeats())  # what is wrong there stays wrong until somebody mends it
ROLLED_BACK = "rolled_back"  # reason of the one outcome that may follow another: a rollback undid the training
_COUNT = re.compile(rb"-?[0-9]{1,18}")
_CHUNK = 256  # tickets in one script call; a script blocks the server while it runs


# KEYS: rolled_back, ledger, counts. ARGV: update, then ticket ids. Returns the number undone now.
_UNDO = f"""
local undone = 0
for i = 2, #ARGV do
  if redis.call('SADD', KEYS[1], ARGV[i]) == 1 then
    redis.call('XADD', KEYS[2], '*', 'kind', 'outcome', 'ticket', ARGV[i], 'outcome', 'undone',
      'reason', '{ROLLED_BACK}', 'update', ARGV[1])
    redis.call('HINCRBY', KEYS[3], 'trained', -1)
    redis.call('HINCRBY', KEYS[3], 'undone', 1)
    undone = undone + 1
  end
end
return undone
"""


class NoEpoch(RuntimeError):
    """Redis is new or lost its data: nothing can be issued before the learner has opened an epoch."""


@dataclasses.dataclass(frozen=True, slots=True)
class LiveTicket:
    """A ticket without an outcome."""

    ticket: Ticket
    state: str  # "issued": with actors or waiting for one; "queued": its group is in a group stream
    task_entry: str | None  # in the tasks stream, while issued
    partition: int | None  # of the group stream, while queued
    group_entry: str | None  # in that stream, while queued

    @property
    def handed_out_at(self) -> float | None:
        """When it was issued or given back last, in unix seconds by the clock of Redis; None once it is queued."""
        found = re.match(r"[0-9]{1,15}(?=-)", self.task_entry or "")
        return None if found is None else int(found[0]) / 1000


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerEvent:
    """One line of the ledger."""

    event_id: str  # of the stream entry; sorts by time
    kind: str  # "issued" or "outcome"
    ticket_id: str
    ticket: Ticket | None = None  # of an issued event
    outcome: Outcome | None = None  # of an outcome event
    reason: str = ""
    update: int | None = None  # of a trained ticket: update count of the checkpoint that holds it

    @property
    def at(self) -> float:
        """Unix seconds, by the clock of Redis."""
        return int(self.event_id.split("-")[0]) / 1000


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerCounts:
    """The ledger recomputed from its events, by unique ticket."""

    issued: int
    outcomes: dict[Outcome, int]  # every outcome, zeros included
    pending: int
    unissued: tuple[str, ...]  # tickets with an outcome that were never issued
    settled_twice: tuple[str, ...]  # tickets with more than one outcome event

    @property
    def balances(self) -> bool:
        """issued = pending + outcomes, with every outcome of an issued ticket and only one of each."""
        return self.issued == self.pending + sum(self.outcomes.values()) and not (self.unissued or self.settled_twice)


def recompute(events: Iterable[LedgerEvent]) -> LedgerCounts:
    """Counts by unique ticket; its first outcome counts, unless a rollback has undone it.

    Events may repeat (by id) and come in any order.
    """
    issued, outcomes, settled_twice = final_outcomes(events)
    counted = collections.Counter(outcomes.values())
    return LedgerCounts(
        issued=len(issued),
        outcomes={outcome: counted[outcome] for outcome in Outcome},
        pending=len(issued - outcomes.keys()),
        unissued=tuple(ticket_id for ticket_id in outcomes if ticket_id not in issued),
        settled_twice=tuple(dict.fromkeys(settled_twice)),
    )


def final_outcomes(events: Iterable[LedgerEvent]) -> tuple[set[str], dict[str, Outcome], list[str]]:
    """(tickets issued, outcome of each that ended, tickets that ended more than once)."""
    by_id = {event.event_id: event for event in events}
    issued: set[str] = set()
    outcomes: dict[str, Outcome] = {}
    settled_twice: list[str] = []
    for event_id in sorted(by_id, key=_by_time):
        event = by_id[event_id]
        before = outcomes.get(event.ticket_id)
        if event.outcome is None:
            issued.add(event.ticket_id)
        elif before is None or (event.reason == ROLLED_BACK and before in (Outcome.TRAINED, Outcome.UNDONE)):
            outcomes[event.ticket_id] = event.outcome
        else:
            settled_twice.append(event.ticket_id)
    return issued, outcomes, settled_twice


def _by_time(event_id: str) -> tuple[int, int]:
    milliseconds, sequence = event_id.split("-")
    return int(milliseconds), int(sequence)


class Ledger:
    """Issues and settles tickets, from any process. Each ticket moves in one atomic step; repeating a call is safe.

    With a fence, issuing and settling belong to one leadership and raise Deposed when another orchestrator leads.
    """

    def __init__(self, client: redis.Redis, keys: Keys, fence: fencing.Fence | None = None) -> None:
        self._redis: Any = client  # Any: redis-py types a reply for all client settings at once
        self._keys = keys
        self._reserve = fencing.register(client, scripts.RESERVE, fence)
        self._issue = fencing.register(client, scripts.ISSUE, fence)
        self._settle = fencing.register(client, scripts.SETTLE, fence)
        self._undo = self._redis.register_script(_UNDO)
        self._missing = self._redis.register_script(scripts.MISSING)

    def next_ticket_ids(self, n: int) -> list[str]:
        """`n` ids that nobody else gets. A crash or a lost reply may leave gaps in the count.

        Raises:
          NoEpoch: `Control.ensure_epoch` comes first.
        """
        if n == 0:
            return []
        answer = self._reserve(keys=[self._keys.epoch, self._keys.ticket_count, self._keys.reserved], args=[n])
        if answer is None:
            raise NoEpoch("Redis has no epoch: it is new or was reset; call Control.ensure_epoch first")
        epoch, last = answer
        return [f"{epoch}-{number}" for number in range(last - n + 1, last + 1)]

    def issue(self, tickets: Sequence[Ticket]) -> int:
        """Makes tickets live and puts them in the tasks stream. One that was issued before is left alone.

        Returns the number issued by this call; a Redis that lost its data since the ids were given issues none.

        Raises:
          InvalidGroup: for a malformed ticket; nothing was issued.
          RuntimeError: for an id that `next_ticket_ids` never gave; no ticket of its chunk was issued.
        """
        issued = 0
        encoded = [(ticket.ticket_id, encode_ticket(ticket)) for ticket in tickets]
        keys = [*self._keys.settlement(), self._keys.reserved, self._keys.epoch, self._keys.ticket_count]
        for start in range(0, len(encoded), _CHUNK):
            pairs = [part for pair in encoded[start : start + _CHUNK] for part in pair]
            now_issued, unknown = self._issue(keys=keys, args=[self._keys.group_prefix, *pairs])
            if unknown:
                raise RuntimeError(f"ticket id {unknown.decode()} was never reserved; use next_ticket_ids")
            issued += now_issued
        return issued

    def settle(self, ticket_id: str, outcome: Outcome, *, update: int | None = None, reason: str = "") -> bool:
        """Gives a live ticket its one outcome and removes what is left of it from the streams.

        Returns whether this call did; False also when the first reply was lost and the call retried.
        """
        return self.settle_many([ticket_id], outcome, update=update, reason=reason) == 1

    def settle_many(
        self, ticket_ids: Sequence[str], outcome: Outcome, *, update: int | None = None, reason: str = ""
    ) -> int:
        """`settle` for many. Returns the number settled by this call."""
        settled = 0
        for start in range(0, len(ticket_ids), _CHUNK):
            shared = [self._keys.group_prefix, outcome.value, reason[:200], "" if update is None else update]
            arguments = [*shared, *ticket_ids[start : start + _CHUNK]]
            settled += sum(self._settle(keys=self._keys.settlement(), args=arguments))
        return settled

    def undo(self, ticket_ids: Sequence[str], update: int) -> int:
        """Tickets that ended as trained end as undone: the weights that they trained are abandoned.

        Args:
          update: update count that the learner goes back to.

        Returns the number undone by this call.
        """
        keys = [self._keys.rolled_back, self._keys.ledger, self._keys.counts]
        undone = 0
        for start in range(0, len(ticket_ids), _CHUNK):
            undone += self._undo(keys=keys, args=[update, *ticket_ids[start : start + _CHUNK]])
        return undone

    def live(self) -> dict[str, LiveTicket]:
        """Every pending ticket, as of one moment."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(self._keys.tickets)
            pipe.hgetall(self._keys.task_entries)
            pipe.hgetall(self._keys.group_entries)
            tickets, tasks, groups = pipe.execute()
        live = {}
        for name, payload in tickets.items():
            place = re.fullmatch(rb"(\d+) (\S+) \S+", groups.get(name, b""))
            try:
                ticket = decode_ticket(payload)
            except InvalidGroup as error:  # written by nobody of this package: nothing can be done with it but say so
                _log.warning("the ledger holds what is no ticket as %r: %s", name, error)
                continue
            live[name.decode(errors="replace")] = LiveTicket(
                ticket=ticket,
                state="queued" if place else "issued",
                task_entry=tasks[name].decode(errors="replace") if name in tasks else None,
                partition=int(place[1]) if place else None,
                group_entry=place[2].decode() if place else None,
            )
        return live

    def missing(self) -> list[str]:
        """Live tickets whose entry is gone from its stream: something outside this package trimmed or deleted it."""
        names = [name.decode() for name in self._redis.hkeys(self._keys.tickets)]
        found: list[str] = []
        for start in range(0, len(names), _CHUNK):
            arguments = [self._keys.group_prefix, *names[start : start + _CHUNK]]
            found += [name.decode() for name in self._missing(keys=self._keys.settlement(), args=arguments)]
        return found

    def counts(self) -> dict[str, int]:
        """`issued`, `pending` and each outcome by name. For display: an audit uses `recompute`."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(self._keys.counts)
            pipe.hlen(self._keys.tickets)
            counted, pending = pipe.execute()
        names = ("issued", *(outcome.value for outcome in Outcome))
        found = {name: counted.get(name.encode(), b"0") for name in names}
        return {name: int(count) if _COUNT.fullmatch(count) else 0 for name, count in found.items()} | {
            "pending": pending
        }

    def num_queued(self) -> int:
        """Groups in the group streams: waiting for the learner, pooled by it, or trained and not settled."""
        return int(self._redis.hlen(self._keys.group_entries))

    def duplicates(self) -> int:
        """Groups that came for a ticket already queued or settled: wasted sampling, never trained."""
        return int(self._redis.hget(self._keys.counts, "duplicates") or 0)

    def events(self, after: str = "0-0", count: int = 1000) -> list[LedgerEvent]:
        """At most `count` events after the one with id `after`, oldest first."""
        return [
            LedgerEvent(
                event_id=event_id.decode(),
                kind=fields[b"kind"].decode(),
                ticket_id=fields[b"ticket"].decode(),
                ticket=decode_ticket(fields[b"payload"]) if b"payload" in fields else None,
                outcome=Outcome(fields[b"outcome"].decode()) if b"outcome" in fields else None,
                reason=fields.get(b"reason", b"").decode(),
                update=int(fields[b"update"]) if fields.get(b"update") else None,
            )
            for event_id, fields in self._redis.xrange(self._keys.ledger, min=f"({after}", count=count)
        ]

    def discard_events(self, event_ids: Sequence[str]) -> int:
        """Deletes events that are safe in a file. Returns the number deleted."""
        return int(self._redis.xdel(self._keys.ledger, *event_ids)) if event_ids else 0
