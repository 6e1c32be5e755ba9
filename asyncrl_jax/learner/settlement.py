"""What happens to trained groups once a checkpoint that holds their training is durable.

Archive, then acknowledge and settle, then trim: killed between any two, the next learner repeats the step with the same
effect, because the archive file is named by the checkpoint and written once, acknowledging twice is one acknowledgement
and a ticket settles once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from pathlib import Path

from asyncrl_jax.config_data import ArchiveConfig
from asyncrl_jax.transport.archive import (
    ArchivedGroup,
    RetiredGroup,
    TrainedBatch,
    read_groups,
    read_ledger_events,
    read_retired,
    write_batches,
    write_groups,
    write_ledger_events,
    write_retired,
)
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.groups import GroupReader
from asyncrl_jax.transport.ledger import Ledger, LedgerEvent
from asyncrl_jax.types import Outcome

from .pool import PooledGroup

EVENTS_PER_READ = 10_000


@dataclasses.dataclass(frozen=True)
class TrainedGroup:
    """A group with no use left, and the updates that used it."""

    pooled: PooledGroup
    updates: tuple[int, ...]  # update counts before each use
    trained_at: float  # unix seconds, of the last use


class Settlement:
    """Turns a durable checkpoint into archived, acknowledged and settled tickets."""

    def __init__(self, archive: Path, reader: GroupReader, ledger: Ledger, control: Control, config: ArchiveConfig):
        self._archive = archive
        self._config = config
        self._reader = reader
        self._ledger = ledger
        self._control = control
        archive.mkdir(parents=True, exist_ok=True)

    def settle(self, *, line: int, update: int, groups: list[TrainedGroup], batches: list[TrainedBatch]) -> None:
        """Archives and settles what the durable checkpoint at `update` of `line` has trained.

        Args:
          groups: with no use left.
          batches: of the updates since the checkpoint before.
        """
        if batches and not (path := self._archive / f"updates-{line:03d}-{update:08d}.avro").exists():
            write_batches(path, batches)
        if groups:
            rows = [_archived(trained, line) for trained in groups]
            path = self._archive / f"groups-{line:03d}-{update:08d}.avro"
            if not path.exists():  # written whole, once: after a kill some of its groups may already be acknowledged
                write_groups(path, rows)
            entries = [(trained.pooled.entry, trained.pooled.ticket_id) for trained in groups]
            self._reader.complete(entries, Outcome.TRAINED, update)
        self._reader.sweep_payloads()
        self._control.trim_redo(update)
        self._archive_events()

    def retain(self, *, update: int, oldest_checkpoint: int) -> list[str]:
        """Drops the oldest groups that the policy lets go. What is left of each is its ticket and its updates.

        A group settled by a later checkpoint than the oldest one kept is never dropped: going back to that checkpoint
        would train on it again.

        Args:
          update: updates done.
          oldest_checkpoint: of those kept.

        Returns:
          Names of the files dropped.
        """
        files = sorted(self._archive.glob("groups-*.avro"), key=_settled_at)
        sizes = {path: path.stat().st_size for path in files}
        total, dropped = sum(sizes.values()), []
        for path in files:
            too_old = self._config.keep_updates and _settled_at(path) <= update - self._config.keep_updates
            too_much = self._config.keep_bytes and total > self._config.keep_bytes
            if _settled_at(path) > oldest_checkpoint or not (too_old or too_much):
                continue
            rows = [RetiredGroup(r.group.ticket.ticket_id, r.line, r.updates) for r in read_groups(path)]
            write_retired(path.with_name(path.name.replace("groups-", "retired-", 1)), rows)
            path.unlink()
            total -= sizes[path]
            dropped.append(path.name)
        return dropped

    def hold(self, *, line: int, update: int, groups: list[TrainedGroup]) -> None:
        """Writes down trained groups whose tickets stay live, in a file that the ledger does not count."""
        if groups:
            path = self._archive / f"held-{line:03d}-{update:08d}.avro"
            write_groups(path, [_archived(trained, line) for trained in groups])

    def undo(self, update: int) -> int:
        """Takes back what was trained from `update` on: those uses, and tickets without another, are undone.

        Archive files of later checkpoints go to `undone/`, whole; of a group that was also used before, the earlier
        uses stay in the archive. Safe to repeat.

        Returns:
          The number of tickets undone.
        """
        for path in sorted(self._archive.glob("groups-*.avro")):
            rows = read_groups(path)
            if all(max(row.updates) < update for row in rows):
                continue
            write_groups(self._archive / "undone" / path.name, rows)
            kept = [
                dataclasses.replace(row, updates=earlier)
                for row in rows
                if (earlier := tuple(use for use in row.updates if use < update))
            ]
            if kept:
                write_groups(path, kept)
            else:
                path.unlink()
        undone = _tickets_in(self._archive / "undone") - _tickets_in(self._archive)
        return self._ledger.undo(sorted(undone), update)

    def record_lost(self, epoch: int, update: int, held: Collection[str]) -> int:
        """After a reset of Redis: writes down as failed what the archive knows as issued and nobody holds any more.

        Tickets issued since the last checkpoint were known to Redis alone and leave no trace here; the learner counts
        a group of such a ticket that it did train from the archived group itself. Safe to repeat: a learner may be
        killed on the way, or later lose groups that it had trained on. Cost: O(archive).

        Args:
          epoch: the new one.
          update: updates done.
          held: tickets that are live, or whose groups the learner has trained on and will settle.

        Returns:
          The number of tickets written down.
        """
        issued: set[str] = set()
        ended = set(held)
        for path in self._archive.glob("ledger-*.avro"):
            for event in read_ledger_events(path):
                (issued if event.outcome is None else ended).add(event.ticket_id)
        for path in self._archive.glob("groups-*.avro"):  # their outcomes may have been lost on the way to a file
            ended.update(row.group.ticket.ticket_id for row in read_groups(path))
        for path in self._archive.glob("retired-*.avro"):
            ended.update(row.ticket_id for row in read_retired(path))
        lost = sorted(issued - ended)
        if lost:
            path = self._archive / f"ledger-lost-{epoch:04d}.avro"
            before = read_ledger_events(path) if path.exists() else []
            now = int(time.time() * 1000)
            events = [
                LedgerEvent(f"{now}-{n}", "outcome", ticket_id, None, Outcome.FAILED, "lost_with_redis", update)
                for n, ticket_id in enumerate(lost)
            ]
            write_ledger_events(path, [*before, *events])
        return len(lost)

    def _archive_events(self) -> None:
        """Moves the ledger's events from Redis to files, so that Redis holds only what is live."""
        # Named by the first event: the same name again means that it was not discarded, so nothing is overwritten.
        while events := self._ledger.events(count=EVENTS_PER_READ):
            write_ledger_events(self._archive / f"ledger-{events[0].event_id}.avro", events)
            self._ledger.discard_events([event.event_id for event in events])


def _settled_at(path: Path) -> int:
    """Update count of the checkpoint that a file of groups is named for."""
    return int(path.stem.rsplit("-", 1)[1])


def _archived(trained: TrainedGroup, line: int) -> ArchivedGroup:
    return ArchivedGroup(
        group=trained.pooled.group,
        dequeued_at=trained.pooled.dequeued_at,
        trained_at=trained.trained_at,
        line=line,
        updates=trained.updates,
    )


def _tickets_in(directory: Path) -> set[str]:
    """Tickets of the groups in the files of a directory."""
    return {row.group.ticket.ticket_id for path in directory.glob("groups-*.avro") for row in read_groups(path)}
