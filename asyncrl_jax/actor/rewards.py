"""The reward of an episode: a weighted sum of parts, each checked before it counts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from asyncrl_jax.config import RewardConfig
from asyncrl_jax.types import REWARD_PARTS


class InvalidReward(ValueError):
    """A scorer returned something that is no reward; `reason` is a short stable name."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def weigh(parts: Mapping[str, float], config: RewardConfig) -> tuple[float, np.ndarray]:
    """The reward and its parts in the order of REWARD_PARTS, float32 [P].

    Nothing is repaired: a part that a scorer could not compute must not become a 0 that the policy is punished with.

    Raises:
      InvalidReward: when a part is missing, unknown, no number, not finite or outside [0, 1].
    """
    if set(parts) != set(REWARD_PARTS):
        raise InvalidReward("wrong_parts", f"got {sorted(parts)}, need {sorted(REWARD_PARTS)}")
    for name, value in parts.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
            raise InvalidReward("not_a_number", f"{name}={value!r}")
        if not math.isfinite(value):
            raise InvalidReward("not_finite", f"{name}={value!r}")
        if not 0.0 <= value <= 1.0:
            raise InvalidReward("out_of_range", f"{name}={value!r} is outside [0, 1]")
    reward = sum(getattr(config, name) * float(parts[name]) for name in REWARD_PARTS)
    return reward, np.array([parts[name] for name in REWARD_PARTS], np.float32)
