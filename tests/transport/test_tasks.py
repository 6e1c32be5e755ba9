"""The tasks stream: tickets are handed out, held, given back, and never lost."""

from __future__ import annotations

import threading
import time

import pytest

from asyncrl_jax.transport.dead_letters import DeadLetters
from asyncrl_jax.types import Outcome


def ids(deliveries) -> list[str]:
    return [delivery.ticket.ticket_id for delivery in deliveries]


def test_q_12_tickets_issued_before_the_first_actor_are_claimed(run):
    tickets = run.issue(3)
    assert [delivery.ticket for delivery in run.tasks().claim(10, 0)] == tickets


def test_two_actors_share_the_tickets(run):
    run.issue(4)
    first, second = run.tasks("actor-0"), run.tasks("actor-1")
    assert ids(first.claim(2, 0)) + ids(second.claim(9, 0)) == ["1-1", "1-2", "1-3", "1-4"]
    assert first.claim(2, 0) == []


def test_q_01_a_restarted_actor_gets_back_what_it_held(run):
    run.issue(5)
    assert ids(run.tasks().claim(3, 0)) == ["1-1", "1-2", "1-3"]
    again = run.tasks()  # the earlier process is gone without a word
    assert ids(again.claim(2, 0)) == ["1-1", "1-2"]
    rest = again.claim(9, 0)
    assert ids(rest) == ["1-3", "1-4", "1-5"]
    assert [delivery.deliveries for delivery in rest] == [2, 1, 1]


def test_an_idle_ticket_goes_to_another_actor_and_a_kept_one_does_not(run):
    run.issue(2)
    slow = run.tasks("slow", claim_idle_s=0.2)
    kept, left = slow.claim(2, 0)
    other = run.tasks("other", claim_idle_s=0.2)
    claimed = []
    deadline = time.monotonic() + 10
    while not claimed and time.monotonic() < deadline:
        assert kept in slow.keep_alive([kept])
        claimed = other.claim(2, 20)
    assert [(delivery.ticket, delivery.deliveries) for delivery in claimed] == [(left.ticket, 2)]
    assert slow.keep_alive([kept, left]) == [kept]
    assert not slow.release(left)  # it is another's now
    assert not slow.fail(left, "late")
    assert other.keep_alive(claimed) == claimed


def test_q_08_a_ticket_that_kills_its_actors_fails_and_the_others_go_on(run):
    poison, good = run.issue(2)
    for _ in range(3):
        delivery = run.tasks(max_deliveries=3).claim(1, 0)[0]  # and the process dies
        assert delivery.ticket == poison
    assert [d.ticket for d in run.tasks(max_deliveries=3).claim(9, 0)] == [good]
    (letter,) = DeadLetters(run.client, run.keys).read()
    assert (letter.reason, letter.ticket_id) == ("max_deliveries", poison.ticket_id)
    assert run.ledger.counts()[Outcome.FAILED.value] == 1


def test_a_released_ticket_is_claimed_at_once_and_its_history_stays(run):
    (ticket,) = run.issue(1)
    run.tasks("crashed").claim(1, 0)
    leaving = run.tasks("crashed")
    (delivery,) = leaving.claim(1, 0)
    assert delivery.deliveries == 2
    assert leaving.release(delivery)
    assert not leaving.release(delivery)
    (again,) = run.tasks("other").claim(1, 0)
    assert (again.ticket, again.deliveries) == (ticket, 2)  # the release itself does not count


def test_failing_settles_unless_the_group_is_queued_already(run, make_group):
    run.issue(2)
    tasks = run.tasks()
    failing, queued = tasks.claim(2, 0)
    assert tasks.fail(failing, "environment raised")
    assert not tasks.fail(failing, "environment raised")
    assert run.writer.submit(queued, make_group(queued.ticket))
    assert not tasks.fail(queued, "too late")
    counts = run.ledger.counts()
    assert (counts["failed"], counts["pending"]) == (1, 1)
    assert run.ledger.events()[-1].reason == "environment raised"


def test_q_10_twenty_restarts_leave_one_consumer(run):
    run.issue(1)
    for _ in range(20):
        assert len(run.tasks(max_deliveries=100).claim(1, 0)) == 1
    assert len(run.client.xinfo_consumers(run.keys.tasks, "actors")) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"x": "y"},
        {"ticket": "1-99", "payload": "x"},
        {"ticket": b"\xff\xfe", "payload": b"\0" * 100, "deliveries": "many"},
        {"ticket": "1-1", "payload": "forged copy of a live ticket"},
        {f"f{n}": "v" for n in range(9000)},
    ],
    ids=["no_ticket", "unknown", "bytes", "forged", "wide"],
)
def test_an_entry_that_the_ledger_did_not_write_is_put_away(run, fields):
    (ticket,) = run.issue(1)
    run.client.xadd(run.keys.tasks, fields)
    assert [d.ticket for d in run.tasks().claim(9, 0)] == [ticket]
    assert run.client.xlen(run.keys.tasks) == 1
    assert len(DeadLetters(run.client, run.keys)) == 1
    assert run.ledger.counts()["pending"] == 1


def test_a_copy_of_a_live_tickets_entry_is_not_handed_out(run):
    (ticket,) = run.issue(1)
    ((_, fields),) = run.client.xrange(run.keys.tasks)
    run.client.xadd(run.keys.tasks, fields)
    assert [d.ticket for d in run.tasks().claim(9, 0)] == [ticket]


def test_q_04_a_pending_entry_that_someone_deleted_does_not_stay_pending(run, caplog):
    run.issue(2)
    first, second = run.tasks().claim(2, 0)
    run.client.xdel(run.keys.tasks, first.entry_id)
    assert [d.ticket for d in run.tasks().claim(2, 0)] == [second.ticket]
    assert run.client.xpending(run.keys.tasks, "actors")["pending"] == 1
    assert first.entry_id in caplog.text
    assert run.ledger.missing() == [first.ticket.ticket_id]


def test_claims_go_on_after_redis_was_emptied(run):
    tasks = run.tasks()
    run.client.delete(run.keys.tasks)
    assert tasks.claim(1, 0) == []
    (ticket,) = run.issue(1)
    assert [d.ticket for d in tasks.claim(1, 0)] == [ticket]
    run.client.delete(run.keys.tasks)
    assert tasks.keep_alive([]) == []
    assert tasks.claim(1, 0) == []


def test_q_13_a_reader_that_waits_while_redis_is_emptied_waits_on(run):
    """Redis unblocks it with an error of its own; the next ticket still arrives."""
    stream = run.tasks()
    assert stream.claim(1, 0) == []
    emptied = threading.Timer(0.2, lambda: run.client.delete(run.keys.tasks))
    emptied.start()
    assert stream.claim(1, 600) == []
    emptied.join()
    (ticket,) = run.issue(1)
    assert [delivery.ticket for delivery in stream.claim(1, 1000)] == [ticket]
