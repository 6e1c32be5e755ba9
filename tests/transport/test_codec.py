"""Groups and tickets on the wire."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random

import fastavro
import numpy as np
import pytest

from asyncrl_jax.transport import schema
from asyncrl_jax.transport.codec import (
    InvalidGroup,
    Limits,
    decode_group,
    decode_ticket,
    encode_group,
    encode_ticket,
    validate_group,
)
from asyncrl_jax.types import FinishReason, Group


def assert_equal(left: Group, right: Group) -> None:
    assert dataclasses.replace(left, trajectories=()) == dataclasses.replace(right, trajectories=())
    assert len(left.trajectories) == len(right.trajectories)
    for a, b in zip(left.trajectories, right.trajectories, strict=True):
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype, field.name
                np.testing.assert_array_equal(x, y, strict=True)
            else:
                assert (x, type(x)) == (y, type(y)), field.name


def test_a_group_comes_back_bit_for_bit(make_ticket, make_group, limits):
    group = make_group(make_ticket(), enqueued_at=3.5)
    assert_equal(decode_group(encode_group(group, limits), limits), group)


def test_a_partial_group_comes_back(make_ticket, make_group, make_trajectory, limits):
    reasons = [make_trajectory(finish_reason=reason) for reason in (FinishReason.LENGTH, FinishReason.ERROR)]
    group = make_group(make_ticket(), trajectories=tuple(reasons), partial=True)
    assert_equal(decode_group(encode_group(group, limits), limits), group)


def test_a_ticket_comes_back(make_ticket):
    ticket = make_ticket("12-345", seed=-(2**63), min_update=0, deadline=0)
    assert decode_ticket(encode_ticket(ticket)) == ticket


def crc64_avro(data: bytes) -> int:
    """Bit by bit, as the specification writes it."""
    empty = 0xC15D213AA4D7A795
    crc = empty
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (empty if crc & 1 else 0)
    return crc


def test_messages_are_avro_single_object_encoding(make_ticket, make_group, limits):
    data = encode_group(make_group(make_ticket()), limits)
    canonical = fastavro.schema.to_parsing_canonical_form(schema.GROUP)
    assert data[:2] == b"\xc3\x01"
    assert int.from_bytes(data[2:10], "little") == crc64_avro(canonical.encode())
    record = fastavro.schemaless_reader(io.BytesIO(data[10:]), schema.GROUP)
    np.testing.assert_array_equal(np.frombuffer(record["lengths"], "<i4"), [4, 5, 6])


def _with(name, value):
    """The group with one field of its second trajectory replaced."""

    def change(group):
        members = list(group.trajectories)
        members[1] = dataclasses.replace(members[1], **{name: value(getattr(members[1], name))})
        return dataclasses.replace(group, trajectories=tuple(members))

    return change


def _set(position, value):
    def change(array):
        array = array.copy()
        array[position] = value
        return array

    return change


# The second trajectory has 5 tokens, of which position 2 was sampled. (reason, change)
BAD_GROUPS = {
    "mask_shorter": ("length_mismatch", _with("loss_mask", lambda a: a[:-1])),
    "logprobs_longer": ("length_mismatch", _with("behaviour_logprobs", lambda a: np.append(a, np.float32(0)))),
    "versions_shorter": ("length_mismatch", _with("policy_versions", lambda a: a[1:])),
    "no_tokens": ("empty_trajectory", None),
    "too_long": ("too_many_tokens", None),
    "token_too_high": ("token_out_of_range", _with("tokens", _set(0, 32))),
    "token_negative": ("token_out_of_range", _with("tokens", _set(0, -1))),
    "tokens_int64": ("bad_dtype", _with("tokens", lambda a: a.astype(np.int64))),
    "tokens_list": ("bad_dtype", _with("tokens", lambda a: a.tolist())),
    "logprobs_float64": ("bad_dtype", _with("behaviour_logprobs", lambda a: a.astype(np.float64))),
    "tokens_2d": ("bad_shape", _with("tokens", lambda a: a[None])),
    "mask_two": ("bad_mask", _with("loss_mask", _set(0, 2))),
    "logprob_nan": ("non_finite_logprob", _with("behaviour_logprobs", _set(2, np.nan))),
    "logprob_minus_inf": ("non_finite_logprob", _with("behaviour_logprobs", _set(2, -np.inf))),
    "logprob_positive": ("positive_logprob", _with("behaviour_logprobs", _set(2, 0.01))),
    "logprob_where_not_sampled": ("unsampled_logprob", _with("behaviour_logprobs", _set(0, -1))),
    "version_missing": ("bad_version", _with("policy_versions", _set(2, -1))),
    "version_where_not_sampled": ("bad_version", _with("policy_versions", _set(0, 5))),
    "reward_nan": ("non_finite_reward", _with("reward", lambda _: float("nan"))),
    "reward_beyond_float32": ("reward_out_of_range", _with("reward", lambda _: 1e39)),
    "reward_none": ("bad_dtype", _with("reward", lambda _: None)),
    "parts_nan": ("bad_reward_parts", _with("reward_parts", _set(0, np.nan))),
    "parts_above_one": ("bad_reward_parts", _with("reward_parts", _set(3, 1.5))),
    "parts_missing": ("bad_reward_parts", _with("reward_parts", lambda a: a[:2])),
    "success_is_a_number": ("bad_dtype", _with("success", lambda _: 1)),
    "reason_is_a_word": ("bad_finish_reason", _with("finish_reason", lambda _: "answered")),
    "turns_negative": ("bad_num_turns", _with("num_turns", lambda _: -1)),
    "time_nan": ("bad_time", _with("sampling_ended_at", lambda _: float("nan"))),
    "time_beyond_all_clocks": ("bad_time", _with("sampling_started_at", lambda _: -1e308)),
    "member_missing": ("group_size_mismatch", lambda g: dataclasses.replace(g, trajectories=g.trajectories[:2])),
    "full_but_partial_and_more": ("group_size_mismatch", None),
    "nobody": ("empty_group", lambda g: dataclasses.replace(g, trajectories=(), partial=True)),
}


@pytest.mark.parametrize("name", BAD_GROUPS)
def test_tok_12_a_bad_group_is_refused_with_its_reason(name, make_ticket, make_group, make_trajectory, limits):
    reason, change = BAD_GROUPS[name]
    group = make_group(make_ticket("7-3"))
    if name == "no_tokens":
        change = lambda g: dataclasses.replace(g, trajectories=(make_trajectory(0), *g.trajectories[1:]))  # noqa: E731
    elif name == "too_long":
        change = lambda g: dataclasses.replace(g, trajectories=(make_trajectory(65), *g.trajectories[1:]))  # noqa: E731
    elif name == "full_but_partial_and_more":
        change = lambda g: dataclasses.replace(g, trajectories=g.trajectories * 2, partial=True)  # noqa: E731
    validate_group(group, limits)
    with pytest.raises(InvalidGroup) as caught:
        encode_group(change(group), limits)
    assert caught.value.reason == reason
    assert caught.value.ticket_id == "7-3"


BAD_TICKETS = {
    "ticket_id": "seven",
    "group_size": 0,
    "line": -1,
    "min_update": 9,  # after its deadline
    "temperature": 0.0,
    "seed": 2**63,
    "issued_at": float("nan"),
}


@pytest.mark.parametrize("name", BAD_TICKETS)
def test_a_bad_ticket_is_refused(name, make_ticket, make_group, limits):
    ticket = make_ticket(**{name: BAD_TICKETS[name]})
    with pytest.raises(InvalidGroup, match="bad_ticket"):
        encode_ticket(ticket)
    with pytest.raises(InvalidGroup, match="bad_ticket"):
        validate_group(make_group(ticket, trajectories=make_group(make_ticket()).trajectories), limits)


def _hostile(group, limits, **changes):
    """A message of the right schema whose columns were changed after validation."""
    data = encode_group(group, limits)
    record = fastavro.schemaless_reader(io.BytesIO(data[10:]), schema.GROUP)
    record |= {name: change(record[name]) for name, change in changes.items()}
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, schema.GROUP, record)
    return data[:10] + buffer.getvalue()


def _bytes(dtype, *values):
    return lambda _: np.array(values, dtype).tobytes()


BAD_MESSAGES = {
    "lengths_negative": ("empty_trajectory", {"lengths": _bytes("<i4", 20, -9, 4)}),
    "lengths_cut": ("length_mismatch", {"lengths": lambda b: b[:-1]}),
    "lengths_fewer": ("group_size_mismatch", {"lengths": lambda b: b[:-4]}),
    "lengths_huge": ("too_many_tokens", {"lengths": _bytes("<i4", 2**31 - 1, 2**31 - 1, 2**31 - 1)}),
    "lengths_none": ("empty_group", {"lengths": lambda _: b""}),
    "tokens_cut": ("length_mismatch", {"tokens": lambda b: b[:-4]}),
    "tokens_odd": ("length_mismatch", {"tokens": lambda b: b[:-1]}),
    "tokens_high": ("token_out_of_range", {"tokens": lambda b: b"\xff\xff\xff\x7f" + b[4:]}),
    "mask_more": ("length_mismatch", {"loss_mask": lambda b: b + b"\0"}),
    "mask_three": ("bad_mask", {"loss_mask": lambda b: b"\3" + b[1:]}),
    "logprob_nan": ("non_finite_logprob", {"behaviour_logprobs": lambda b: b[:8] + b"\xff" * 4 + b[12:]}),
    "reason_unknown": ("bad_finish_reason", {"finish_reasons": lambda _: b"\0\0\x63"}),
    "rewards_cut": ("length_mismatch", {"rewards": lambda b: b[:8]}),
    "parts_cut": ("length_mismatch", {"reward_parts": lambda b: b[:-4]}),
    "success_two": ("bad_success", {"successes": lambda _: b"\0\1\2"}),
    "group_size": ("group_too_large", {"ticket": lambda t: t | {"group_size": 9}}),
    "ticket_id": ("bad_ticket", {"ticket": lambda t: t | {"ticket_id": "1-1; FLUSHALL"}}),
    "split": ("bad_ticket", {"ticket": lambda t: t | {"split": "test"}}),
    "enqueued_at": ("bad_time", {"enqueued_at": lambda _: float("inf")}),
    "enqueued_at_the_end_of_time": ("bad_time", {"enqueued_at": lambda _: 1e308}),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_tok_12_a_bad_message_is_refused_with_its_reason(name, make_ticket, make_group, limits):
    reason, changes = BAD_MESSAGES[name]
    data = _hostile(make_group(make_ticket()), limits, **changes)
    with pytest.raises(InvalidGroup) as caught:
        decode_group(data, limits)
    assert caught.value.reason == reason


def test_bytes_that_are_no_message_are_refused(make_ticket, make_group, limits):
    good = encode_group(make_group(make_ticket()), limits)
    for data, reason in (
        (b"", "unknown_schema"),
        (b"\x80\x04\x95", "unknown_schema"),  # the start of a pickle
        (good[:2] + bytes(8) + good[10:], "unknown_schema"),
        (good + b"\0", "trailing_bytes"),
        (good[:10], "undecodable"),
        (bytes(limits.max_message_bytes + 1), "too_large"),
        (encode_ticket(make_ticket()), "unknown_schema"),
    ):
        with pytest.raises(InvalidGroup) as caught:
            decode_group(data, limits)
        assert caught.value.reason == reason


def test_a_group_above_the_byte_limit_is_not_sent(make_ticket, make_group, limits):
    with pytest.raises(InvalidGroup, match="too_large"):
        encode_group(make_group(make_ticket()), dataclasses.replace(limits, max_message_bytes=300))


def test_hostile_bytes_are_refused_or_valid_never_anything_else(make_ticket, make_group, limits):
    good = encode_group(make_group(make_ticket()), limits)
    rng = random.Random(0)
    refused = 0
    for trial in range(3000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(10, len(data))
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        if trial % 3 == 0:
            del data[rng.randrange(10, len(data)) :]
        elif trial % 3 == 1:
            at = rng.randrange(10, len(data))
            data[at:at] = rng.randbytes(rng.randint(1, 12))
        try:
            validate_group(decode_group(bytes(data), limits), limits)
        except InvalidGroup:
            refused += 1
    assert refused > 2000


def test_a_message_of_an_older_schema_is_read_with_defaults(make_ticket, make_group, limits, monkeypatch):
    older = json.loads(json.dumps(schema._GROUP))
    older["fields"] = [field for field in older["fields"] if field["name"] not in ("partial", "enqueued_at")]
    older = fastavro.parse_schema(older)
    group = make_group(make_ticket(), enqueued_at=9.0)
    record = fastavro.schemaless_reader(io.BytesIO(encode_group(group, limits)[10:]), schema.GROUP)
    buffer = io.BytesIO(b"\xc3\x01" + schema.fingerprint_of(older))
    buffer.seek(0, os.SEEK_END)
    fastavro.schemaless_writer(buffer, older, record)
    with pytest.raises(InvalidGroup, match="unknown_schema"):
        decode_group(buffer.getvalue(), limits)
    monkeypatch.setitem(schema.READABLE["group"], schema.fingerprint_of(older), older)
    assert_equal(decode_group(buffer.getvalue(), limits), dataclasses.replace(group, enqueued_at=0.0))


def test_limits_follow_the_config():
    from asyncrl_jax.config import Config

    config = Config()
    assert Limits.from_config(config) == Limits(
        max_message_bytes=config.redis.max_message_bytes,
        max_tokens=config.environment.max_tokens,
        vocab_size=config.model.vocab_size,
        max_group_size=config.learner.group_size,
    )
