"""Advantages of a group of trajectories, before anything is filtered. NumPy, on the host.

`values.gae` gives those of a critic; `aggregation.whiten` normalises over the tokens of a step.

Dimensions: G trajectories of one group, K turns of a trajectory, T tokens of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STDS = ("population", "sample", "none")


def group_advantages(rewards_G: np.ndarray, eps: float, std: str = "population") -> np.ndarray:
    """GRPO advantages: (reward − mean) / (standard deviation + eps).

    Shao et al. 2024 (arXiv 2402.03300), section 4.1.2. With the population deviation, two members with rewards 1 and 0
    get +1 and −1; with the sample deviation ±0.7071; without one ±0.5, which is Dr. GRPO (Liu et al. 2025, arXiv
    2503.20783). A group whose members all have the same reward gets exactly 0; it is recognised by max = min, since the
    deviation of equal rewards is not exactly 0 in floating point.

    Args:
      rewards_G: float [G], finite.
      eps: added to the deviation.
      std: "population", "sample" or "none".

    Returns:
      float32 [G].

    Raises:
      ValueError: for rewards of another rank, none, or one that is not finite; and for another `std`.
    """
    if std not in STDS:
        raise ValueError(f"std {std!r}: use one of {', '.join(STDS)}")
    rewards_G = _checked(rewards_G)
    if has_zero_variance(rewards_G):
        return np.zeros(rewards_G.shape, np.float32)
    centred = rewards_G - rewards_G.mean()
    if std == "none":
        return centred.astype(np.float32)
    return (centred / (rewards_G.std(ddof=1 if std == "sample" else 0) + eps)).astype(np.float32)


def leave_one_out_advantages(rewards_G: np.ndarray) -> np.ndarray:
    """RLOO advantages: reward − mean reward of the *other* members (Ahmadian et al. 2024, arXiv 2402.14740, eq. 7).

    The baseline does not depend on the member itself, so it biases nothing. Exactly 0 where all rewards are equal, and
    for a lone member, which has no baseline.

    Args:
      rewards_G: float [G], finite.

    Returns:
      float32 [G].

    Raises:
      ValueError: as `group_advantages`.
    """
    rewards_G = _checked(rewards_G)
    if has_zero_variance(rewards_G):
        return np.zeros(rewards_G.shape, np.float32)
    others = (rewards_G.sum() - rewards_G) / (rewards_G.size - 1)
    return (rewards_G - others).astype(np.float32)


def turn_advantages(turn_rewards: Sequence[np.ndarray], eps: float, discount: float = 1.0) -> list[np.ndarray]:
    """Credit per turn: rewards of turns, normalised over all turns of the group, summed from each turn to the last.

    GRPO with process supervision (Shao et al. 2024, arXiv 2402.03300, section 4.1.3), turns taking the place of steps.

    Args:
      turn_rewards: float [K] of every trajectory of a group; K may differ.
      eps: added to the population deviation.
      discount: factor per turn between a turn and a later reward.

    Returns:
      float32 [K] per trajectory; all 0 where every turn of the group earned the same.

    Raises:
      ValueError: as `group_advantages`.
    """
    flat = group_advantages(np.concatenate([np.asarray(rewards, np.float64) for rewards in turn_rewards]), eps)
    ends = np.cumsum([len(rewards) for rewards in turn_rewards])[:-1]
    return [_discounted_sums(rewards, discount) for rewards in np.split(flat, ends)]


def discounted_over_turns(advantage: float, num_turns: int, discount: float) -> np.ndarray:
    """float32 [K]: an advantage earned at the end, discounted once for every turn between.

    The last turn gets all of it, the first `discount`^(K − 1).
    """
    return (advantage * discount ** np.arange(num_turns - 1, -1, -1.0)).astype(np.float32)


def spread_over_turns(advantages_K: np.ndarray, loss_mask_T: np.ndarray) -> np.ndarray:
    """float32 [T]: the advantage of its turn at every sampled token, 0 elsewhere.

    A turn is a run of sampled tokens.

    Raises:
      ValueError: if the mask does not have K runs.
    """
    mask_T = np.asarray(loss_mask_T, bool)
    starts_T = mask_T & ~np.concatenate([[False], mask_T[:-1]])
    if starts_T.sum() != len(advantages_K):
        raise ValueError(f"{len(advantages_K)} advantages for a mask of {starts_T.sum()} turns")
    padded = np.concatenate([[0.0], np.asarray(advantages_K, np.float64)])
    return np.where(mask_T, padded[np.cumsum(starts_T)], 0.0).astype(np.float32)


def count_turns(loss_mask_T: np.ndarray) -> int:
    """Runs of sampled tokens."""
    mask_T = np.asarray(loss_mask_T, bool)
    return int((mask_T & ~np.concatenate([[False], mask_T[:-1]])).sum())


def has_zero_variance(rewards_G: np.ndarray) -> bool:
    """Whether all members have the same reward, so that the group teaches nothing."""
    return bool(np.max(rewards_G) == np.min(rewards_G))


def _checked(rewards_G: np.ndarray) -> np.ndarray:
    rewards_G = np.asarray(rewards_G, np.float64)
    if rewards_G.ndim != 1 or rewards_G.size == 0:
        raise ValueError(f"rewards have shape {rewards_G.shape}: expected one per trajectory")
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards {rewards_G.tolist()} are not all finite")
    return rewards_G


def _discounted_sums(rewards_K: np.ndarray, discount: float) -> np.ndarray:
    sums, later = np.zeros(len(rewards_K), np.float32), 0.0
    for turn in reversed(range(len(rewards_K))):
        later = float(rewards_K[turn]) + discount * later
        sums[turn] = later
    return sums
