"""Advantages of a group of trajectories. G trajectories of one group."""

from __future__ import annotations

import numpy as np


def group_advantages(rewards_G: np.ndarray, eps: float) -> np.ndarray:
    """GRPO advantages: (reward − mean) / (population standard deviation + eps).

    Shao et al. 2024 (arXiv 2402.03300), section 4.1.2, with the population deviation: two members with rewards 1 and 0
    get +1 and −1. A group whose members all have the same reward gets exactly 0; it is recognised by max = min, since
    the deviation of equal rewards is not exactly 0 in floating point.

    Args:
      rewards_G: float [G], finite.
      eps: added to the deviation.

    Returns:
      float32 [G].

    Raises:
      ValueError: for rewards of another rank, none, or one that is not finite.
    """
    rewards_G = np.asarray(rewards_G, np.float64)
    if rewards_G.ndim != 1 or rewards_G.size == 0:
        raise ValueError(f"rewards have shape {rewards_G.shape}: expected one per trajectory")
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards {rewards_G.tolist()} are not all finite")
    if has_zero_variance(rewards_G):
        return np.zeros(rewards_G.shape, np.float32)
    return ((rewards_G - rewards_G.mean()) / (rewards_G.std() + eps)).astype(np.float32)


def has_zero_variance(rewards_G: np.ndarray) -> bool:
    """Whether all members have the same reward, so that the group teaches nothing."""
    return bool(np.max(rewards_G) == np.min(rewards_G))
