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
import struct
from typing import Any

import fastavro
import numpy as np

from asyncrl_jax.config import Config
from asyncrl_jax.transport import schema
from asyncrl_jax.transport.explored import EXPLORED_COLUMNS, explored_columns, split_explored
from asyncrl_jax.transport.scored_steps import STEP_COLUMNS, BadColumn, split_steps, step_columns
from asyncrl_jax.types import REWARD_PARTS, FinishReason, Group, Task, Ticket, Trajectory

_MARKER = b"\xc3\x01"
_HEADER_BYTES = 10
# Fingerprints of the schemas that are written.
_NAMES = {"ticket": schema.fingerprint_of(schema.TICKET), "group": schema.fingerprint_of(schema.GROUP)}
_LOGPROB_SLACK = 1e-5  # float32 log-softmax of a near-certain token may round to just above 0
_LATEST = 1e12  # unix seconds; differences of times within it stay far from what a float can hold
_LARGEST_REWARD = 1e30  # fits float32, in which advantages are trained
_TICKET_ID = re.compile(r"[0-9]{1,12}-[0-9]{1,15}")
_FINISH_REASONS = tuple(FinishReason)  # the wire holds positions in it; new reasons join at the end
_POSITIONS = {reason: position for position, reason in enumerate(_FINISH_REASONS)}
_TASK_FIELDS = tuple(field.name for field in dataclasses.fields(Task))
_TICKET_FIELDS = tuple(field.name for field in dataclasses.fields(Ticket) if field.name != "task")

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
_COLUMNS = (  # in the order of the schema
    "lengths",
    *_TOKEN_COLUMNS,
    "rewards",
    "reward_parts",
    *[name for name in _TRAJECTORY_COLUMNS if name != "rewards"],
)
_ADDED_COLUMNS = STEP_COLUMNS | EXPLORED_COLUMNS  # behind the envelope, in the order of the schema
_ENVELOPE = struct.Struct("<?d")  # partial, enqueued_at
_RANGES = {
    "rewards": (-_LARGEST_REWARD, _LARGEST_REWARD, "reward_out_of_range"),
    "successes": (0, 1, "bad_success"),
    "finish_reasons": (0, len(_FINISH_REASONS) - 1, "bad_finish_reason"),
    "num_turns": (0, 2**31 - 1, "bad_num_turns"),
    "sampling_started_at": (-_LATEST, _LATEST, "bad_time"),
    "sampling_ended_at": (-_LATEST, _LATEST, "bad_time"),
}
# What a trajectory must hold before it is sent.
_ARRAY_DTYPES = {name: np.dtype(kind) for name, kind in (_TOKEN_COLUMNS | {"reward_parts": "<f4"}).items()}
_SCALAR_KINDS: dict[str, tuple[type, ...]] = {
    "reward": (int, float, np.floating),
    "success": (bool, np.bool_),
    "num_turns": (int, np.integer),
    "sampling_started_at": (int, float),
    "sampling_ended_at": (int, float),
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
    return _MARKER + _NAMES["ticket"] + _body(schema.TICKET, ticket_record(ticket))


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
    columns = _checked_columns(group, limits)
    actor_id = group.actor_id.encode()
    # What fastavro writes for `schema.GROUP`, with one copy of each column: strings and bytes follow their length.
    parts: list[Any] = [_MARKER, _NAMES["group"], _body(schema.TICKET, ticket_record(group.ticket))]
    parts += (_varint(len(actor_id)), actor_id)
    for name in _COLUMNS:
        parts += (_varint(columns[name].nbytes), columns[name].data)
    parts.append(_ENVELOPE.pack(group.partial, group.enqueued_at))
    for name in _ADDED_COLUMNS:  # often all empty
        parts += (_varint(columns[name].nbytes), columns[name].data)
    data = b"".join(parts)
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


def _body(writer: Any, record: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, writer, record)
    return buffer.getvalue()


def _varint(length: int) -> bytes:
    """Avro's long: zigzag, then seven bits a byte, the lowest first."""
    value, encoded = length << 1, bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


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
    record = {name: getattr(ticket, name) for name in _TICKET_FIELDS}
    return record | {name: getattr(ticket.task, name) for name in _TASK_FIELDS}


def ticket_from(record: dict[str, Any]) -> Ticket:
    """The ticket of a record, unchecked."""
    task = Task(*[record[name] for name in _TASK_FIELDS])
    return Ticket(task=task, **{name: record[name] for name in _TICKET_FIELDS})


def group_record(group: Group) -> dict[str, Any]:
    """The group as a record of `schema.GROUP`.

    Raises:
      InvalidGroup: for a group whose arrays and values are not of the wire's types.
    """
    record: dict[str, Any] = {name: column.tobytes() for name, column in _columns(group).items()}
    record["ticket"] = ticket_record(group.ticket)
    record["actor_id"] = group.actor_id
    record["partial"] = group.partial
    record["enqueued_at"] = group.enqueued_at
    return record


def _columns(group: Group) -> dict[str, np.ndarray]:
    """Every column of the group, with its dtype on the wire. Nothing is cast and nothing guessed.

    Raises:
      InvalidGroup: as `_check_structure`, which is asked only when something does not fit.
    """
    members = group.trajectories
    try:
        columns = {
            name: np.concatenate([getattr(member, name) for member in members], dtype=dtype, casting="no")
            for name, dtype in _TOKEN_COLUMNS.items()
        }
        lengths = [len(member.tokens) for member in members]
        fits = all(
            [len(getattr(member, name)) for member in members] == lengths and columns[name].ndim == 1
            for name in _TOKEN_COLUMNS
        )
        parts_GP = np.stack([member.reward_parts for member in members], dtype="<f4", casting="no")
        columns["lengths"] = np.array(lengths, "<i4")
        columns["rewards"] = np.array([member.reward for member in members], "<f8")
        columns["reward_parts"] = parts_GP
        columns["successes"] = np.array([member.success for member in members], "?").view("u1")
        columns["finish_reasons"] = np.array([_POSITIONS[member.finish_reason] for member in members], "u1")
        for name in ("num_turns", "sampling_started_at", "sampling_ended_at"):
            columns[name] = np.array([getattr(member, name) for member in members], _TRAJECTORY_COLUMNS[name])
        columns |= step_columns(members) | explored_columns(members)
        kinds = {
            (type(member.reward), type(member.success), type(member.num_turns), type(member.finish_reason))
            for member in members
        }
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError) as error:
        _explain(group)
        raise InvalidGroup("bad_dtype", str(error), group.ticket.ticket_id) from error
    if not (fits and parts_GP.shape[1:] == (len(REWARD_PARTS),) and kinds == {(float, bool, int, FinishReason)}):
        _explain(group)  # what passes it is fine: NumPy's scalars, say
    return columns


def _explain(group: Group) -> None:
    for g, member in enumerate(group.trajectories):
        _check_structure(member, g, group.ticket)


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
    _check_tokens(columns, limits, ticket)
    columns |= {name: _column(record, name, dtype, None, ticket) for name, dtype in _ADDED_COLUMNS.items()}
    added_G = _added({"lengths": lengths_G, **columns}, ticket)
    scalars = {name: columns[name].tolist() for name in _TRAJECTORY_COLUMNS}
    _check_scalars(scalars, ticket)
    bounds = [0, *ends_G.tolist()]
    tokens, masks, logprobs, versions = (columns[name] for name in _TOKEN_COLUMNS)
    trajectories = tuple(
        Trajectory(
            tokens[start:end],
            masks[start:end],
            logprobs[start:end],
            versions[start:end],
            reward,
            parts_P,
            bool(success),
            _FINISH_REASONS[reason],
            num_turns,
            started_at,
            ended_at,
            **added,
        )
        for start, end, parts_P, added, (reward, success, reason, num_turns, started_at, ended_at) in zip(
            bounds, bounds[1:], columns["reward_parts"], added_G, zip(*scalars.values(), strict=True), strict=False
        )
    )
    group = Group(ticket, trajectories, record["actor_id"], record["partial"], record["enqueued_at"])
    _check_envelope(group)
    return group


def _column(record: dict[str, Any], name: str, dtype: str, length: int | None, ticket: Ticket) -> np.ndarray:
    """A column of the record as an array, of exactly `length` values unless that is None."""
    data = record[name] or b""  # fastavro gives the default of a field as the schema writes it: ""
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
    _checked_columns(group, limits)


def _checked_columns(group: Group, limits: Limits) -> dict[str, np.ndarray]:
    """The columns of a group that was made here, every value checked."""
    ticket = group.ticket
    _check_ticket(ticket, limits)
    _check_size(ticket, len(group.trajectories), group.partial)
    columns = _columns(group)
    _check_lengths(columns["lengths"], limits, ticket)
    _check_tokens(columns, limits, ticket)
    _added(columns, ticket)
    _check_scalars({name: columns[name].tolist() for name in _TRAJECTORY_COLUMNS}, ticket)
    _check_envelope(group)
    return columns


def _check_ticket(ticket: Ticket, limits: Limits) -> None:
    def refuse(reason: str, detail: str) -> None:
        raise InvalidGroup(reason, detail, ticket.ticket_id)

    if not (isinstance(ticket.ticket_id, str) and _TICKET_ID.fullmatch(ticket.ticket_id)):
        raise InvalidGroup("bad_ticket", f"ticket_id {str(ticket.ticket_id)[:40]!r} is not '<epoch>-<count>'")
    for name, value, low, high in (
        ("level", ticket.task.level, 0, 2**31),
        ("index", ticket.task.index, 0, 2**63),
        ("group_size", ticket.group_size, 1, 2**31),
        ("line", ticket.line, 0, 2**31),
        ("min_update", ticket.min_update, 0, 2**63),
        ("deadline", ticket.deadline, ticket.min_update, 2**63),
        ("seed", ticket.seed, -(2**63), 2**63),
    ):
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not (whole and low <= value < high):
            refuse("bad_ticket", f"{name}={value}")
    environment: Any = ticket.task.environment  # Any: what is stated about its type is what is checked
    if not isinstance(environment, str):
        refuse("bad_ticket", "environment is no string")
    if ticket.task.split not in ("train", "heldout"):
        refuse("bad_ticket", f"split={ticket.task.split!r:.40}")
    if not (math.isfinite(ticket.temperature) and ticket.temperature > 0):
        refuse("bad_ticket", f"temperature={ticket.temperature}")
    if not math.isfinite(ticket.issued_at):
        refuse("bad_ticket", f"issued_at={ticket.issued_at}")
    if ticket.group_size > limits.max_group_size:
        refuse("group_too_large", f"group_size {ticket.group_size}, limit {limits.max_group_size}")


def _check_size(ticket: Ticket, num_members: int, partial: bool) -> None:
    if num_members == 0:
        raise InvalidGroup("empty_group", "no trajectories", ticket.ticket_id)
    if num_members != ticket.group_size and not (partial and num_members < ticket.group_size):
        detail = f"{num_members} trajectories, {ticket.group_size} asked for, {partial=}"
        raise InvalidGroup("group_size_mismatch", detail, ticket.ticket_id)


def _check_lengths(lengths_G: np.ndarray, limits: Limits, ticket: Ticket) -> None:
    shortest, longest = int(lengths_G.min()), int(lengths_G.max())
    if shortest <= 0:
        raise InvalidGroup("empty_trajectory", f"length {shortest}", ticket.ticket_id)
    if longest > limits.max_tokens:
        raise InvalidGroup("too_many_tokens", f"{longest} tokens, limit {limits.max_tokens}", ticket.ticket_id)


def _check_structure(member: Trajectory, g: int, ticket: Ticket) -> None:
    """Types, dtypes and shapes of one trajectory that was made here; on the wire the schema fixes them."""

    def refuse(reason: str, detail: str) -> None:
        raise InvalidGroup(reason, f"trajectory {g}: {detail}", ticket.ticket_id)

    for name, dtype in _ARRAY_DTYPES.items():
        array = getattr(member, name)
        if not (isinstance(array, np.ndarray) and array.dtype == dtype):
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            refuse("bad_dtype", f"{name} is {kind}, not {dtype}")
        if array.ndim != 1:
            refuse("bad_shape", f"{name} has shape {array.shape}")
        if name == "reward_parts":
            if len(array) != len(REWARD_PARTS):
                refuse("bad_reward_parts", f"{len(array)} parts, not {len(REWARD_PARTS)}")
        elif len(array) != len(member.tokens):
            refuse("length_mismatch", f"{name} has {len(array)} values, tokens {len(member.tokens)}")
    for name, kinds in _SCALAR_KINDS.items():
        value = getattr(member, name)
        if not isinstance(value, kinds):
            refuse("bad_dtype", f"{name} is {value!r:.40}")
    finish_reason: Any = member.finish_reason
    if not isinstance(finish_reason, FinishReason):
        refuse("bad_finish_reason", f"{finish_reason!r}")


def _check_tokens(columns: dict[str, np.ndarray], limits: Limits, ticket: Ticket) -> None:
    """Ranges and finiteness of the columns by token and of the reward parts, whose lengths already agree.

    Written for few passes: this runs for every group, on both sides of the wire.
    """
    tokens_S, mask_S = columns["tokens"], columns["loss_mask"]
    logprobs_S, versions_S = columns["behaviour_logprobs"], columns["policy_versions"]

    def refuse(bad_N: Any, reason: str, name: str) -> None:
        at = int(np.argmax(bad_N))
        raise InvalidGroup(reason, f"{name}[{at}] of the group is {columns[name][at]}", ticket.ticket_id)

    if not np.maximum.reduce(tokens_S.view("<u4")) < limits.vocab_size:  # as unsigned, a negative token is a huge one
        refuse((tokens_S < 0) | (tokens_S >= limits.vocab_size), "token_out_of_range", "tokens")
    if not np.maximum.reduce(mask_S) <= 1:
        refuse(mask_S > 1, "bad_mask", "loss_mask")
    # NaN fails both comparisons.
    if not (np.maximum.reduce(logprobs_S) <= _LOGPROB_SLACK and np.minimum.reduce(logprobs_S) > -np.inf):
        infinite_S = ~np.isfinite(logprobs_S)
        if infinite_S.any():
            refuse(infinite_S, "non_finite_logprob", "behaviour_logprobs")
        refuse(logprobs_S > _LOGPROB_SLACK, "positive_logprob", "behaviour_logprobs")
    unsampled_S = mask_S == 0
    stray_S = unsampled_S & (logprobs_S != 0)
    if np.count_nonzero(stray_S):
        refuse(stray_S, "unsampled_logprob", "behaviour_logprobs")
    if np.minimum.reduce(versions_S) < -1 or np.count_nonzero((versions_S < 0) != unsampled_S):
        refuse((versions_S < -1) | ((versions_S < 0) != unsampled_S), "bad_version", "policy_versions")
    parts_GP = columns["reward_parts"]
    if not (parts_GP.min() >= 0 and parts_GP.max() <= 1):  # NaN fails
        refuse(~((parts_GP >= 0) & (parts_GP <= 1)).all(axis=1), "bad_reward_parts", "reward_parts")


def _added(columns: dict[str, np.ndarray], ticket: Ticket) -> list[dict[str, Any]]:
    """The fields of each trajectory that came to the wire later, checked."""
    try:
        steps, explored = split_steps(columns), split_explored(columns)
    except BadColumn as error:
        raise InvalidGroup(error.reason, str(error), ticket.ticket_id) from error
    return [of_steps | others for of_steps, others in zip(steps, explored, strict=True)]


def _check_scalars(scalars: dict[str, list[Any]], ticket: Ticket) -> None:
    """Ranges of the columns with one value a trajectory. The order of two times is not checked: clocks are set back."""
    for name, (low, high, reason) in _RANGES.items():
        values = scalars[name]
        if math.isfinite(sum(values)) and low <= min(values) and max(values) <= high:
            continue
        for at, value in enumerate(values):
            if not low <= value <= high:  # NaN is not
                finite = name != "rewards" or math.isfinite(value)
                detail = f"{name}[{at}] of the group is {value}"
                raise InvalidGroup(reason if finite else "non_finite_reward", detail, ticket.ticket_id)


def _check_envelope(group: Group) -> None:
    if not isinstance(group.actor_id, str):
        raise InvalidGroup("bad_actor", f"actor_id {group.actor_id!r:.40}", group.ticket.ticket_id)
    if not abs(group.enqueued_at) <= _LATEST:  # NaN fails
        raise InvalidGroup("bad_time", f"enqueued_at={group.enqueued_at}", group.ticket.ticket_id)
