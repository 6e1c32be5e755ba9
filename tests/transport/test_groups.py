"""Group streams: a group is queued once, read until it is completed, and trained once."""

from __future__ import annotations

import dataclasses
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from asyncrl_jax.transport.codec import InvalidGroup
from asyncrl_jax.transport.dead_letters import DeadLetters
from asyncrl_jax.transport.keys import partition_of
from asyncrl_jax.transport.ledger import recompute
from asyncrl_jax.types import Outcome

DYING_READER = pathlib.Path(__file__).with_name("dying_reader.py")


def ids(entries) -> list[str]:
    return sorted(entry.ticket.ticket_id for entry in entries)


def pairs(entries):
    return [(entry, entry.ticket.ticket_id) for entry in entries]


def read_all(reader, patience: int = 3) -> list:
    entries, empty = [], 0
    while empty < patience:
        found = reader.read(8, 0)
        entries += found
        empty += not found
    return entries


@pytest.fixture
def dying_reader(run, server, tmp_path):
    password_file = tmp_path / "password"
    password_file.write_text(server.password)

    def start(ending: str) -> tuple[list[str], int]:
        command = [sys.executable, str(DYING_READER), server.url, str(password_file), run.keys.namespace, ending]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        return done.stdout.split(), done.returncode

    return start


def test_a_group_goes_through_and_its_ticket_is_trained(run, make_group, limits):
    (ticket,) = run.issue(1)
    (delivery,) = run.tasks().claim(1, 0)
    before = time.time()
    assert run.writer.submit(delivery, make_group(ticket))
    assert run.client.xlen(run.keys.tasks) == 0
    reader = run.reader()
    (entry,) = reader.read(4, 0)
    group = entry.decode(limits)
    assert (group.ticket, group.actor_id, entry.deliveries) == (ticket, "actor-0", 1)
    assert before <= group.enqueued_at <= time.time()
    assert entry.partition == partition_of(ticket.ticket_id, run.config.partitions)
    assert reader.complete(pairs([entry]), Outcome.TRAINED, 7) == 1
    assert reader.complete(pairs([entry]), Outcome.TRAINED, 7) == 0
    assert run.client.xrange(run.keys.groups(entry.partition)) == []
    event = run.ledger.events()[-1]
    assert (event.outcome, event.update, event.ticket_id) == (Outcome.TRAINED, 7, ticket.ticket_id)


def test_a_second_attempt_at_a_ticket_is_counted_and_dropped(run, make_group):
    (ticket,) = run.issue(1)
    (slow,) = run.tasks("slow", claim_idle_s=0.001).claim(1, 0)
    time.sleep(0.01)
    (fast,) = run.tasks("fast", claim_idle_s=0.001).claim(1, 0)
    assert run.writer.submit(fast, make_group(ticket))
    assert not run.writer.submit(slow, make_group(ticket))  # queued
    assert len(read_all(run.reader())) == 1
    assert run.ledger.settle(ticket.ticket_id, Outcome.EXPIRED)
    assert not run.writer.submit(slow, make_group(ticket))  # settled
    assert run.ledger.duplicates() == 2
    assert read_all(run.reader()) == []


def test_a_group_of_a_ticket_that_was_given_back_is_taken_and_its_new_task_dropped(run, make_group):
    (ticket,) = run.issue(1)
    tasks = run.tasks()
    (delivery,) = tasks.claim(1, 0)
    assert tasks.release(delivery)
    assert run.writer.submit(delivery, make_group(ticket))
    assert run.client.xlen(run.keys.tasks) == 0
    assert tasks.claim(1, 0) == []


def test_a_message_cannot_take_another_ticket_down_with_it(run):
    run.queue(2)
    bad, good = read_all(run.reader())
    reader = run.reader()
    assert reader.dead_letter(bad, "length_mismatch", "tokens", good.ticket.ticket_id)
    assert list(run.ledger.live()) == [good.ticket.ticket_id]
    assert reader.complete([(good, bad.ticket.ticket_id)], Outcome.TRAINED, 1) == 0
    (letter,) = DeadLetters(run.client, run.keys).read()
    assert letter.ticket_id == bad.ticket.ticket_id
    assert letter.detail == f"tokens (it states ticket {good.ticket.ticket_id})"


def test_burying_an_entry_settles_only_the_ticket_that_the_ledger_has_there(run):
    (ticket,) = run.queue(1)
    stray = run.client.xadd(run.keys.groups(0), {"payload": "x"}).decode()
    letters = DeadLetters(run.client, run.keys)
    why = {"reason": "bad", "detail": "", "ticket_id": ticket.ticket_id, "outcome": Outcome.QUARANTINED}
    assert letters.bury(run.keys.groups(0), "learner", stray, **why)
    assert list(run.ledger.live()) == [ticket.ticket_id]


def test_a_group_of_another_ticket_is_not_sent(run, make_group, make_ticket):
    run.issue(1)
    (delivery,) = run.tasks().claim(1, 0)
    with pytest.raises(InvalidGroup, match="ticket_mismatch"):
        run.writer.submit(delivery, make_group(dataclasses.replace(delivery.ticket, deadline=99)))
    assert run.ledger.live()[delivery.ticket.ticket_id].state == "issued"


def test_a_message_that_states_another_ticket_is_refused(run, make_group, limits):
    """A lie about the deadline would let a stale token into a gradient."""
    (ticket,) = run.queue(1)
    (entry,) = run.reader().read(1, 0)
    lie = dataclasses.replace(entry, ticket=dataclasses.replace(ticket, deadline=5))
    with pytest.raises(InvalidGroup, match="ticket_mismatch") as caught:
        lie.decode(limits)
    assert caught.value.ticket_id == ticket.ticket_id


def test_q_01_a_reader_killed_between_read_and_ack_loses_nothing(run, dying_reader):
    tickets = run.queue(6)
    first, code = dying_reader("holds")
    assert (len(first), code) == (1, -signal.SIGKILL)
    rest, code = dying_reader("trains")
    assert code == 0
    assert sorted(first + rest) == sorted(ticket.ticket_id for ticket in tickets)
    assert run.ledger.counts()["trained"] == 6


def test_groups_that_are_finished_together_reach_the_disk_in_one_transaction(run, make_group):
    run.queue(1)  # the scripts are loaded by now
    run.issue(5)
    held = run.tasks().claim(5, 0)

    def transactions():
        return run.client.info("commandstats").get("cmdstat_exec", {"calls": 0})["calls"]

    before = transactions()
    assert all(run.writer.submit_many([(delivery, make_group(delivery.ticket)) for delivery in held]))
    assert transactions() == before + 1
    assert run.ledger.counts()["pending"] == 6


def test_q_02_a_lost_reply_leaves_one_group_and_no_waste(lossy, make_group):
    proxy, run = lossy
    run.queue(1)  # the scripts are loaded by now
    reader = run.reader()
    assert run.reader("warm").depth() == 1

    def lossily(call, *args):
        lost = proxy.lost
        proxy.lose_next_reply()
        answer = call(*args)
        assert proxy.lost == lost + 1
        return answer

    ids_before = run.ledger.next_ticket_ids(1)
    (after,) = lossily(run.ledger.next_ticket_ids, 1)
    assert after not in ids_before
    tickets = run.issue(2)
    tasks = run.tasks()
    held = tasks.claim(2, 0)
    assert [delivery.ticket for delivery in held] == tickets
    for delivery in held:
        assert lossily(run.writer.submit, delivery, make_group(delivery.ticket)) is True
    assert run.ledger.duplicates() == 0
    entries = read_all(reader)
    assert len(entries) == 3
    lossily(reader.complete, pairs(entries), Outcome.TRAINED, 1)
    counts = run.ledger.counts()
    assert (counts["issued"], counts["trained"], counts["pending"]) == (3, 3, 0)
    assert recompute(run.ledger.events()).balances


def test_q_02_issuing_through_a_lost_reply_issues_once(lossy, make_ticket):
    proxy, run = lossy
    run.issue(1)
    ticket = make_ticket(run.ledger.next_ticket_ids(1)[0])
    proxy.lose_next_reply()
    run.ledger.issue([ticket])
    assert proxy.lost == 1
    assert run.client.xlen(run.keys.tasks) == 2
    assert recompute(run.ledger.events()).issued == 2


def test_q_02_entries_of_a_lost_read_come_back_without_a_restart(lossy):
    proxy, run = lossy
    tickets = run.queue(2)
    reader = run.reader(claim_idle_s=0.1)
    reader.depth()
    assert reader._take_pending() is None  # so that the next reply is that of XREADGROUP
    proxy.lose_next_reply()
    entries = reader.read(8, 0)
    deadline = time.monotonic() + 10
    while len(entries) < 2 and time.monotonic() < deadline:
        entries += reader.read(8, 20)
    assert proxy.lost == 1
    assert ids(entries) == sorted(ticket.ticket_id for ticket in tickets)
    assert read_all(reader) == []
    time.sleep(0.15)
    assert read_all(reader) == []  # held entries are not handed out twice, however long training takes


def test_q_02_tickets_of_a_lost_claim_come_back_without_a_restart(lossy):
    proxy, run = lossy
    tasks = run.tasks(claim_idle_s=0.1)
    assert tasks.claim(1, 0) == []  # so that the next reply is that of XREADGROUP
    tickets = run.issue(2)
    proxy.lose_next_reply()
    claimed = tasks.claim(2, 0)
    deadline = time.monotonic() + 10
    while len(claimed) < 2 and time.monotonic() < deadline:
        claimed += tasks.claim(2, 20)
    assert proxy.lost == 1
    assert [delivery.ticket for delivery in claimed] == tickets


def test_q_05_streams_stay_bounded(run, make_group):
    reader, tasks = run.reader(), run.tasks()
    for _ in range(10):
        run.issue(100)
        for delivery in tasks.claim(100, 0):
            run.writer.submit_encoded(delivery, b"x")
        entries = read_all(reader, patience=1)
        assert reader.complete(pairs(entries), Outcome.TRAINED, 1) == 100
    for stream in (run.keys.tasks, run.keys.groups(0), run.keys.groups(1)):
        assert run.client.xlen(stream) == 0
        assert run.client.xpending(stream, "actors" if stream == run.keys.tasks else "learner")["pending"] == 0
    assert run.client.scard(run.keys.reserved) == 0
    assert not any(reader._held.values())
    assert run.ledger.counts()["trained"] == 1000


def test_q_08_undecodable_bytes_are_dead_lettered_and_others_proceed(run, make_group, limits):
    bad, good = run.issue(2)
    for delivery in run.tasks().claim(2, 0):
        if delivery.ticket == bad:
            assert run.writer.submit_encoded(delivery, b"\x80\x04junk")
        else:
            assert run.writer.submit(delivery, make_group(good))
    reader = run.reader()
    decoded = []
    for entry in read_all(reader):
        try:
            decoded.append(entry.decode(limits).ticket)
        except InvalidGroup as error:
            once = reader.dead_letter(entry, error.reason, error.detail)
            again = reader.dead_letter(entry, error.reason, error.detail)
    assert (once, again) == (True, False)
    assert decoded == [good]
    (letter,) = DeadLetters(run.client, run.keys).read()
    assert (letter.reason, letter.payload, letter.ticket_id) == ("unknown_schema", b"\x80\x04junk", bad.ticket_id)
    assert run.ledger.counts()["quarantined"] == 1


def test_q_08_an_entry_that_kills_its_reader_is_found_and_the_innocent_are_trained(run, dying_reader):
    tickets = run.issue(7)
    poison = tickets[3]
    for delivery in run.tasks().claim(7, 0):
        run.writer.submit_encoded(delivery, b"poison" if delivery.ticket == poison else b"good")
    trained, codes = [], []
    for _ in range(6):
        printed, code = dying_reader("decodes")
        trained += printed
        codes.append(code)
        if code == 0:
            break
    assert codes == [-signal.SIGKILL] * 3 + [0]  # max_deliveries of dying_reader
    assert sorted(trained) == sorted(ticket.ticket_id for ticket in tickets if ticket != poison)
    (letter,) = DeadLetters(run.client, run.keys).read()
    assert (letter.reason, letter.ticket_id) == ("poison", poison.ticket_id)
    counts = run.ledger.counts()
    assert (counts["trained"], counts["quarantined"], counts["pending"]) == (6, 1, 0)


def test_entries_held_through_many_restarts_are_no_poison(run):
    """A learner holds its pool until a checkpoint is durable; being killed often is no fault of the groups."""
    tickets = run.queue(3)
    for _ in range(10):
        assert len(read_all(run.reader(max_deliveries=2))) == 3
    assert len(DeadLetters(run.client, run.keys)) == 0
    assert run.ledger.counts()["pending"] == len(tickets)


def test_q_04_of_four_groups_one_done_and_one_unacknowledged_a_trim_to_one_loses_two(run):
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, partitions=1))
    tickets = run.queue(4)
    reader = run.reader()
    done, _unacknowledged = reader.read(2, 0)
    assert reader.complete(pairs([done]), Outcome.TRAINED, 1) == 1
    run.client.xtrim(run.keys.groups(0), maxlen=1, approximate=False)
    lost = run.ledger.missing()
    assert sorted(lost) == [ticket.ticket_id for ticket in tickets[1:3]]
    assert run.ledger.settle_many(lost, Outcome.FAILED, reason="entry_lost") == 2
    assert ids(read_all(run.reader())) == [tickets[3].ticket_id]
    counts = run.ledger.counts()
    assert (counts["trained"], counts["failed"], counts["pending"]) == (1, 2, 1)


def test_q_10_twenty_restarts_leave_one_consumer_on_each_stream(run):
    tickets = run.queue(8)
    for _ in range(20):
        assert ids(read_all(run.reader(), patience=1)) == sorted(ticket.ticket_id for ticket in tickets)
    for partition in range(run.config.partitions):
        assert len(run.client.xinfo_consumers(run.keys.groups(partition), "learner")) == 1


def test_q_12_groups_submitted_before_the_learner_starts_are_read(run):
    tickets = run.queue(5)
    assert ids(read_all(run.reader())) == sorted(ticket.ticket_id for ticket in tickets)


def test_entries_of_a_vanished_reader_are_claimed_by_another(run):
    tickets = run.queue(3)
    assert len(read_all(run.reader("vanished"))) == 3
    other = run.reader("other", claim_idle_s=0.05)
    entries = []
    deadline = time.monotonic() + 10
    while len(entries) < 3 and time.monotonic() < deadline:
        entries += other.read(3, 10)
    assert ids(entries) == sorted(ticket.ticket_id for ticket in tickets)


def test_read_gives_at_most_what_was_asked_for(run):
    tickets = run.queue(9)
    reader = run.reader()
    sizes, seen = [], []
    while entries := reader.read(1, 0):
        sizes.append(len(entries))
        seen += entries
        assert reader.depth() == 9 - len(seen)
    assert set(sizes) == {1}
    assert ids(seen) == sorted(ticket.ticket_id for ticket in tickets)


def test_both_partitions_are_used(run):
    run.queue(16)
    assert all(run.client.xlen(run.keys.groups(partition)) > 0 for partition in range(run.config.partitions))


@pytest.mark.parametrize("outcome", [Outcome.TRAINED, Outcome.EXPIRED])
def test_completing_a_forged_entry_settles_nothing(run, outcome):
    (ticket,) = run.queue(1)
    reader = run.reader()
    (entry,) = reader.read(1, 0)
    forged = dataclasses.replace(entry, entry_id="1-1")
    assert reader.complete(pairs([forged]), outcome, None) == 0
    assert not reader.dead_letter(forged, "bad", "")
    assert run.ledger.live()[ticket.ticket_id].state == "queued"


@pytest.mark.parametrize("fields", [{"payload": "x"}, {"ticket": "1-1", "payload": "x"}, {"ticket": b"\xff"}])
def test_an_entry_that_no_actor_submitted_never_reaches_the_learner(run, fields):
    """The forged copy of a queued ticket is put away; the ticket itself is untouched."""
    (ticket,) = run.queue(1)
    for partition in range(run.config.partitions):
        run.client.xadd(run.keys.groups(partition), fields)
    entries = read_all(run.reader())
    assert [entry.ticket for entry in entries] == [ticket]
    letters = DeadLetters(run.client, run.keys).read()
    assert [letter.reason for letter in letters] == ["not_live"] * run.config.partitions
    assert run.ledger.counts()["pending"] == 1


def test_reading_goes_on_after_redis_was_emptied(run, make_group):
    reader = run.reader()
    run.client.delete(*(run.keys.groups(partition) for partition in range(run.config.partitions)))
    assert reader.read(4, 0) == []
    run.queue(2)
    assert len(read_all(reader)) == 2
