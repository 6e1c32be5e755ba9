"""Lag of tokens, and what the bound leaves of a group."""

import dataclasses

import numpy as np

from asyncrl_jax.learner.progress import Progress, lag_statistics
from asyncrl_jax.learner.staleness import Staleness
from asyncrl_jax.types import Exploration, Line, Task, Ticket, Trajectory, WeightVersion
from tests.builders import make_trajectory

VERSIONS = {n: WeightVersion(n, n - 1 if n else None, 0, n, "") for n in range(8)}


def trajectory(versions: list[int]) -> Trajectory:
    return make_trajectory(np.zeros(len(versions)), versions)


def test_wgt_06_a_trajectory_that_spans_versions_has_a_lag_per_token():
    staleness = Staleness(VERSIONS, {0: Line(0)}, most=4)
    lags = staleness.token_lags(trajectory([-1, 3, 3, -1, 5]), line=0, update=6)
    assert lags.tolist() == [0, 3, 3, 0, 1]


def test_obs_03_lag_statistics_are_of_tokens():
    progress = Progress()
    progress.count_lags(np.array([3, 3, 1]), bound=4)
    assert lag_statistics(progress.lag_histogram) == {"mean": 7 / 3, "p95": 3.0, "max": 3.0}
    assert (progress.tokens_trained, progress.over_bound_tokens) == (3, 0)
    progress.count_lags(np.array([5, 2]), bound=4)
    assert (progress.tokens_trained, progress.over_bound_tokens) == (5, 1)
    assert Progress.from_json(progress.to_json()) == progress


def test_an_over_age_token_leaves_the_loss_or_takes_its_group_along_as_the_policy_says():
    old_and_new = trajectory([-1, 0, 5])
    expire = Staleness(VERSIONS, {0: Line(0)}, most=4)
    mask = Staleness(VERSIONS, {0: Line(0)}, most=4, mask_over_age=True)
    lags = mask.token_lags(old_and_new, line=0, update=6)
    assert mask.trainable_mask(old_and_new, lags, 4).tolist() == [0, 0, 1]
    assert expire.is_unusable((0, 5), line=0, update=6, bound=4)
    assert not mask.is_unusable((0, 5), line=0, update=6, bound=4)
    assert mask.is_unusable((0, 1), line=0, update=6, bound=4)
    assert not expire.is_unusable((2, 5), line=0, update=6, bound=4)


def test_the_bound_itself_is_within_the_bound():
    at_bound = trajectory([2, 1])
    for mask_over_age in (False, True):
        staleness = Staleness(VERSIONS, {0: Line(0)}, most=4, mask_over_age=mask_over_age)
        lags = staleness.token_lags(at_bound, line=0, update=6)
        assert staleness.trainable_mask(at_bound, lags, 4).tolist() == [1, 0]
        assert not staleness.is_unusable((2,), line=0, update=6, bound=4)
        assert staleness.is_unusable((1,), line=0, update=6, bound=4)
    progress = Progress()
    progress.count_lags(lags, bound=4)
    assert (progress.tokens_trained, progress.over_bound_tokens) == (2, 1)


def test_orch_12_lag_counts_updates_however_often_versions_are_published():
    for every in (1, 2, 4):
        versions = {number: WeightVersion(number, None, 0, every * number, "") for number in range(9)}
        staleness = Staleness(versions, {0: Line(0)}, most=4)
        number = 4 // every  # the version of update 4
        assert staleness.version_lag(number, line=0, update=8) == 4
        assert not staleness.is_unusable((number,), line=0, update=8, bound=4)
        assert staleness.is_unusable((number,), line=0, update=9, bound=4)


def test_a_ticket_keeps_the_bound_that_it_was_issued_with():
    staleness = Staleness(VERSIONS, {0: Line(0)}, most=6)
    ticket = Ticket("1-1", Task("sums", "train", 1, 1), 2, 0, 3, 5, 1.0, 0, 0.0)
    assert staleness.bound(ticket) == 2
    assert staleness.bound(dataclasses.replace(ticket, deadline=100)) == 6, "never more than may be in force at all"


def test_work_of_an_abandoned_line_counts_its_true_distance():
    lines = {0: Line(0), 1: Line(1, parent=0, fork_update=4)}
    versions = VERSIONS | {8: WeightVersion(8, 4, 1, 4, "")}
    staleness = Staleness(versions, lines, most=4)
    assert staleness.token_lags(trajectory([7, 3, 8]), line=1, update=5).tolist() == [3 + 1, 2, 1]


def test_a_token_of_an_older_policy_that_explores_is_trained_on_beyond_the_bound_and_counted_apart():
    staleness = Staleness(VERSIONS, {0: Line(0)}, most=4)
    explored = dataclasses.replace(trajectory([-1, 0, 0]), exploration=Exploration.OLDER)
    lags = staleness.token_lags(explored, line=0, update=6)
    assert staleness.trainable_mask(explored, lags, 4).tolist() == [0, 1, 1]
    uniform = dataclasses.replace(explored, exploration=Exploration.UNIFORM)
    assert staleness.trainable_mask(uniform, lags, 4).tolist() == [0, 0, 0]
    progress = Progress()
    progress.count_lags(np.array([1]), bound=4)
    progress.count_explored(2)
    assert (progress.tokens_trained, progress.tokens_explored, progress.over_bound_tokens) == (3, 2, 0)
    assert progress.lag_histogram == {1: 1}
    assert Progress.from_json(progress.to_json()) == progress
