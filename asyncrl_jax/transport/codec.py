"""Groups and tickets as Avro records, in single-object encoding on the wire; `archive.py` puts them into files.

Nothing read from the wire is trusted: sizes, lengths, dtypes, ranges and finiteness are checked when a group is written
and again when it is read, and what fails raises `InvalidGroup` with a short, stable reason.

Dimensions: T tokens of one trajectory, G trajectories, S tokens of the whole group, P reward parts.
"""

from __future__ import annotations

import dataclasses
import io
import math
import re
from typing import Any

import fastavro
import numpy as np

from asyncrl_jax.config import Config
from asyncrl_jax.transport import schema
from asyncrl_jax.types import REWARD_PARTS, FinishReason, Group, Task, Ticket, Trajectory

_MARKER = b"\xc3\x01"
_HEADER_BYTES = 10
_LOGPROB_SLACK = 1e-5  # float32 log-softmax of a near-certain token may round to just above 0
_LATEST = 1e12  # unix seconds; differences of times within it stay far from what a float can hold
_LARGEST_REWARD = 1e30  # fits float32, in which advantages are trained
_TICKET_ID = re.compile(r"[0-9]{1,12}-[0-9]{1,15}")
_FINISH_REASONS = tuple(FinishReason)  # the wire holds positions in it; new reasons join at the end

# dtype of each per-token and per-trajectory column on the wire.
_TOKEN_COLUMNS = {"tokens": "<i4", "loss_mask": "u1", "behaviour_logprobs": "<f4", "policy_versions": "<i4"}
_TRAJECTORY_COLUMNS = {
    "rewards": "<f8",
    "successes": "u1",
    "finish_reasons": "u1",
    "num_turns": "<i4",
    "sampling_started_at": "<f8",
    "sampling_ended_at": "<f8",
}


class InvalidGroup(ValueError):
    """A group or ticket that must not be used.

    Attributes:
      reason: short stable name of what is wrong, used in counts and dead letters.
      detail: the value that is wrong.
      ticket_id: of the ticket, when it could be read.
    """

    def __init__(self, reason: str, detail: str, ticket_id: str | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.ticket_id = ticket_id


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a group may hold at most."""

    max_message_bytes: int
    max_tokens: int  # of one trajectory
    vocab_size: int
    max_group_size: int

    @classmethod
    def from_config(cls, config: Config) -> Limits:
        """The limits that a run's settings imply, the same for actors and the learner."""
        return cls(
            max_message_bytes=config.redis.max_message_bytes,
            max_tokens=config.environment.max_tokens,
            vocab_size=config.model.vocab_size,
            max_group_size=config.learner.group_size,
        )


# For files this run wrote itself: structure is still checked, sizes are the machine's.
UNLIMITED = Limits(max_message_bytes=2**62, max_tokens=2**31 - 1, vocab_size=2**31 - 1, max_group_size=2**31 - 1)


# --- Wire ---


def encode_ticket(ticket: Ticket) -> bytes:
    """One ticket in single-object encoding.

    Raises:
      InvalidGroup: reason "bad_ticket".
    """
    _check_ticket(ticket, UNLIMITED)
    return _encode("ticket", schema.TICKET, ticket_record(ticket))


def decode_ticket(data: bytes) -> Ticket:
    """The ticket that `encode_ticket` wrote.

    Raises:
      InvalidGroup: reasons "bad_ticket", "unknown_schema", "undecodable".
    """
    ticket = ticket_from(_decode("ticket", data))
    _check_ticket(ticket, UNLIMITED)
    return ticket


def encode_group(group: Group, limits: Limits) -> bytes:
    """One group in single-object encoding.

    Raises:
      InvalidGroup: whatever `validate_group` refuses, and "too_large".
    """
    validate_group(group, limits)
    data = _encode("group", schema.GROUP, group_record(group))
    if len(data) > limits.max_message_bytes:
        raise InvalidGroup("too_large", f"{len(data)} bytes, limit {limits.max_message_bytes}", group.ticket.ticket_id)
    return data


def decode_group(data: bytes, limits: Limits) -> Group:
    """The group that `encode_group` wrote; its arrays are read-only views of one buffer.

    Raises:
      InvalidGroup: for bytes that are not a valid group within `limits`.
    """
    if len(data) > limits.max_message_bytes:
        raise InvalidGroup("too_large", f"{len(data)} bytes, limit {limits.max_message_bytes}")
    return group_from(_decode("group", data), limits)


def _encode(kind: str, writer: Any, record: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    buffer.write(_MARKER + next(name for name, known in schema.READABLE[kind].items() if known is writer))
    fastavro.schemaless_writer(buffer, writer, record)
    return buffer.getvalue()


def _decode(kind: str, data: bytes) -> dict[str, Any]:
    current = {"ticket": schema.TICKET, "group": schema.GROUP}[kind]
    writer = schema.READABLE[kind].get(bytes(data[2:_HEADER_BYTES]))
    if data[:2] != _MARKER or writer is None:
        raise InvalidGroup("unknown_schema", f"message starts with {bytes(data[:_HEADER_BYTES]).hex()}")
    buffer = io.BytesIO(data)
    buffer.seek(_HEADER_BYTES)
    try:
        record = fastavro.schemaless_reader(buffer, writer, None if writer is current else current)
    except Exception as error:  # hostile bytes make fastavro raise almost anything; all of it means the same
        raise InvalidGroup("undecodable", f"{type(error).__name__}: {error}") from error
    if buffer.tell() != len(data):
        raise InvalidGroup("trailing_bytes", f"{len(data) - buffer.tell()} bytes after the message")
    assert isinstance(record, dict)
    return record


# --- Records ---


def ticket_record(ticket: Ticket) -> dict[str, Any]:
    """The ticket as a record of `schema.TICKET`."""
    record = {field.name: getattr(ticket, field.name) for field in dataclasses.fields(ticket)}
    task = record.pop("task")
    return record | {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}


def ticket_from(record: dict[str, Any]) -> Ticket:
    """The ticket of a record, unchecked."""
    record = dict(record)
    task = Task(**{field.name: record.pop(field.name) for field in dataclasses.fields(Task)})
    return Ticket(task=task, **record)


def group_record(group: Group) -> dict[str, Any]:
    """The group as a record of `schema.GROUP`."""
    members = group.trajectories

    def column(values: list[Any], dtype: str) -> bytes:
        return np.array(values, dtype).tobytes()

    record: dict[str, Any] = {
        name: np.concatenate([getattr(member, name) for member in members]).astype(dtype, copy=False).tobytes()
        for name, dtype in _TOKEN_COLUMNS.items()
    }
    return record | {
        "ticket": ticket_record(group.ticket),
        "actor_id": group.actor_id,
        "partial": group.partial,
        "enqueued_at": group.enqueued_at,
        "lengths": column([len(member.tokens) for member in members], "<i4"),
        "rewards": column([member.reward for member in members], "<f8"),
        "reward_parts": np.stack([member.reward_parts for member in members]).astype("<f4", copy=False).tobytes(),
        "successes": column([member.success for member in members], "u1"),
        "finish_reasons": column([_FINISH_REASONS.index(member.finish_reason) for member in members], "u1"),
        "num_turns": column([member.num_turns for member in members], "<i4"),
        "sampling_started_at": column([member.sampling_started_at for member in members], "<f8"),
        "sampling_ended_at": column([member.sampling_ended_at for member in members], "<f8"),
    }


def group_from(record: dict[str, Any], limits: Limits) -> Group:
    """The group of a record, checked as `validate_group` does."""
    ticket = ticket_from(record["ticket"])
    _check_ticket(ticket, limits)
    lengths_G = _column(record, "lengths", "<i4", None, ticket)
    num_members = len(lengths_G)
    _check_size(ticket, num_members, record["partial"])
    _check_lengths(lengths_G, limits, ticket)
    ends_G = np.cumsum(lengths_G, dtype=np.int64)
    columns = {name: _column(record, name, dtype, int(ends_G[-1]), ticket) for name, dtype in _TOKEN_COLUMNS.items()}
    columns |= {name: _column(record, name, dtype, num_members, ticket) for name, dtype in _TRAJECTORY_COLUMNS.items()}
    parts = _column(record, "reward_parts", "<f4", num_members * len(REWARD_PARTS), ticket)
    columns["reward_parts"] = parts.reshape(num_members, len(REWARD_PARTS))
    _check_values(columns, limits, ticket)
    starts_G = ends_G - lengths_G
    trajectories = tuple(
        Trajectory(
            **{name: columns[name][start:end] for name in _TOKEN_COLUMNS},
            reward=float(columns["rewards"][g]),
            reward_parts=columns["reward_parts"][g],
            success=bool(columns["successes"][g]),
            finish_reason=_FINISH_REASONS[columns["finish_reasons"][g]],
            num_turns=int(columns["num_turns"][g]),
            sampling_started_at=float(columns["sampling_started_at"][g]),
            sampling_ended_at=float(columns["sampling_ended_at"][g]),
        )
        for g, (start, end) in enumerate(zip(starts_G, ends_G, strict=True))
    )
    group = Group(ticket, trajectories, record["actor_id"], record["partial"], record["enqueued_at"])
    _check_envelope(group)
    return group


def _column(record: dict[str, Any], name: str, dtype: str, length: int | None, ticket: Ticket) -> np.ndarray:
    """A column of the record as an array, of exactly `length` values unless that is None."""
    data = record[name]
    itemsize = np.dtype(dtype).itemsize
    if len(data) % itemsize or (length is not None and len(data) != length * itemsize):
        expected = f"a multiple of {itemsize}" if length is None else length * itemsize
        raise InvalidGroup("length_mismatch", f"{name} has {len(data)} bytes, expected {expected}", ticket.ticket_id)
    return np.frombuffer(data, dtype)


# --- Validation ---


def validate_group(group: Group, limits: Limits) -> None:
    """Checks everything a group states about itself.

    Raises:
      InvalidGroup: with the reason; the first thing wrong is named.
    """
    ticket = group.ticket
    _check_ticket(ticket, limits)
    _check_size(ticket, len(group.trajectories), group.partial)
    for g, member in enumerate(group.trajectories):
        _check_structure(member, f"trajectory {g}", ticket)
    lengths_G = np.array([len(member.tokens) for member in group.trajectories], np.int64)
    _check_lengths(lengths_G, limits, ticket)
    columns = {name: np.concatenate([getattr(m, name) for m in group.trajectories]) for name in _TOKEN_COLUMNS}
    for name, attribute in (("rewards", "reward"), ("successes", "success")):
        columns[name] = np.array([getattr(member, attribute) for member in group.trajectories])
    columns["finish_reasons"] = np.array([_FINISH_REASONS.index(m.finish_reason) for m in group.trajectories])
    for name in ("num_turns", "sampling_started_at", "sampling_ended_at", "reward_parts"):
        columns[name] = np.array([getattr(member, name) for member in group.trajectories])
    _check_values(columns, limits, ticket)
    _check_envelope(group)


def _require(ok: bool, reason: str, detail: str, ticket: Ticket) -> None:
    if not ok:
        raise InvalidGroup(reason, detail, ticket.ticket_id)


def _check_ticket(ticket: Ticket, limits: Limits) -> None:
    if not (isinstance(ticket.ticket_id, str) and _TICKET_ID.fullmatch(ticket.ticket_id)):
        raise InvalidGroup("bad_ticket", f"ticket_id {str(ticket.ticket_id)[:40]!r} is not '<epoch>-<count>'")
    numbers = {
        "level": (ticket.task.level, 0, 2**31),
        "index": (ticket.task.index, 0, 2**63),
        "group_size": (ticket.group_size, 1, 2**31),
        "line": (ticket.line, 0, 2**31),
        "min_update": (ticket.min_update, 0, 2**63),
        "deadline": (ticket.deadline, ticket.min_update, 2**63),
        "seed": (ticket.seed, -(2**63), 2**63),
    }
    for name, (value, low, high) in numbers.items():
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        _require(whole and low <= value < high, "bad_ticket", f"{name}={value}", ticket)
    _require(isinstance(ticket.task.environment, str), "bad_ticket", "environment is no string", ticket)
    _require(ticket.task.split in ("train", "heldout"), "bad_ticket", f"split={ticket.task.split!r:.40}", ticket)
    ok = math.isfinite(ticket.temperature) and ticket.temperature > 0
    _require(ok, "bad_ticket", f"temperature={ticket.temperature}", ticket)
    _require(math.isfinite(ticket.issued_at), "bad_ticket", f"issued_at={ticket.issued_at}", ticket)
    ok = ticket.group_size <= limits.max_group_size
    _require(ok, "group_too_large", f"group_size {ticket.group_size}, limit {limits.max_group_size}", ticket)


def _check_size(ticket: Ticket, num_members: int, partial: bool) -> None:
    _require(num_members > 0, "empty_group", "no trajectories", ticket)
    ok = num_members == ticket.group_size or (partial and num_members < ticket.group_size)
    _require(
        ok, "group_size_mismatch", f"{num_members} trajectories, {ticket.group_size} asked for, {partial=}", ticket
    )


def _check_lengths(lengths_G: np.ndarray, limits: Limits, ticket: Ticket) -> None:
    _require(bool(lengths_G.min() > 0), "empty_trajectory", f"length {lengths_G.min()}", ticket)
    ok = bool(lengths_G.max() <= limits.max_tokens)
    _require(ok, "too_many_tokens", f"{lengths_G.max()} tokens, limit {limits.max_tokens}", ticket)


def _check_structure(member: Trajectory, where: str, ticket: Ticket) -> None:
    """Types, dtypes and shapes of one trajectory that was made here; on the wire the schema fixes them."""
    for name, dtype in (_TOKEN_COLUMNS | {"reward_parts": "<f4"}).items():
        array = getattr(member, name)
        ok = isinstance(array, np.ndarray) and array.dtype == np.dtype(dtype)
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        _require(ok, "bad_dtype", f"{where}: {name} is {kind}, not {np.dtype(dtype)}", ticket)
        _require(array.ndim == 1, "bad_shape", f"{where}: {name} has shape {array.shape}", ticket)
    for name in _TOKEN_COLUMNS:
        ok = len(getattr(member, name)) == len(member.tokens)
        found = f"{where}: {name} has {len(getattr(member, name))} values, tokens {len(member.tokens)}"
        _require(ok, "length_mismatch", found, ticket)
    ok = len(member.reward_parts) == len(REWARD_PARTS)
    _require(ok, "bad_reward_parts", f"{where}: {len(member.reward_parts)} parts, not {len(REWARD_PARTS)}", ticket)
    kinds = {"reward": (int, float, np.floating), "success": (bool, np.bool_), "num_turns": (int, np.integer)}
    kinds |= {"sampling_started_at": (int, float), "sampling_ended_at": (int, float)}
    for name, kind in kinds.items():
        value = getattr(member, name)
        _require(isinstance(value, kind), "bad_dtype", f"{where}: {name} is {value!r:.40}", ticket)
    ok = isinstance(member.finish_reason, FinishReason)
    _require(ok, "bad_finish_reason", f"{where}: {member.finish_reason!r}", ticket)


def _check_values(columns: dict[str, np.ndarray], limits: Limits, ticket: Ticket) -> None:
    """Ranges and finiteness of all columns of a group, whose lengths already agree."""

    def require_all(ok_N: Any, reason: str, name: str) -> None:
        if not ok_N.all():
            at = int(np.argmin(ok_N))
            raise InvalidGroup(reason, f"{name}[{at}] of the group is {columns[name][at]}", ticket.ticket_id)

    tokens_S, mask_S = columns["tokens"], columns["loss_mask"]
    logprobs_S, versions_S = columns["behaviour_logprobs"], columns["policy_versions"]
    require_all((tokens_S >= 0) & (tokens_S < limits.vocab_size), "token_out_of_range", "tokens")
    require_all(mask_S <= 1, "bad_mask", "loss_mask")
    sampled_S = mask_S == 1
    require_all(np.isfinite(logprobs_S), "non_finite_logprob", "behaviour_logprobs")
    require_all(logprobs_S <= _LOGPROB_SLACK, "positive_logprob", "behaviour_logprobs")
    require_all(sampled_S | (logprobs_S == 0), "unsampled_logprob", "behaviour_logprobs")
    require_all(np.where(sampled_S, versions_S >= 0, versions_S == -1), "bad_version", "policy_versions")
    require_all(np.isfinite(columns["rewards"]), "non_finite_reward", "rewards")
    require_all(np.abs(columns["rewards"]) <= _LARGEST_REWARD, "reward_out_of_range", "rewards")
    parts_GP = columns["reward_parts"]
    require_all(((parts_GP >= 0) & (parts_GP <= 1)).all(axis=1), "bad_reward_parts", "reward_parts")  # NaN fails both
    require_all(columns["successes"] <= 1, "bad_success", "successes")
    require_all(columns["finish_reasons"] < len(_FINISH_REASONS), "bad_finish_reason", "finish_reasons")
    require_all(columns["num_turns"] >= 0, "bad_num_turns", "num_turns")
    for name in ("sampling_started_at", "sampling_ended_at"):  # their order is not checked: clocks are set back
        require_all(np.abs(columns[name]) <= _LATEST, "bad_time", name)  # NaN fails


def _check_envelope(group: Group) -> None:
    _require(isinstance(group.actor_id, str), "bad_actor", f"actor_id {group.actor_id!r:.40}", group.ticket)
    _require(abs(group.enqueued_at) <= _LATEST, "bad_time", f"enqueued_at={group.enqueued_at}", group.ticket)
