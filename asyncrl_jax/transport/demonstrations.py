"""Demonstrations on disk: an Avro object container that any Avro reader opens.

Actors write what a scripted policy played, `learner/rejection.py` the best of what a run sampled; the learner reads
them.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import fastavro

SCHEMA = fastavro.parse_schema(
    {
        "type": "record",
        "name": "Demonstration",
        "namespace": "asyncrl_jax",
        "fields": [
            {"name": "level", "type": "int"},
            {"name": "tokens", "type": {"type": "array", "items": "int"}},
            {"name": "loss_mask", "type": {"type": "array", "items": "int"}},
            {"name": "success", "type": "boolean"},
            {"name": "weight", "type": "float", "default": 1.0},
        ],
    }
)
# What fastavro raises for bytes that are no such file; to the user they are all one.
_UNREADABLE = (ValueError, LookupError, EOFError, TypeError, OverflowError, fastavro.read.SchemaResolutionError)
_LARGEST_WEIGHT = 100.0
_PREFIX = "asyncrl."  # of our keys in the container's metadata


@dataclasses.dataclass(frozen=True, slots=True)
class Demonstration:
    """One scripted episode, tokens of prompt, policy and environment in the order they were seen."""

    level: int
    tokens: tuple[int, ...]
    loss_mask: tuple[int, ...]  # as long as tokens; 1 exactly where the policy spoke
    success: bool  # it ends with the right answer; demonstrations may be careless on purpose
    weight: float = 1.0  # of its loss; below 0 it is an example of what not to say


@dataclasses.dataclass(frozen=True)
class DemonstrationSet:
    """Demonstrations of one environment, with what they were made from."""

    environment: str  # registered name
    identity: str  # of the environment's tasks, protocol and tokens
    vocab_size: int  # every token is below this
    rows: tuple[Demonstration, ...]


def save_demonstrations(path: str | os.PathLike[str], demonstrations: DemonstrationSet) -> None:
    """Writes the file completely or not at all.

    Raises:
      ValueError: for a row that a reader would refuse.
    """
    for number, row in enumerate(demonstrations.rows):
        _check(row, demonstrations.vocab_size, f"demonstration {number}")
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    facts = {name: str(getattr(demonstrations, name)) for name in ("environment", "identity", "vocab_size")}
    with partial.open("wb") as file:
        records = (dataclasses.asdict(row) for row in demonstrations.rows)
        fastavro.writer(file, SCHEMA, records, metadata={_PREFIX + name: value for name, value in facts.items()})
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)


def read_demonstrations(path: str | os.PathLike[str]) -> DemonstrationSet:
    """Reads and checks what `save_demonstrations` wrote.

    Raises:
      FileNotFoundError: when there is no such file.
      ValueError: when it is no such container, or a row is malformed; the message names the file and the row.
    """
    with open(path, "rb") as file:
        try:
            reader = fastavro.reader(file, reader_schema=SCHEMA)
            facts = {name: reader.metadata[_PREFIX + name] for name in ("environment", "identity", "vocab_size")}
            vocab_size = int(facts["vocab_size"])
            rows = tuple(_rows(reader, vocab_size))
        except _UNREADABLE as error:
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"{os.fspath(path)!r} is not a file of demonstrations: {problem}") from error
    return DemonstrationSet(facts["environment"], facts["identity"], vocab_size, rows)


def _rows(reader: Any, vocab_size: int) -> Iterator[Demonstration]:
    for number, record in enumerate(reader):
        row = Demonstration(
            level=record["level"],
            tokens=tuple(record["tokens"]),
            loss_mask=tuple(record["loss_mask"]),
            success=record["success"],
            weight=record["weight"],
        )
        _check(row, vocab_size, f"row {number}")
        yield row


def _check(row: Demonstration, vocab_size: int, name: str) -> None:
    if len(row.tokens) != len(row.loss_mask):
        raise ValueError(f"{name}: {len(row.tokens)} tokens but {len(row.loss_mask)} mask entries")
    if not set(row.loss_mask) <= {0, 1} or 1 not in row.loss_mask:
        raise ValueError(f"{name}: the loss mask must hold 0 and 1, and at least one 1")
    if not 0 < abs(row.weight) <= _LARGEST_WEIGHT:  # NaN is not
        raise ValueError(f"{name}: weight {row.weight} is not within ±{_LARGEST_WEIGHT:g}, or is 0")
    if min(row.tokens) < 0 or max(row.tokens) >= vocab_size:
        raise ValueError(f"{name}: tokens must be in [0, {vocab_size}), got {min(row.tokens)} to {max(row.tokens)}")
