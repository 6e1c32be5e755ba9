"""Rewards before advantages: penalties for length, and normalisation over a batch. NumPy, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """DAPO's soft punishment of long answers (Yu et al. 2025, arXiv 2503.14476, equation 13), in [−1, 0].

    0 up to max_length − buffer, then falling linearly to −1 at max_length.

    Args:
      length: tokens.
      max_length: the longest there can be.
      buffer: tokens over which the penalty sets in; 0 punishes nothing.
    """
    if buffer == 0:
        return 0.0
    return -min(max((length - (max_length - buffer)) / buffer, 0.0), 1.0)


def normalised_rewards(rewards: Sequence[np.ndarray], eps: float = 1e-6) -> list[np.ndarray]:
    """Rewards of a batch with mean 0 and population deviation 1 over all its trajectories.

    Args:
      rewards: float [G] per group.
      eps: added to the deviation.

    Returns:
      float64 [G] per group; zeros when all rewards of the batch are equal.
    """
    flat = np.concatenate([np.asarray(of_group, np.float64) for of_group in rewards])
    if flat.max() == flat.min():
        return [np.zeros(len(of_group)) for of_group in rewards]
    return [(np.asarray(of_group, np.float64) - flat.mean()) / (flat.std() + eps) for of_group in rewards]
