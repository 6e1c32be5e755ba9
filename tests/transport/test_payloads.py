"""Payloads: staged, made lasting with their group, gone with their ticket; large ones in files."""

from __future__ import annotations

import dataclasses
import os
import threading
import types

import pytest

from asyncrl_jax.transport import dead_letters, scripts
from asyncrl_jax.transport.codec import InvalidGroup
from asyncrl_jax.transport.dead_letters import DeadLetters
from asyncrl_jax.transport.groups import GroupReader, GroupWriter
from asyncrl_jax.transport.payloads import STAGED_S, PayloadStore, is_reference
from asyncrl_jax.transport.tasks import Delivery
from asyncrl_jax.types import Outcome


def payload_keys(run) -> list[str]:
    return [key.decode() for key in run.client.scan_iter(f"{run.keys.namespace}:groups:payload:*")]


@pytest.fixture
def store(tmp_path):
    return PayloadStore(tmp_path / "payloads")


@pytest.fixture
def beside(run, store, limits):
    """(writer, reader) that put every payload into a file."""
    config = dataclasses.replace(run.config, inline_bytes=100)
    return (
        GroupWriter(run.client, run.keys, config, limits, store),
        GroupReader(run.client, run.keys, "learner-0", config, store),
    )


def files(store) -> list[str]:
    return sorted(path.name for path in store._directory.iterdir())


@pytest.mark.parametrize("outcome", [Outcome.TRAINED, Outcome.EXPIRED])
def test_a_payload_lasts_from_submission_to_settlement_and_no_longer(run, outcome):
    (ticket,) = run.queue(1)
    (key,) = payload_keys(run)
    assert run.client.ttl(key) == -1
    run.ledger.settle(ticket.ticket_id, outcome)
    assert payload_keys(run) == []


def test_what_a_killed_writer_staged_expires(run, make_group, monkeypatch):
    (ticket,) = run.issue(1)
    (delivery,) = run.tasks().claim(1, 0)
    monkeypatch.setattr(run.writer, "_submit", types.SimpleNamespace(sha="0"))  # SET goes through, the script does not
    with pytest.raises(TypeError, match="not callable"):
        run.writer.submit(delivery, make_group(ticket))
    (key,) = payload_keys(run)
    assert 0 < run.client.ttl(key) <= STAGED_S
    assert run.ledger.live()[ticket.ticket_id].state == "issued"


def test_q_02_a_submission_that_runs_twice_keeps_its_payload(run):
    """A lost reply: everything was done, and the whole pipeline is sent again, staging included."""
    run.issue(1)
    (delivery,) = run.tasks().claim(1, 0)
    submission = run.writer._submission(delivery, b"payload")
    assert [run.writer._stage_and_queue([submission]) for _ in range(2)] == [[1], [1]]
    assert run.client.ttl(submission.key) == -1
    assert run.ledger.duplicates() == 0
    assert len(run.reader().read(4, 0)) == 1


def test_a_second_attempt_leaves_no_payload_and_does_not_touch_the_first(run):
    (ticket,) = run.queue(1)
    kept = payload_keys(run)
    other = run.writer._submission(Delivery(ticket, "1-1", 1), b"late")
    assert run.writer._stage_and_queue([other]) == [0]
    assert payload_keys(run) == kept
    assert run.ledger.duplicates() == 1


def test_a_group_is_not_queued_without_its_payload(run, make_group):
    """A server that evicts keys: the writer stages again, then says what is wrong. Nothing was changed."""
    (ticket,) = run.issue(1)
    (delivery,) = run.tasks().claim(1, 0)
    submission = run.writer._submission(delivery, b"payload")
    arguments = [run.keys.group_prefix, *submission.arguments]
    answer = run.client.eval(scripts.SUBMIT, 6, *run.keys.settlement(), *arguments)
    assert answer == [-1]
    assert run.ledger.live()[ticket.ticket_id].state == "issued"
    run.writer._stage_and_queue = lambda submissions: [-1] * len(submissions)
    with pytest.raises(RuntimeError, match="noeviction"):
        run.writer.submit(delivery, make_group(ticket))


def test_concurrent_submissions_share_round_trips_and_each_has_its_answer(run, make_group):
    tickets = run.issue(24)
    deliveries = run.tasks().claim(24, 1000)
    trips = []
    exchange = run.writer._stage_and_queue

    def counting(submissions):
        trips.append(len(submissions))
        return exchange(submissions)

    run.writer._stage_and_queue = counting
    answers = {}
    twice = [*deliveries, *deliveries[:4]]  # four are waste
    gate = threading.Barrier(len(twice))

    def submit(i, delivery):
        gate.wait()
        answers[i] = run.writer.submit(delivery, make_group(delivery.ticket))

    threads = [threading.Thread(target=submit, args=item) for item in enumerate(twice)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(answers.values()) == len(tickets)
    assert sum(trips) == len(twice)
    assert max(trips) > 1
    assert run.ledger.duplicates() == 4


def test_an_error_reaches_every_thread_whose_group_it_stopped(run, make_group):
    run.issue(1)
    (delivery,) = run.tasks().claim(1, 0)
    run.writer._stage_and_queue = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.writer.submit(delivery, make_group(delivery.ticket))


def test_a_large_group_goes_through_a_file_and_leaves_none(run, beside, store, make_group, limits):
    writer, reader = beside
    (ticket,) = run.issue(1)
    (delivery,) = run.tasks().claim(1, 0)
    assert writer.submit(delivery, make_group(ticket))
    (name,) = files(store)
    assert name.startswith(f"{ticket.ticket_id}.")
    (key,) = payload_keys(run)
    assert is_reference(run.client.get(key))
    assert run.client.strlen(key) < 200
    (entry,) = reader.read(4, 0)
    assert entry.decode(limits).ticket == ticket
    assert reader.complete([(entry, ticket.ticket_id)], Outcome.TRAINED, 1) == 1
    assert (files(store), payload_keys(run)) == ([], [])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [("delete", "payload_missing"), ("flip", "payload_damaged"), ("cut", "payload_damaged")],
)
def test_a_missing_or_damaged_payload_costs_its_group_alone(run, beside, store, make_group, limits, damage, reason):
    writer, reader = beside
    tickets = run.issue(2)
    for delivery in run.tasks().claim(2, 0):
        assert writer.submit(delivery, make_group(delivery.ticket))
    path = next(path for path in store._directory.iterdir() if path.name.startswith(f"{tickets[0].ticket_id}."))
    data = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut" else data[:50] + bytes([data[50] ^ 1]) + data[51:])
    entries = {entry.ticket: entry for entry in [*reader.read(4, 0), *reader.read(4, 0)]}
    assert entries[tickets[1]].decode(limits).ticket == tickets[1]
    with pytest.raises(InvalidGroup, match=reason) as caught:
        entries[tickets[0]].decode(limits)
    assert reader.dead_letter(entries[tickets[0]], caught.value.reason, caught.value.detail)
    assert [letter.reason for letter in DeadLetters(run.client, run.keys).read()] == [reason]
    assert run.ledger.counts()["quarantined"] == 1


def test_a_payload_that_redis_lost_is_quarantined(run, limits):
    run.queue(1)
    run.client.delete(*payload_keys(run))
    (entry,) = run.reader().read(1, 0)
    with pytest.raises(InvalidGroup, match="payload_missing"):
        entry.decode(limits)


@pytest.mark.parametrize(
    "reference",
    [
        b"\xc3\x02{}",
        b"\xc3\x02[]",
        b"\xc3\x02not json",
        b'\xc3\x02{"name": "../../etc/passwd", "size": 1, "digest": ""}',
        b'\xc3\x02{"name": "1-1.' + b"a" * 32 + b'", "size": "1", "digest": ""}',
        b"\xc3\x02" + b"[" * 5000,
    ],
)
def test_hostile_references_lead_nowhere(store, reference):
    with pytest.raises(InvalidGroup, match="bad_reference"):
        store.get(reference, 1 << 20)


def test_a_payload_larger_than_a_message_may_be_is_not_read(store):
    reference = store.put("1-1", "0" * 32, b"x" * 1000)
    assert store.get(reference, 1000) == b"x" * 1000
    with pytest.raises(InvalidGroup, match="too_large"):
        store.get(reference, 999)


def test_the_sweep_deletes_old_orphans_and_nothing_else(run, beside, store, make_group):
    writer, reader = beside
    queued, settled = run.issue(2)
    for delivery in run.tasks().claim(2, 0):
        assert writer.submit(delivery, make_group(delivery.ticket))
    run.ledger.settle(settled.ticket_id, Outcome.EXPIRED)  # by the orchestrator, which knows no files
    young = store.put("9-9", "0" * 32, b"on its way into the ledger")
    old = store.put("9-8", "0" * 32, b"its writer was killed")
    (store._directory / "someone else's").write_bytes(b"")
    for path in store._directory.iterdir():
        if not path.name.startswith("9-9"):
            os.utime(path, (1, 1))
    assert reader.sweep_payloads() == 2
    assert store.get(young, 100)
    with pytest.raises(InvalidGroup):
        store.get(old, 100)
    assert len(files(store)) == 3
    assert any(name.startswith(f"{queued.ticket_id}.") for name in files(store))


def test_dead_letters_are_bounded_in_number_and_the_dropped_are_counted(run, monkeypatch):
    monkeypatch.setattr(dead_letters, "MAX_LETTERS", 3)
    letters = DeadLetters(run.client, run.keys)
    for i in range(5):
        bury(run, letters, f"reason{i}", b"x")
    assert [letter.reason for letter in letters.read()] == ["reason4", "reason3", "reason2"]
    assert letters.num_dropped() == 2


def test_dead_letters_are_bounded_in_bytes_and_a_long_one_is_cut(run, monkeypatch):
    monkeypatch.setattr(dead_letters, "MAX_BYTES", 1000)
    monkeypatch.setattr(dead_letters, "MAX_LETTER_BYTES", 400)
    letters = DeadLetters(run.client, run.keys)
    for _ in range(4):
        bury(run, letters, "long", b"x" * 5000)
    assert len(letters) == 2
    assert all(0 < len(letter.payload) < 400 for letter in letters.read())
    assert int(run.client.get(run.keys.dead_size)) <= 1000


def bury(run, letters, reason: str, payload: bytes) -> None:
    stream = run.keys.groups(0)
    entry = run.client.xadd(stream, {"payload": payload}).decode()
    assert letters.bury(stream, "learner", entry, reason=reason, detail="", ticket_id="", outcome=Outcome.QUARANTINED)
