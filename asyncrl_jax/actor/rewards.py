"""The reward of an episode: a weighted sum of parts, each checked before it counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from asyncrl_jax.config import RewardConfig
from asyncrl_jax.types import REWARD_PARTS, Trajectory

_FINAL, _STEP = REWARD_PARTS.index("final"), REWARD_PARTS.index("step")


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


def without_lone_steps(members: Sequence[Trajectory], config: RewardConfig) -> tuple[Trajectory, ...]:
    """The members of a group, whose scored steps count only if some member succeeded, or `process.all_fail` is set.

    Where everyone fails, a process reward model would be all that tells members apart, and nothing would check it.
    """
    if config.process.all_fail or any(member.success for member in members):
        return tuple(members)
    return tuple(_without_step_part(member, config) for member in members)


def without_steps(members: Sequence[Trajectory], config: RewardConfig) -> tuple[Trajectory, ...]:
    """The members of a group without anything from a process reward model."""
    return tuple(
        dataclasses.replace(_without_step_part(member, config), step_scores=None, step_ends=None) for member in members
    )


def _without_step_part(member: Trajectory, config: RewardConfig) -> Trajectory:
    if member.step_scores is None:
        return member  # what the environment says of steps stands
    parts = dict(zip(REWARD_PARTS, member.reward_parts.tolist(), strict=True)) | {"step": 0.0}
    reward, reward_parts = weigh(parts, config)
    return dataclasses.replace(member, reward=reward, reward_parts=reward_parts)


def step_gap(members: Sequence[Trajectory]) -> float | None:
    """Mean step part of a group's better members minus that of its worse ones, by their final part.

    None where no process reward model scored steps, or all ended alike.
    """
    if any(member.step_scores is None for member in members):
        return None
    parts_GP = np.stack([member.reward_parts for member in members]).astype(np.float64)
    final_G, step_G = parts_GP[:, _FINAL], parts_GP[:, _STEP]
    better_G, worse_G = final_G > final_G.mean(), final_G < final_G.mean()
    if final_G.max() == final_G.min():
        return None
    return float(step_G[better_G].mean() - step_G[worse_G].mean())
