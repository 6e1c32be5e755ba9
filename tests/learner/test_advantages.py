import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_jax.learner.advantages import group_advantages

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8)


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-6])
@pytest.mark.parametrize(("size", "reward"), [(7, np.float32(0.7)), (3, 0.1), (4, 1.0), (4, 0.0)])
def test_loss_06_equal_rewards_give_exactly_zero(size, reward, eps):
    """LOSS-06. The mean of three 0.1 is off by an ulp, and so the deviation is not 0."""
    advantages = group_advantages(np.full(size, reward), eps)
    np.testing.assert_array_equal(advantages, np.zeros(size, np.float32), strict=True)


def test_loss_20_the_deviation_is_the_populations():
    """LOSS-20. A sample deviation would give ±0.7071."""
    np.testing.assert_allclose(group_advantages(np.array([1.0, 0.0]), 1e-6), [1.0, -1.0], atol=1e-5)


@pytest.mark.parametrize(("std", "expected"), [("population", 1.0), ("sample", 0.70710678), ("none", 0.5)])
def test_loss_20_every_choice_of_deviation_is_stated(std, expected):
    """LOSS-20. Rewards 1 and 0."""
    np.testing.assert_allclose(group_advantages(np.array([1.0, 0.0]), 0.0, std), [expected, -expected], rtol=1e-6)
    with pytest.raises(ValueError, match="population, sample, none"):
        group_advantages(np.array([1.0, 0.0]), 0.0, "mad")


def test_eps_is_added_to_the_deviation():
    np.testing.assert_allclose(group_advantages(np.array([1.0, 0.0]), 0.5), [0.5, -0.5])


def test_loss_18_the_baseline_is_the_mean_of_all_members():
    """LOSS-18. Mean 1, deviation √3."""
    expected = np.array([-1, -1, -1, 3]) / np.sqrt(3)
    np.testing.assert_allclose(group_advantages(np.array([0, 0, 0, 4.0]), 0.0), expected, rtol=1e-6)


@given(REWARDS, st.randoms(use_true_random=False))
def test_permuting_the_members_permutes_the_advantages(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    rewards = np.array(rewards)
    np.testing.assert_allclose(
        group_advantages(rewards[order], 1e-3), group_advantages(rewards, 1e-3)[order], atol=1e-5
    )


@given(REWARDS)
def test_advantages_sum_to_zero(rewards):
    assert abs(group_advantages(np.array(rewards), 1e-3).sum()) < 1e-4


@pytest.mark.parametrize("rewards", [[], [[1.0]], [1.0, float("nan")], [float("inf"), 0.0]])
def test_bad_rewards_are_refused(rewards):
    with pytest.raises(ValueError, match="rewards"):
        group_advantages(np.array(rewards), 1e-6)
