"""What a run keeps of its groups and of its ledger: Avro object containers that any Avro reader opens."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import fastavro
import numpy as np

from asyncrl_jax.transport import schema
from asyncrl_jax.transport.codec import UNLIMITED, group_from, group_record, ticket_from, ticket_record, validate_group
from asyncrl_jax.transport.ledger import LedgerEvent
from asyncrl_jax.types import Group, Outcome


@dataclasses.dataclass(frozen=True)
class ArchivedGroup:
    """A trained group with its history, one row of an archive file."""

    group: Group
    dequeued_at: float  # unix seconds
    trained_at: float  # unix seconds, of the last use
    line: int  # of the weights that it trained
    updates: tuple[int, ...]  # update count before each use


@dataclasses.dataclass(frozen=True)
class TrainedBatch:
    """What one update trained on, in order: with the groups and the first weights it makes the update again."""

    line: int  # of the weights that were updated
    update: int  # updates done before
    seed: int  # of everything random in the update
    tickets: tuple[str, ...]
    weights: tuple[float, ...]  # of each group's policy gradient, see learner/strata.py
    lr_scale: float = 1.0  # factor on the learning rate


@dataclasses.dataclass(frozen=True)
class RetiredGroup:
    """What is kept of a group whose tokens the archive has dropped."""

    ticket_id: str
    line: int
    updates: tuple[int, ...]


def write_groups(path: str | os.PathLike[str], rows: Iterable[ArchivedGroup]) -> None:
    """Writes a file that is complete or absent, whatever is killed.

    Raises:
      InvalidGroup: for a group of the wrong structure; nothing is left at `path`.
    """
    records = []
    for row in rows:
        validate_group(row.group, UNLIMITED)
        records.append(
            {**vars(row), "group": group_record(row.group), "updates": list(row.updates), **_columns(row.group)}
        )
    write_container(path, schema.ARCHIVED, records)


def _columns(group: Group) -> dict[str, float]:
    """Figures of a group that stand beside its bytes in the archive."""
    members = group.trajectories
    sampled = [int(v) for t in members for v in np.unique(t.policy_versions[t.loss_mask.astype(bool)])]
    return {
        "reward_mean": float(np.mean([t.reward for t in members])),
        "success_share": float(np.mean([t.success for t in members])),
        "num_tokens": group.num_tokens,
        "num_sampled_tokens": sum(int(t.loss_mask.sum()) for t in members),
        "oldest_version": min(sampled, default=-1),
        "newest_version": max(sampled, default=-1),
    }


def read_groups(path: str | os.PathLike[str]) -> list[ArchivedGroup]:
    """The rows that `write_groups` wrote, by this or an older schema.

    Raises:
      InvalidGroup: for a row of the wrong structure.
      ValueError: for a file that is no Avro object container.
    """
    return [
        ArchivedGroup(
            group=group_from(row["group"], UNLIMITED),
            dequeued_at=row["dequeued_at"],
            trained_at=row["trained_at"],
            line=row["line"],
            updates=tuple(row["updates"]),
        )
        for row in _read_container(path, schema.ARCHIVED)
    ]


def write_batches(path: str | os.PathLike[str], batches: Iterable[TrainedBatch]) -> None:
    """Writes a file that is complete or absent, whatever is killed."""
    records = [{**vars(batch), "tickets": list(batch.tickets), "weights": list(batch.weights)} for batch in batches]
    write_container(path, schema.TRAINED_BATCH, records)


def read_batches(path: str | os.PathLike[str]) -> list[TrainedBatch]:
    """The batches that `write_batches` wrote.

    Raises:
      ValueError: for a file that is no Avro object container.
    """
    return [
        TrainedBatch(**(row | {"tickets": tuple(row["tickets"]), "weights": tuple(row["weights"])}))
        for row in _read_container(path, schema.TRAINED_BATCH)
    ]


def write_retired(path: str | os.PathLike[str], rows: Iterable[RetiredGroup]) -> None:
    """Writes a file that is complete or absent, whatever is killed."""
    write_container(path, schema.RETIRED, [{**vars(row), "updates": list(row.updates)} for row in rows])


def read_retired(path: str | os.PathLike[str]) -> list[RetiredGroup]:
    """The rows that `write_retired` wrote.

    Raises:
      ValueError: for a file that is no Avro object container.
    """
    return [RetiredGroup(**(row | {"updates": tuple(row["updates"])})) for row in _read_container(path, schema.RETIRED)]


def write_ledger_events(path: str | os.PathLike[str], events: Iterable[LedgerEvent]) -> None:
    """Writes a file that is complete or absent, whatever is killed."""
    records = [
        {
            "event_id": event.event_id,
            "kind": event.kind,
            "ticket_id": event.ticket_id,
            "ticket": ticket_record(event.ticket) if event.ticket else None,
            "outcome": event.outcome.value if event.outcome else None,
            "reason": event.reason,
            "update": event.update,
        }
        for event in events
    ]
    write_container(path, schema.LEDGER_EVENT, records)


def read_ledger_events(path: str | os.PathLike[str]) -> list[LedgerEvent]:
    """The events that `write_ledger_events` wrote.

    Raises:
      ValueError: for a file that is no Avro object container.
    """
    return [
        LedgerEvent(
            **row
            | {
                "ticket": ticket_from(row["ticket"]) if row["ticket"] else None,
                "outcome": Outcome(row["outcome"]) if row["outcome"] else None,
            }
        )
        for row in _read_container(path, schema.LEDGER_EVENT)
    ]


def write_container(
    path: str | os.PathLike[str],
    writer_schema: Any,
    records: Iterable[dict[str, Any]],
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes an Avro object container: beside its place, to the disk, then into place."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    with open(unfinished, "wb") as file:
        plain = fastavro.parse_schema(schema.without_defaults(writer_schema))
        fastavro.writer(file, plain, records, codec="deflate", metadata=metadata)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # makes the rename itself durable
    finally:
        os.close(directory)


def _read_container(path: str | os.PathLike[str], reader_schema: Any) -> list[dict[str, Any]]:
    with open(path, "rb") as file:
        try:
            rows: Iterable[Any] = fastavro.reader(file, reader_schema=reader_schema)
            return list(rows)
        except Exception as error:  # damaged bytes make fastavro and zlib raise almost anything
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
