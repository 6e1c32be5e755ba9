"""How many episodes start, by what they want of the engine."""

import pytest

from asyncrl_jax.actor.concurrency import WINDOW_S, Concurrency


def settle(concurrency, share, windows=400):
    """Episodes after a while, when each wants tokens for `share` of its time."""
    now, episodes = 0.0, 0
    for _ in range(windows):
        now += WINDOW_S / 5
        episodes += concurrency.room(now, episodes, round(episodes * share), 0)
    return episodes


def test_as_many_episodes_as_slots_where_no_more_are_allowed():
    concurrency = Concurrency(64, 0, queue_share=0.25)
    assert concurrency.room(0.0, 0, 0, 0) == 64
    assert concurrency.room(0.0, 60, 60, 0) == 4
    assert concurrency.room(0.0, 64, 1, 0) == 0  # environments are slow, but more were not asked for


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_demand_settles_at_the_slots_and_the_queue_that_was_asked_for(share):
    episodes = settle(Concurrency(64, 10_000, queue_share=0.25), share)
    assert 64 <= episodes * share <= 64 * 1.25 + 2


def test_never_more_than_the_most():
    assert settle(Concurrency(64, 300, queue_share=0.25), 0.01) == 300


def test_the_number_rises_by_half_the_slots_in_one_window_and_what_ended_is_made_up_for():
    """Those that have just started all want tokens at once."""
    concurrency = Concurrency(8, 1000, queue_share=4.0)
    assert concurrency.room(0.0, 8, 0, 0) == 4
    assert concurrency.room(WINDOW_S / 2, 12, 0, 0) == 0
    assert concurrency.room(WINDOW_S / 2, 9, 0, 0) == 3
    assert concurrency.room(WINDOW_S, 12, 0, 0) == 4


def test_a_demand_that_comes_and_goes_is_judged_by_its_mean():
    """Else every burst of new episodes would keep the host below its target."""
    concurrency, now, episodes = Concurrency(64, 10_000, queue_share=0.25), 0.0, 0
    for tick in range(2000):
        now += WINDOW_S / 20
        demand = round(episodes * 0.1 * (1.8 if tick % 10 < 5 else 0.2))
        episodes += concurrency.room(now, episodes, demand, 0)
    assert 64 <= episodes * 0.1 <= 64 * 1.25 * 1.2


def test_nothing_starts_while_sequences_hold_all_the_memory_that_they_may():
    concurrency = Concurrency(64, 1000, queue_share=0.25, kv_tokens=5000)
    assert concurrency.room(0.0, 10, 10, 5000) == 0
    assert concurrency.room(0.1, 10, 10, 4999) == 54
