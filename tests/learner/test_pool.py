"""The pool: fixed order, uses counted, nothing dropped on its own."""

import dataclasses

import numpy as np
import pytest

from asyncrl_jax.config_data import PoolConfig
from asyncrl_jax.learner.pool import Moment, Pool, PooledGroup, Traits, bucket_of
from asyncrl_jax.types import Group, Task, Ticket

TRAITS = Traits(signal=0.5, reward=0.5, success=0.5, length=20.0, sampled_tokens=30, zero_variance=False)


def pooled(count: int, deadline: int, level: int = 1, **traits) -> PooledGroup:
    ticket = Ticket(f"1-{count}", Task("arithmetic", "train", level, count), 2, 0, 0, deadline, 1.0, 0, 0.0)
    return PooledGroup(Group(ticket, (), "actor-0"), None, (0,), 0.0, dataclasses.replace(TRAITS, **traits))


def moment(update: int = 0, seed: int = 0, **bucket_weights: float) -> Moment:
    """As if every group had been sampled with v0, on a line where deadlines are those of the tickets."""
    return Moment(
        bucket_weights=lambda: bucket_weights or {bucket_of("arithmetic", level): 1.0 for level in (1, 2, 3)},
        lag=lambda p: update,
        last_chance=lambda p: p.group.ticket.deadline <= update,
        seed=seed,
    )


def filled(deadlines: dict[int, int], replay_ratio: int = 1, draw: str = "fifo") -> Pool:
    pool = Pool(replay_ratio, PoolConfig(draw=draw))
    for count, deadline in deadlines.items():
        pool.add(pooled(count, deadline))
    return pool


def taken(pool: Pool, num: int, at: Moment | None = None) -> list[str]:
    return [drawn.pooled.ticket_id for drawn in pool.draw(num, at or moment())]


def test_fifo_is_by_deadline_then_ticket_whatever_the_order_of_arrival():
    deadlines = {10: 5, 9: 5, 2: 7, 30: 4, 8: 5}
    drawn = taken(filled(deadlines), 4)
    assert drawn == ["1-30", "1-8", "1-9", "1-10"]
    order = np.random.default_rng(0).permutation(list(deadlines))
    assert taken(filled({int(c): deadlines[int(c)] for c in order}), 4) == drawn


def test_strata_do_not_depend_on_the_order_of_arrival_and_keep_the_order_of_deadlines():
    deadlines = {count: int(deadline) for count, deadline in enumerate(np.random.default_rng(1).integers(3, 9, 30))}
    drawn = taken(filled(deadlines, draw="strata"), 8)
    order = np.random.default_rng(0).permutation(list(deadlines))
    assert taken(filled({int(c): deadlines[int(c)] for c in order}, draw="strata"), 8) == drawn
    assert [deadlines[int(name.split("-")[1])] for name in drawn] == sorted(
        deadlines[int(name.split("-")[1])] for name in drawn
    )
    assert taken(filled(deadlines, draw="strata"), 8, moment(seed=1)) != drawn


def test_what_is_on_its_last_chance_is_taken_and_one_that_was_used_is_not_rescued():
    pool = filled(dict.fromkeys(range(20), 9) | {20: 4, 21: 4}, replay_ratio=2, draw="strata")
    pool._groups["1-21"].uses = 1
    drawn = taken(pool, 2, moment(update=4))
    assert "1-20" in drawn
    alone = filled({1: 4, 2: 4}, replay_ratio=2, draw="strata")
    alone._groups["1-2"].uses = 1
    assert all(taken(alone, 1, dataclasses.replace(moment(update=4), seed=seed)) == ["1-1"] for seed in (0,))


def test_a_pool_of_exactly_one_update_is_taken_whole_with_weight_one():
    drawn = filled({1: 5, 2: 5}, draw="strata").draw(2, moment())
    assert [d.weight for d in drawn] == [1.0, 1.0]


def test_a_group_is_used_at_most_replay_ratio_times():
    pool = filled({1: 5, 2: 6}, replay_ratio=2)
    assert pool.uses_left == 4
    assert taken(pool, 1) == ["1-1"]
    assert [d.pooled.uses for d in pool.draw(2, moment())] == [2, 1]
    assert "1-1" not in pool
    assert pool.uses_left == 1
    assert [d.pooled.uses for d in pool.draw(1, moment())] == [2]
    assert len(pool) == 0


@pytest.mark.parametrize("draw", ["fifo", "strata"])
def test_one_ticket_is_pooled_once_and_too_large_a_draw_is_refused(draw):
    pool = filled({1: 5}, draw=draw)
    with pytest.raises(RuntimeError, match="pooled twice"):
        pool.add(pooled(1, 5))
    with pytest.raises(RuntimeError, match="asked for 2 groups, 1 are pooled"):
        pool.draw(2, moment())


def test_take_if_takes_exactly_what_is_named():
    pool = filled({1: 5, 2: 6, 3: 7})
    out = pool.take_if(lambda p: p.group.ticket.deadline < 7)
    assert [p.ticket_id for p in out] == ["1-1", "1-2"]
    assert len(pool) == 1


def test_uses_survive_being_pooled_again():
    pool = Pool(2, PoolConfig())
    pool.add(dataclasses.replace(pooled(1, 5), uses=1))
    assert pool.draw(1, moment())[0].pooled.uses == 2
    assert len(pool) == 0
