"""Temperatures and policies of members on the wire and in the archive."""

import dataclasses

import numpy as np
import pytest

from asyncrl_jax.transport.archive import ArchivedGroup, read_groups, write_groups
from asyncrl_jax.transport.codec import InvalidGroup, decode_group, encode_group, group_record
from asyncrl_jax.types import Exploration


@pytest.fixture
def explored(make_ticket, make_group, make_trajectory):
    members = (
        make_trajectory(temperature=float(np.float32(0.8))),
        make_trajectory(),
        make_trajectory(exploration=Exploration.OLDER),
    )
    return make_group(make_ticket(), trajectories=members)


def test_what_a_member_was_sampled_with_comes_back(explored, limits, tmp_path):
    write_groups(tmp_path / "groups.avro", [ArchivedGroup(explored, 1.0, 2.0, 0, (0,))])
    for found in (decode_group(encode_group(explored, limits), limits), read_groups(tmp_path / "groups.avro")[0].group):
        assert [t.temperature for t in found.trajectories] == [np.float32(0.8), None, None]
        assert [t.exploration for t in found.trajectories] == [None, None, Exploration.OLDER]


@pytest.mark.parametrize(
    "changes", [{"temperature": value} for value in (-1.0, 1e-40, 1e9, float("nan"), float("inf"))]
)
def test_a_temperature_that_cannot_be_is_refused_before_it_is_sent(explored, limits, changes):
    first = dataclasses.replace(explored.trajectories[0], **changes)
    with pytest.raises(InvalidGroup) as caught:
        encode_group(dataclasses.replace(explored, trajectories=(first, *explored.trajectories[1:])), limits)
    assert caught.value.reason == "bad_exploration"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("temperatures", np.array([0.8, np.nan, 0.0], "<f4")),
        ("temperatures", np.array([0.8, -0.1, 0.0], "<f4")),
        ("temperatures", np.zeros(0, "<f4")),
        ("explored", np.array([0, 0, 3], "u1")),
        ("explored", np.array([0, 2], "u1")),
    ],
)
def test_exploration_on_the_wire_is_not_trusted(explored, limits, column, value):
    data, before = encode_group(explored, limits), group_record(explored)[column]
    framed = bytes([2 * len(before)]) + before
    at = data.rindex(framed)  # the last columns of the message
    swapped = data[:at] + bytes([2 * value.nbytes]) + value.tobytes() + data[at + len(framed) :]
    with pytest.raises(InvalidGroup) as caught:
        decode_group(swapped, limits)
    assert caught.value.reason == "bad_exploration"
