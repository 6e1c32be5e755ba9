"""The ticket ledger: every ticket is live or has one outcome, whatever is repeated or lost."""

from __future__ import annotations

import random

import pytest

from asyncrl_jax.transport.codec import InvalidGroup
from asyncrl_jax.transport.ledger import LedgerEvent, recompute
from asyncrl_jax.types import Outcome


def assert_balances(run) -> None:
    """The events, the counters and the live tickets tell one story."""
    recomputed = recompute(run.ledger.events(count=100_000))
    assert recomputed.balances
    counts = run.ledger.counts()
    assert counts["issued"] == recomputed.issued
    assert counts["pending"] == recomputed.pending == len(run.ledger.live())
    assert {outcome: counts[outcome.value] for outcome in Outcome} == recomputed.outcomes
    assert run.ledger.missing() == []


def num_entries(run) -> int:
    """Task and group entries left in the streams."""
    return run.client.xlen(run.keys.tasks) + sum(
        run.client.xlen(run.keys.groups(partition)) for partition in range(run.config.partitions)
    )


def test_ids_are_unique_and_name_the_epoch(run):
    first, second = run.ledger.next_ticket_ids(3), run.ledger.next_ticket_ids(2)
    assert first + second == ["1-1", "1-2", "1-3", "1-4", "1-5"]
    run.client.set(run.keys.epoch, 7)
    assert run.ledger.next_ticket_ids(1) == ["7-6"]
    assert run.ledger.next_ticket_ids(0) == []


def test_issuing_twice_issues_once(run, make_ticket):
    tickets = [make_ticket(ticket_id) for ticket_id in run.ledger.next_ticket_ids(3)]
    assert run.ledger.issue(tickets[:2]) == 2
    assert run.ledger.issue(tickets) == 1
    assert run.ledger.settle(tickets[0].ticket_id, Outcome.EXPIRED)
    assert run.ledger.issue(tickets) == 0  # a settled ticket does not come back to life
    assert run.client.xlen(run.keys.tasks) == 2
    assert_balances(run)


def test_an_id_that_was_never_reserved_is_refused(run, make_ticket):
    (ticket_id,) = run.ledger.next_ticket_ids(1)
    for stranger in ("1-2", "2-1"):
        with pytest.raises(RuntimeError, match=stranger):
            run.ledger.issue([make_ticket(ticket_id), make_ticket(stranger)])
    with pytest.raises(InvalidGroup, match="bad_ticket"):
        run.ledger.issue([make_ticket(ticket_id), make_ticket("1-1", temperature=-1.0)])
    assert run.ledger.counts()["issued"] == 0
    assert run.ledger.live() == {}


def test_a_ticket_is_settled_once_and_leaves_nothing_behind(run):
    in_stream, claimed, queued = run.queue(1)[0], *run.issue(2)
    in_stream, queued = queued, in_stream  # `queue` came first, so it could claim its own
    (delivery,) = run.tasks().claim(1, 0)
    assert delivery.ticket == claimed
    for ticket, outcome in ((in_stream, Outcome.FAILED), (claimed, Outcome.EXPIRED), (queued, Outcome.FILTERED)):
        assert run.ledger.settle(ticket.ticket_id, outcome, reason="why", update=3)
        assert not run.ledger.settle(ticket.ticket_id, Outcome.TRAINED)
    assert num_entries(run) == 0
    assert run.tasks().keep_alive([delivery]) == []  # its holder learns that the work is in vain
    assert recompute(run.ledger.events()).outcomes[Outcome.TRAINED] == 0
    assert_balances(run)


def test_live_tells_the_state_and_place(run):
    (queued,), (issued,) = run.queue(1), run.issue(1)
    live = run.ledger.live()
    assert live[issued.ticket_id].ticket == issued
    assert (live[issued.ticket_id].state, live[issued.ticket_id].group_entry) == ("issued", None)
    assert (live[queued.ticket_id].state, live[queued.ticket_id].task_entry) == ("queued", None)
    place = live[queued.ticket_id]
    assert len(run.client.xrange(run.keys.groups(place.partition), place.group_entry, place.group_entry)) == 1
    assert run.client.xrange(run.keys.tasks)[0][0].decode() == live[issued.ticket_id].task_entry


def test_events_are_read_in_pages_and_discarded(run):
    tickets = run.issue(5)
    assert run.ledger.settle_many([ticket.ticket_id for ticket in tickets], Outcome.TRAINED, update=9) == 5
    first = run.ledger.events(count=6)
    rest = run.ledger.events(after=first[-1].event_id)
    assert [event.kind for event in first + rest] == ["issued"] * 5 + ["outcome"] * 5
    assert [event.ticket for event in first[:5]] == tickets
    assert {(event.outcome, event.update) for event in rest} == {(Outcome.TRAINED, 9)}
    assert run.ledger.discard_events([event.event_id for event in first]) == 6
    assert run.ledger.events() == rest
    assert recompute(first + rest + rest).balances  # from files and Redis together, with an overlap


def test_recompute_finds_what_cannot_be():
    def event(n, ticket_id, outcome=None):
        return LedgerEvent(f"{n}-0", "outcome" if outcome else "issued", ticket_id, outcome=outcome)

    good = [event(1, "1-1"), event(2, "1-2"), event(10, "1-1", Outcome.TRAINED)]
    counts = recompute(reversed(good))
    assert (counts.issued, counts.pending, counts.outcomes[Outcome.TRAINED], counts.balances) == (2, 1, 1, True)
    twice = recompute([*good, event(9, "1-1", Outcome.UNDONE)])
    assert (twice.settled_twice, twice.balances) == (("1-1",), False)
    assert (twice.outcomes[Outcome.UNDONE], twice.outcomes[Outcome.TRAINED]) == (1, 0)  # the first counts: 9 before 10
    stranger = recompute([*good, event(11, "1-9", Outcome.FAILED)])
    assert (stranger.unissued, stranger.balances) == (("1-9",), False)


def test_q_04_entries_trimmed_by_someone_else_are_found(run):
    tickets = run.issue(4)
    assert len(run.tasks().claim(1, 0)) == 1
    run.client.xtrim(run.keys.tasks, maxlen=1, approximate=False)
    lost = run.ledger.missing()
    assert sorted(lost) == sorted(ticket.ticket_id for ticket in tickets[:3])  # one unacknowledged, two unread
    assert run.ledger.settle_many(lost, Outcome.FAILED, reason="lost") == 3
    assert [d.ticket for d in run.tasks(claim_idle_s=0.001).claim(4, 0)] == tickets[3:]
    assert_balances(run)


def test_the_ledger_balances_after_any_sequence_of_calls(run, make_group):
    """Random walk over everything that moves a ticket, with every call made twice."""
    rng = random.Random(3)
    actors = [run.tasks(f"actor-{n}", claim_idle_s=0.001) for n in range(2)]
    reader = run.reader(claim_idle_s=1000)
    held, entries = [], []

    def twice(call, *args, **kwargs):
        call(*args, **kwargs)
        call(*args, **kwargs)

    for _ in range(150):
        match rng.randrange(8):
            case 0 | 1:
                run.issue(rng.randint(1, 4))
            case 2:
                actor = rng.choice(actors)
                held += [(actor, delivery) for delivery in actor.claim(rng.randint(1, 3), 0)]
            case 3 | 4 if held:
                _, delivery = rng.choice(held)
                twice(run.writer.submit, delivery, make_group(delivery.ticket))
            case 5 if held:
                actor, delivery = held.pop(rng.randrange(len(held)))
                twice(rng.choice([actor.release, lambda d, actor=actor: actor.fail(d, "tired")]), delivery)
            case 6:
                entries += reader.read(4, 0)
                if entries:
                    entry = entries.pop()
                    if rng.random() < 0.3:
                        twice(reader.dead_letter, entry, "bad", "detail")
                    else:
                        twice(reader.complete, [(entry, entry.ticket.ticket_id)], Outcome.TRAINED, 5)
            case 7:
                if live := list(run.ledger.live()):
                    twice(run.ledger.settle, rng.choice(live), rng.choice(list(Outcome)))
    assert_balances(run)
    counts = run.ledger.counts()
    assert min(counts["issued"], counts["trained"], counts["failed"], counts["quarantined"]) > 0
    assert num_entries(run) == counts["pending"]
    run.ledger.settle_many(list(run.ledger.live()), Outcome.EXPIRED)
    assert num_entries(run) == 0
    assert_balances(run)
