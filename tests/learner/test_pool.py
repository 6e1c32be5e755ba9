"""The pool: fixed order, uses counted, nothing dropped on its own."""

import dataclasses

import numpy as np
import pytest

from asyncrl_jax.learner.pool import Pool, PooledGroup
from asyncrl_jax.types import Group, Task, Ticket


def pooled(count: int, deadline: int) -> PooledGroup:
    ticket = Ticket(f"1-{count}", Task("arithmetic", "train", 1, count), 2, 0, 0, deadline, 1.0, 0, 0.0)
    return PooledGroup(Group(ticket, (), "actor-0"), entry=None, versions=(0,), dequeued_at=0.0)


def filled(deadlines: dict[int, int], replay_ratio: int = 1) -> Pool:
    pool = Pool(replay_ratio)
    for count, deadline in deadlines.items():
        pool.add(pooled(count, deadline))
    return pool


def test_the_draw_is_by_deadline_then_ticket_whatever_the_order_of_arrival():
    deadlines = {10: 5, 9: 5, 2: 7, 30: 4, 8: 5}
    drawn = [p.ticket_id for p in filled(deadlines).draw(4)]
    assert drawn == ["1-30", "1-8", "1-9", "1-10"]
    order = np.random.default_rng(0).permutation(list(deadlines))
    assert [p.ticket_id for p in filled({int(c): deadlines[int(c)] for c in order}).draw(4)] == drawn


def test_a_group_is_used_at_most_replay_ratio_times():
    pool = filled({1: 5, 2: 6}, replay_ratio=2)
    assert [p.ticket_id for p in pool.draw(1)] == ["1-1"]
    assert [p.uses for p in pool.draw(2)] == [2, 1]
    assert "1-1" not in pool
    assert [p.uses for p in pool.draw(1)] == [2]
    assert len(pool) == 0


def test_one_ticket_is_pooled_once_and_too_large_a_draw_is_refused():
    pool = filled({1: 5})
    with pytest.raises(RuntimeError, match="pooled twice"):
        pool.add(pooled(1, 5))
    with pytest.raises(RuntimeError, match="asked for 2 groups, 1 are pooled"):
        pool.draw(2)


def test_take_if_takes_exactly_what_is_named():
    pool = filled({1: 5, 2: 6, 3: 7})
    taken = pool.take_if(lambda p: p.group.ticket.deadline < 7)
    assert [p.ticket_id for p in taken] == ["1-1", "1-2"]
    assert len(pool) == 1


def test_uses_survive_being_pooled_again():
    pool = Pool(2)
    pool.add(dataclasses.replace(pooled(1, 5), uses=1))
    assert pool.draw(1)[0].uses == 2
    assert len(pool) == 0
