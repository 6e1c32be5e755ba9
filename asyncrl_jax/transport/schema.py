"""Avro schemas of the wire and of the archive.

A group is columnar: one field holds one quantity of the whole group, as little-endian bytes. Dimensions: G
trajectories, S tokens of all of them, P reward parts. Trajectory g owns `lengths[g]` of the S tokens, in order.

A schema that was ever used stays readable: when it changes, the old one joins `READABLE`, and every new field has a
default.
"""

from __future__ import annotations

from typing import Any

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form


def _fields(**types: Any) -> list[dict[str, Any]]:
    return [{"name": name, "type": kind} for name, kind in types.items()]


_TICKET = {
    "type": "record",
    "name": "Ticket",
    "namespace": "asyncrl_jax",
    "fields": _fields(
        ticket_id="string",
        environment="string",
        split="string",
        level="int",
        index="long",
        group_size="int",
        line="int",
        min_update="long",
        deadline="long",
        temperature="double",
        seed="long",
        issued_at="double",
    ),
}

_GROUP: dict[str, Any] = {
    "type": "record",
    "name": "Group",
    "namespace": "asyncrl_jax",
    "fields": [
        *_fields(
            ticket=_TICKET,
            actor_id="string",
            lengths="bytes",  # int32 [G]
            tokens="bytes",  # int32 [S]
            loss_mask="bytes",  # uint8 [S]
            behaviour_logprobs="bytes",  # float32 [S]
            policy_versions="bytes",  # int32 [S]
            rewards="bytes",  # float64 [G]
            reward_parts="bytes",  # float32 [G, P]
            successes="bytes",  # uint8 [G]
            finish_reasons="bytes",  # uint8 [G]; position in types.FinishReason
            num_turns="bytes",  # int32 [G]
            sampling_started_at="bytes",  # float64 [G]
            sampling_ended_at="bytes",  # float64 [G]
        ),
        {"name": "partial", "type": "boolean", "default": False},
        {"name": "enqueued_at", "type": "double", "default": 0.0},
        # Of a process reward model; all three empty without one.
        {"name": "num_steps", "type": "bytes", "default": ""},  # int32 [G]
        {"name": "step_scores", "type": "bytes", "default": ""},  # float32 [sum of num_steps]
        {"name": "step_ends", "type": "bytes", "default": ""},  # int32 [the same]
        # Of exploration; both empty where every member was sampled as the ticket says.
        {"name": "temperatures", "type": "bytes", "default": ""},  # float32 [G]; 0 where it is the ticket's
        {"name": "explored", "type": "bytes", "default": ""},  # uint8 [G]; 0, or 1 + position in types.Exploration
    ],
}

# As it was before steps were scored and members could differ from their ticket.
_ADDED = ("num_steps", "step_scores", "step_ends", "temperatures", "explored")
_FIRST_GROUP = {**_GROUP, "fields": [field for field in _GROUP["fields"] if field["name"] not in _ADDED]}

_ARCHIVED = {
    "type": "record",
    "name": "ArchivedGroup",
    "namespace": "asyncrl_jax",
    "fields": [
        *_fields(
            group=_GROUP,
            dequeued_at="double",
            trained_at="double",
            line="int",
            updates={"type": "array", "items": "long"},
        ),
        # For whoever asks the archive with SQL: what else would have to be computed from the bytes of the group.
        {"name": "reward_mean", "type": "double", "default": 0.0},
        {"name": "success_share", "type": "double", "default": 0.0},
        {"name": "num_tokens", "type": "long", "default": 0},
        {"name": "num_sampled_tokens", "type": "long", "default": 0},
        {"name": "oldest_version", "type": "int", "default": -1},
        {"name": "newest_version", "type": "int", "default": -1},
    ],
}

_TRAINED_BATCH = {
    "type": "record",
    "name": "TrainedBatch",
    "namespace": "asyncrl_jax",
    "fields": [
        *_fields(
            line="int",
            update="long",
            seed="long",
            tickets={"type": "array", "items": "string"},
            weights={"type": "array", "items": "double"},
        ),
        {"name": "lr_scale", "type": "double", "default": 1.0},
    ],
}

# What is left of an archived group when its tokens are dropped: enough for the ledger.
_RETIRED = {
    "type": "record",
    "name": "RetiredGroup",
    "namespace": "asyncrl_jax",
    "fields": _fields(ticket_id="string", line="int", updates={"type": "array", "items": "long"}),
}

_LEDGER_EVENT = {
    "type": "record",
    "name": "LedgerEvent",
    "namespace": "asyncrl_jax",
    "fields": _fields(
        event_id="string",
        kind="string",
        ticket_id="string",
        ticket=["null", _TICKET],
        outcome=["null", "string"],
        reason="string",
        update=["null", "long"],
    ),
}

TICKET = fastavro.parse_schema(_TICKET)
GROUP = fastavro.parse_schema(_GROUP)
FIRST_GROUP = fastavro.parse_schema(_FIRST_GROUP)
ARCHIVED = fastavro.parse_schema(_ARCHIVED)
LEDGER_EVENT = fastavro.parse_schema(_LEDGER_EVENT)
TRAINED_BATCH = fastavro.parse_schema(_TRAINED_BATCH)
RETIRED = fastavro.parse_schema(_RETIRED)


def without_defaults(schema: Any) -> Any:
    """The schema to write files with: only a reader needs defaults, and Polars refuses files whose schema has them."""
    if isinstance(schema, list):
        return [without_defaults(part) for part in schema]
    if isinstance(schema, dict):
        return {key: without_defaults(value) for key, value in schema.items() if key != "default"}
    return schema


def fingerprint_of(schema: Any) -> bytes:
    """The 8 bytes that name a schema in single-object encoding: CRC-64-AVRO of its canonical form, little-endian."""
    return bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO"))


# Writers' schemas that a reader of each message understands, by fingerprint.
READABLE: dict[str, dict[bytes, Any]] = {
    "ticket": {fingerprint_of(TICKET): TICKET},
    "group": {fingerprint_of(schema): schema for schema in (GROUP, FIRST_GROUP)},
}
