"""The filter of rejection sampling: shares, duplicates, limits; a pure function."""

import collections

import numpy as np
import pytest

from asyncrl_jax.learner.quality import Band, Sample, quality_filter
from asyncrl_jax.types import Task
from tests.builders import make_trajectory


def sample(task: int, tokens: list[int], reward: float) -> Sample:
    versions = [-1] + [0] * (len(tokens) - 1)
    return Sample(
        Task("arithmetic", "train", 1, task), make_trajectory(tokens, versions, reward=reward, success=reward >= 1)
    )


def offered(num_tasks: int = 40, members: int = 8, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        sample(task, rng.integers(0, 50, 12).tolist(), float(rng.choice([0.0, 0.7, 1.6])))
        for task in range(num_tasks)
        for _ in range(members)
    ]


def test_bands_are_kept_five_to_three_to_two():
    kept = quality_filter(offered(), 40)
    assert collections.Counter(kept.bands) == {Band.HIGH: 20, Band.MIDDLE: 12, Band.LOW: 8}
    for band, one in zip(kept.bands, kept.samples, strict=True):
        assert {1.6: Band.HIGH, 0.7: Band.MIDDLE, 0.0: Band.LOW}[one.trajectory.reward] is band
    assert sum(kept.offered.values()) == 320


def test_negatives_do_not_outnumber_what_they_are_contrasted_with():
    few_good = [s for s in offered() if s.trajectory.reward < 1] + [sample(99, [1, 2, i], 1.6) for i in range(2)]
    kept = collections.Counter(quality_filter(few_good, 40).bands)
    assert kept == {Band.HIGH: 2, Band.MIDDLE: 12}  # 2 × 2 / 5 is less than one negative


def test_of_one_task_no_more_than_the_limit_and_of_equal_answers_one():
    same = [sample(0, [1, 2, 3], 1.6)] * 5 + [sample(0, [1, 2, i], 1.6) for i in range(4, 9)]
    kept = quality_filter([*same, *(sample(n, [1, 2, 3], 1.6) for n in range(1, 4))], 20, per_task=2)
    assert collections.Counter(s.task.index for s in kept.samples) == {0: 2, 1: 1, 2: 1, 3: 1}
    assert kept.duplicates == 4
    assert kept.num_tasks == 4


def test_a_solved_task_does_not_crowd_out_one_that_was_solved_once():
    many = [sample(0, [1, i, i], 1.6) for i in range(10)]
    kept = quality_filter([*many, sample(1, [1, 2, 3], 1.5), sample(2, [1, 2, 3], 1.2)], 6, per_task=9)
    assert [s.task.index for s in kept.samples] == [0, 1, 2]


def test_diversity_counts_distinct_ngrams_of_sampled_tokens():
    repetitive = [sample(n, [9, 1, 1, 1, 1, 1], 1.6) for n in range(4)]
    assert quality_filter(repetitive, 8, ngram=4).distinct_share == 1 / 8
    assert quality_filter([], 8).distinct_share == 0
    varied = [sample(n, [9, n, n + 1, n + 2, n + 3], 1.6) for n in range(4)]
    assert quality_filter(varied, 8, ngram=4).distinct_share == 1


def test_the_same_samples_in_the_same_order_give_the_same_result():
    first, second = (
        [(s.task, s.trajectory.tokens.tolist()) for s in quality_filter(offered(), 30).samples] for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("wrong", [{"num": 0}, {"shares": (0, 1, 1)}, {"per_task": 0}, {"low_reward": 2.0}])
def test_numbers_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="shares="):
        quality_filter([], **({"num": 8} | wrong))
