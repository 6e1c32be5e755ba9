import math

import numpy as np
import pytest

from asyncrl_jax.actor.rewards import InvalidReward, weigh
from asyncrl_jax.config import RewardConfig

PARTS = {"final": 1.0, "step": 0.5, "format": 0.0, "tool": 1.0}


def test_weighted_sum():
    reward, parts = weigh(PARTS, RewardConfig(final=1.0, step=0.4, format=0.1, tool=0.1))
    assert reward == pytest.approx(1.0 + 0.4 * 0.5 + 0.1)
    np.testing.assert_array_equal(parts, np.array([1.0, 0.5, 0.0, 1.0], np.float32))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"final": math.nan}, "not_finite"),
        ({"final": math.inf}, "not_finite"),
        ({"final": np.float32("nan")}, "not_finite"),
        ({"final": None}, "not_a_number"),
        ({"final": "1"}, "not_a_number"),
        ({"final": True}, "not_a_number"),
        ({"step": 1.0001}, "out_of_range"),
        ({"step": -0.1}, "out_of_range"),
        ({"extra": 0.0}, "wrong_parts"),
    ],
)
def test_what_is_no_reward_is_refused_by_name(change, reason):
    with pytest.raises(InvalidReward) as caught:
        weigh(PARTS | change, RewardConfig())
    assert caught.value.reason == reason


def test_a_missing_part_is_refused():
    with pytest.raises(InvalidReward, match="wrong_parts"):
        weigh({"final": 1.0}, RewardConfig())
