"""What is wrong in Redis is told, and told again, and never fills the disk with it."""

import logging

from asyncrl_jax.transport.repeats import Repeats


def line(text):
    return logging.LogRecord("asyncrl_jax", logging.ERROR, __file__, 1, "wrong: %s", (text,), None)


def test_the_same_line_is_told_once_in_ten_seconds_and_another_at_once():
    now = [0.0]
    repeats = Repeats(clock=lambda: now[0])
    told = []
    for now[0] in range(25):
        told += [(now[0], text) for text in ("a", "b") if (text == "a" or now[0] == 3) and repeats.filter(line(text))]
    assert told == [(0, "a"), (3, "b"), (10, "a"), (20, "a")]


def test_many_different_lines_do_not_fill_the_memory():
    repeats = Repeats()
    assert all(repeats.filter(line(number)) for number in range(5000))
    assert len(repeats._told_at) <= 1000


def test_a_learners_state_that_is_none_is_one_line_however_often_it_is_looked_at(run, caplog):
    run.client.set(run.keys.learner, f"no state {run.keys.namespace}")
    assert [run.control.learner() for _ in range(50)] == [None] * 50
    assert sum("LearnerState" in record.getMessage() for record in caplog.records) == 1
