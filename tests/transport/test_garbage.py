"""Whatever someone else writes into, or deletes from, the run's keys: nobody crashes, and nobody waits for ever."""

from __future__ import annotations

import pytest

from asyncrl_jax.transport.dead_letters import DeadLetters
from asyncrl_jax.types import Outcome, WeightVersion

GARBAGE = [b"", b"null", b"\xff\xfe", b"[1]", b'{"number": "x"}', b"{}", b"12"]


def version(number: int) -> WeightVersion:
    return WeightVersion(number, None, 0, number, "0" * 32, announced_at=1.0)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_readers_of_control_state_take_garbage_for_absence(run, garbage):
    keys, control = run.keys, run.control
    control.announce(version(0))
    for name in (keys.versions, keys.lines, keys.heartbeats, keys.evaluation_results, keys.evaluation_requests):
        run.client.hset(name, b"7", garbage)
        run.client.hset(name, b"\xff ", garbage)
    run.client.zadd(keys.leases, {garbage: 4e9, b"0 actor": 4e9})
    run.client.zadd(keys.heartbeat_expiry, {b"7": 4e9, b"\xff ": 4e9})
    run.client.zadd(keys.evaluation_queue, {b"7": 1})
    run.client.zadd(keys.redo, {garbage: 3})
    control.append_redo(4, {"seed": 1})
    for name in (keys.learner, keys.phase):
        run.client.set(name, garbage)
    assert control.versions() == {0: version(0)}
    assert control.latest() == version(0)
    assert control.leased() - {12} == {0}
    assert control.redo(0) == [{"seed": 1, "update": 4}]
    assert control.learner() is None
    assert control.phase() == "running"
    assert list(control.lines()) == [0]
    assert control.evaluations() == control.pending_evaluations() == []
    assert all(isinstance(values, dict) for values in control.heartbeats().values())
    assert control.announce(version(7))  # in the place of garbage


def test_a_deleted_version_is_absent_and_the_next_one_is_found(run):
    control = run.control
    control.announce(version(0))
    run.client.hdel(run.keys.versions, "0")
    assert control.latest() is None
    assert control.versions() == {}
    assert not control.lease(0, "actor", 10)
    control.announce(version(1))
    assert control.latest() == version(1)


@pytest.mark.parametrize("garbage", [*GARBAGE, None])
def test_a_spoilt_ticket_costs_its_own_group(run, garbage):
    spoilt, good = run.queue(2)
    if garbage is None:
        run.client.hdel(run.keys.tickets, spoilt.ticket_id)
    else:
        run.client.hset(run.keys.tickets, spoilt.ticket_id, garbage)
    reader = run.reader()
    entries = [*reader.read(4, 0), *reader.read(4, 0)]
    assert [entry.ticket for entry in entries] == [good]
    assert list(run.ledger.live()) == [good.ticket_id]
    (letter,) = DeadLetters(run.client, run.keys).read()
    assert (letter.reason, letter.ticket_id) == ("bad_ledger", spoilt.ticket_id)
    assert run.ledger.counts()["quarantined"] == (garbage is not None)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_spoilt_place_costs_its_own_group(run, garbage):
    spoilt, good = run.queue(2)
    run.client.hset(run.keys.group_entries, spoilt.ticket_id, garbage)
    reader = run.reader()
    entries = [*reader.read(4, 0), *reader.read(4, 0)]
    assert [entry.ticket for entry in entries] == [good]
    assert run.ledger.live()[spoilt.ticket_id].state == "issued"
    assert run.ledger.missing() == [spoilt.ticket_id]  # so the learner settles it
    assert run.ledger.settle(spoilt.ticket_id, Outcome.FAILED)
    assert run.ledger.counts()["pending"] == 1
