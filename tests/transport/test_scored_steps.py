"""Scores of steps on the wire, and groups that were written before there were any."""

import base64

import fastavro
import numpy as np
import pytest

from asyncrl_jax.transport import schema
from asyncrl_jax.transport.archive import ArchivedGroup, read_groups, write_groups
from asyncrl_jax.transport.codec import InvalidGroup, decode_group, encode_group, group_record

FINGERPRINT_WITHOUT_STEPS = "968588bc7a92d21a"  # of the schema that runs were archived with before


def scored(make_trajectory, scores=(0.25, 0.75), ends=(3, 6), **changes):
    """A trajectory of 6 tokens whose third and sixth were sampled."""
    fields = {"step_scores": np.array(scores, np.float32), "step_ends": np.array(ends, np.int32)}
    return make_trajectory(6, **fields | changes)


def test_scores_of_steps_come_back_with_the_trajectory_that_they_are_of(
    make_ticket, make_group, make_trajectory, limits, tmp_path
):
    members = (scored(make_trajectory), make_trajectory(5), scored(make_trajectory, (1.0,), (6,)))
    group = make_group(make_ticket(), trajectories=members)
    write_groups(tmp_path / "groups.avro", [ArchivedGroup(group, 1.0, 2.0, 0, (0,))])
    for found in (decode_group(encode_group(group, limits), limits), read_groups(tmp_path / "groups.avro")[0].group):
        first, second, third = found.trajectories
        assert first.step_scores.dtype == np.float32
        assert (first.step_scores.tolist(), first.step_ends.tolist()) == ([0.25, 0.75], [3, 6])
        assert (second.step_scores, second.step_ends) == (None, None)
        assert (third.step_scores.tolist(), third.step_ends.tolist()) == ([1.0], [6])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scores": (0.5, np.nan)}, "bad_step_scores"),
        ({"scores": (0.5, 1.001)}, "bad_step_scores"),
        ({"scores": (-0.1, 0.5)}, "bad_step_scores"),
        ({"ends": (6, 3)}, "bad_step_ends"),
        ({"ends": (3, 7)}, "bad_step_ends"),
        ({"ends": (0, 6)}, "bad_step_ends"),
        ({"ends": (2, 6)}, "bad_step_ends"),  # the environment's token
        ({"ends": (3,)}, "bad_dtype"),
        ({"step_scores": None}, "bad_dtype"),
        ({"step_scores": np.array([0.5, 0.5])}, "bad_dtype"),  # float64
        ({"step_scores": np.zeros((2, 1), np.float32)}, "bad_dtype"),
    ],
)
def test_steps_that_cannot_be_are_refused_before_they_are_sent(
    make_ticket, make_group, make_trajectory, limits, changes, reason
):
    group = make_group(
        make_ticket(), trajectories=(make_trajectory(), make_trajectory(), scored(make_trajectory, **changes))
    )
    with pytest.raises(InvalidGroup) as caught:
        encode_group(group, limits)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("num_steps", np.array([2, 0], "<i4"), "length_mismatch"),
        ("num_steps", np.array([3, 0, -1], "<i4"), "length_mismatch"),
        ("num_steps", np.array([2**31 - 1] * 3, "<i4"), "length_mismatch"),
        ("num_steps", np.zeros(0, "<i4"), "length_mismatch"),
        ("step_scores", np.array([np.nan, 0.5], "<f4"), "bad_step_scores"),
        ("step_ends", np.array([3, 2**31 - 1], "<i4"), "bad_step_ends"),
        ("step_ends", np.array([3, -(2**31)], "<i4"), "bad_step_ends"),  # their difference overflows
    ],
)
def test_steps_on_the_wire_are_not_trusted(make_ticket, make_group, make_trajectory, limits, column, value, reason):
    group = make_group(make_ticket(), trajectories=(scored(make_trajectory), make_trajectory(), make_trajectory()))
    data = encode_group(group, limits)
    before = group_record(group)[column]
    assert data.count(before) == 1, "found in the message, to be swapped"
    swapped = data.replace(bytes([2 * len(before)]) + before, bytes([2 * value.nbytes]) + value.tobytes())
    with pytest.raises(InvalidGroup) as caught:
        decode_group(swapped, limits)
    assert caught.value.reason == reason


def test_what_was_written_before_steps_were_scored_is_still_read(make_ticket, make_group, limits, tmp_path):
    """The old schema, by its fingerprint: messages of an older actor, and the archives of older runs."""
    assert schema.fingerprint_of(schema.FIRST_GROUP).hex() == FINGERPRINT_WITHOUT_STEPS
    group = make_group(make_ticket())
    data = encode_group(group, limits)
    old = data[:2] + bytes.fromhex(FINGERPRINT_WITHOUT_STEPS) + data[10:-5]  # five empty columns less
    found = decode_group(old, limits)
    assert found.ticket == group.ticket
    assert all(t.step_scores is None and t.step_ends is None for t in found.trajectories)
    assert found.trajectories[1].tokens.tolist() == group.trajectories[1].tokens.tolist()

    old_file = tmp_path / "groups.avro"
    old_file.write_bytes(base64.b64decode(ARCHIVED_BEFORE))
    (row,) = read_groups(old_file)
    assert row.group.ticket == group.ticket
    assert [t.step_scores for t in row.group.trajectories] == [None] * 3
    with open(old_file, "rb") as file:
        names = [field["name"] for field in fastavro.reader(file).writer_schema["fields"][0]["type"]["fields"]]
    assert "step_scores" not in names


# One group of `conftest.make_group`, as `write_groups` wrote it before.
ARCHIVED_BEFORE = """
T2JqAQQUYXZyby5jb2RlYw5kZWZsYXRlFmF2cm8uc2NoZW1h8ht7InR5cGUiOiAicmVjb3JkIiwgIm5hbWUiOiAiYXN5bmNybF9qYXguQXJjaGl2ZWRH
cm91cCIsICJmaWVsZHMiOiBbeyJuYW1lIjogImdyb3VwIiwgInR5cGUiOiB7InR5cGUiOiAicmVjb3JkIiwgIm5hbWUiOiAiYXN5bmNybF9qYXguR3Jv
dXAiLCAiZmllbGRzIjogW3sibmFtZSI6ICJ0aWNrZXQiLCAidHlwZSI6IHsidHlwZSI6ICJyZWNvcmQiLCAibmFtZSI6ICJhc3luY3JsX2pheC5UaWNr
ZXQiLCAiZmllbGRzIjogW3sibmFtZSI6ICJ0aWNrZXRfaWQiLCAidHlwZSI6ICJzdHJpbmcifSwgeyJuYW1lIjogImVudmlyb25tZW50IiwgInR5cGUi
OiAic3RyaW5nIn0sIHsibmFtZSI6ICJzcGxpdCIsICJ0eXBlIjogInN0cmluZyJ9LCB7Im5hbWUiOiAibGV2ZWwiLCAidHlwZSI6ICJpbnQifSwgeyJu
YW1lIjogImluZGV4IiwgInR5cGUiOiAibG9uZyJ9LCB7Im5hbWUiOiAiZ3JvdXBfc2l6ZSIsICJ0eXBlIjogImludCJ9LCB7Im5hbWUiOiAibGluZSIs
ICJ0eXBlIjogImludCJ9LCB7Im5hbWUiOiAibWluX3VwZGF0ZSIsICJ0eXBlIjogImxvbmcifSwgeyJuYW1lIjogImRlYWRsaW5lIiwgInR5cGUiOiAi
bG9uZyJ9LCB7Im5hbWUiOiAidGVtcGVyYXR1cmUiLCAidHlwZSI6ICJkb3VibGUifSwgeyJuYW1lIjogInNlZWQiLCAidHlwZSI6ICJsb25nIn0sIHsi
bmFtZSI6ICJpc3N1ZWRfYXQiLCAidHlwZSI6ICJkb3VibGUifV19fSwgeyJuYW1lIjogImFjdG9yX2lkIiwgInR5cGUiOiAic3RyaW5nIn0sIHsibmFt
ZSI6ICJsZW5ndGhzIiwgInR5cGUiOiAiYnl0ZXMifSwgeyJuYW1lIjogInRva2VucyIsICJ0eXBlIjogImJ5dGVzIn0sIHsibmFtZSI6ICJsb3NzX21h
c2siLCAidHlwZSI6ICJieXRlcyJ9LCB7Im5hbWUiOiAiYmVoYXZpb3VyX2xvZ3Byb2JzIiwgInR5cGUiOiAiYnl0ZXMifSwgeyJuYW1lIjogInBvbGlj
eV92ZXJzaW9ucyIsICJ0eXBlIjogImJ5dGVzIn0sIHsibmFtZSI6ICJyZXdhcmRzIiwgInR5cGUiOiAiYnl0ZXMifSwgeyJuYW1lIjogInJld2FyZF9w
YXJ0cyIsICJ0eXBlIjogImJ5dGVzIn0sIHsibmFtZSI6ICJzdWNjZXNzZXMiLCAidHlwZSI6ICJieXRlcyJ9LCB7Im5hbWUiOiAiZmluaXNoX3JlYXNv
bnMiLCAidHlwZSI6ICJieXRlcyJ9LCB7Im5hbWUiOiAibnVtX3R1cm5zIiwgInR5cGUiOiAiYnl0ZXMifSwgeyJuYW1lIjogInNhbXBsaW5nX3N0YXJ0
ZWRfYXQiLCAidHlwZSI6ICJieXRlcyJ9LCB7Im5hbWUiOiAic2FtcGxpbmdfZW5kZWRfYXQiLCAidHlwZSI6ICJieXRlcyJ9LCB7Im5hbWUiOiAicGFy
dGlhbCIsICJ0eXBlIjogImJvb2xlYW4ifSwgeyJuYW1lIjogImVucXVldWVkX2F0IiwgInR5cGUiOiAiZG91YmxlIn1dfX0sIHsibmFtZSI6ICJkZXF1
ZXVlZF9hdCIsICJ0eXBlIjogImRvdWJsZSJ9LCB7Im5hbWUiOiAidHJhaW5lZF9hdCIsICJ0eXBlIjogImRvdWJsZSJ9LCB7Im5hbWUiOiAibGluZSIs
ICJ0eXBlIjogImludCJ9LCB7Im5hbWUiOiAidXBkYXRlcyIsICJ0eXBlIjogeyJ0eXBlIjogImFycmF5IiwgIml0ZW1zIjogImxvbmcifX0sIHsibmFt
ZSI6ICJyZXdhcmRfbWVhbiIsICJ0eXBlIjogImRvdWJsZSJ9LCB7Im5hbWUiOiAic3VjY2Vzc19zaGFyZSIsICJ0eXBlIjogImRvdWJsZSJ9LCB7Im5h
bWUiOiAibnVtX3Rva2VucyIsICJ0eXBlIjogImxvbmcifSwgeyJuYW1lIjogIm51bV9zYW1wbGVkX3Rva2VucyIsICJ0eXBlIjogImxvbmcifSwgeyJu
YW1lIjogIm9sZGVzdF92ZXJzaW9uIiwgInR5cGUiOiAiaW50In0sIHsibmFtZSI6ICJuZXdlc3RfdmVyc2lvbiIsICJ0eXBlIjogImludCJ9XX0Asi43
4dtxm2yO41M7dUakqgLmAmMz1DUUSSzKLMnITS3JTOYqKUrMzGMRY2PgEDh7BgTe2CsxMDA4/Am56ciXmFySX6RrIMECFGEFYjYgrgBiBkYgZgJiZgYI
QOaz4BADGSAHEWaEyjNWMCDAfgZUgM5HE1uwv+I/FIBM/o8E0PnoYiC2gTEYfLZHpxMYGBrsgQrsEVbh57MxMjKCAkaCCephEDYABiE4DNFpoEQDVACd
RgEfYOY7gMyDOQ4mJ8fBxQUADWdmsi434dtxm2yO41M7dUakqg==
"""
