"""From the groups of an update to what each token is worth: rewards, shaping, advantages, and who is left out.

The rule for trajectories cut off by the token budget is applied here, once, to loss mask, baseline, reward statistics
and length alike. Advantages come before anything is filtered.

Dimensions: G trajectories of one group, T tokens of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncrl_jax.config import Config
from asyncrl_jax.config_learner import AdvantageConfig
from asyncrl_jax.learner.advantages import (
    count_turns,
    discounted_over_turns,
    group_advantages,
    leave_one_out_advantages,
    spread_over_turns,
    turn_advantages,
)
from asyncrl_jax.learner.shaping import normalised_rewards, overlong_penalty
from asyncrl_jax.types import FinishReason, Group


class Credit(NamedTuple):
    """Of every trajectory of every group."""

    advantages: list[list[np.ndarray]]  # float32 [T]
    rewards: list[list[float]]  # after shaping; a critic learns from them
    loss_masks: list[list[np.ndarray]]  # uint8 [T]
    statistics: dict[str, float]  # see `assign_credit`


def assign_credit(
    config: Config,
    groups: Sequence[Group],
    loss_masks: Sequence[Sequence[np.ndarray]],
    rewards: Sequence[np.ndarray],
    group_weights: Sequence[float] | None = None,
) -> Credit:
    """Advantages of an update's groups.

    Args:
      config: `learner.advantage`, `environment.max_tokens`.
      groups: of the update.
      loss_masks: uint8 [T] per trajectory per group; tokens that may be trained on.
      rewards: float [G] per group, as earned.
      group_weights: factor on the advantages of each group; None: 1 each.

    Returns:
      Credit, whose statistics are those of the trajectories that were kept: reward_kept (mean), length_kept (mean
      sampled tokens), truncated_share (of all trajectories), zero_advantage_groups, and zero_advantage (1 when no token
      of the whole update has an advantage).
    """
    settings = config.learner.advantage
    kept = [_kept(group, settings) for group in groups]
    masks = [
        [mask if keep else np.zeros_like(mask) for mask, keep in zip(of_group, kept_G, strict=True)]
        for of_group, kept_G in zip(loss_masks, kept, strict=True)
    ]
    shaped = _shaped(config, groups, rewards)
    worth = [_advantages(settings, of_group, kept_G) for of_group, kept_G in zip(shaped, kept, strict=True)]
    if group_weights is not None:
        worth = [np.float32(w) * of_group for w, of_group in zip(group_weights, worth, strict=True)]
    advantages = [
        [_per_token(settings, float(value), mask) for value, mask in zip(of_group, masks_G, strict=True)]
        for of_group, masks_G in zip(worth, masks, strict=True)
    ]
    if settings.step_credit:
        factors = [settings.step_credit * w for w in group_weights or [1.0] * len(groups)]
        for of_group, group, kept_G, factor in zip(advantages, groups, kept, factors, strict=True):
            _add_step_credit(of_group, group, kept_G, factor, config)
    return Credit(
        advantages=advantages,
        rewards=[[float(reward) for reward in of_group] for of_group in shaped],
        loss_masks=masks,
        statistics=_statistics(groups, kept, rewards, advantages),
    )


def _kept(group: Group, settings: AdvantageConfig) -> np.ndarray:
    """bool [G]: members that the rule for cut-off trajectories leaves in."""
    cut_off = [t.finish_reason == FinishReason.LENGTH for t in group.trajectories]
    return np.asarray([settings.truncated == "train" or not cut for cut in cut_off], bool)


def _shaped(config: Config, groups: Sequence[Group], rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
    settings = config.learner.advantage
    shaped = [np.array(of_group, np.float64) for of_group in rewards]  # copies: penalties are added in place
    if settings.overlong_buffer_tokens:
        for of_group, group in zip(shaped, groups, strict=True):
            of_group += [
                overlong_penalty(
                    len(t.tokens), max_length=config.environment.max_tokens, buffer=settings.overlong_buffer_tokens
                )
                for t in group.trajectories
            ]
    return normalised_rewards(shaped) if settings.normalise_rewards else shaped


def _advantages(settings: AdvantageConfig, rewards_G: np.ndarray, kept_G: np.ndarray) -> np.ndarray:
    """float32 [G]; members left out are in no baseline and get 0."""
    advantages = np.zeros(len(rewards_G), np.float32)
    if not kept_G.any():
        return advantages
    if settings.estimator == "grpo":
        advantages[kept_G] = group_advantages(rewards_G[kept_G], settings.eps, settings.std)
    elif settings.estimator == "rloo":
        advantages[kept_G] = leave_one_out_advantages(rewards_G[kept_G])
    else:  # reinforce_pp is whitened in the step; gae replaces it there
        advantages[kept_G] = rewards_G[kept_G]
    return advantages


def _per_token(settings: AdvantageConfig, advantage: float, mask_T: np.ndarray) -> np.ndarray:
    if settings.turn_discount == 1:
        return np.full(len(mask_T), advantage, np.float32)
    turns_K = discounted_over_turns(advantage, count_turns(mask_T), settings.turn_discount)
    return spread_over_turns(turns_K, mask_T)


def _add_step_credit(
    advantages: list[np.ndarray], group: Group, kept_G: np.ndarray, factor: float, config: Config
) -> None:
    """Adds to the advantages [T] of each kept member `factor` × what its steps are worth; see `turn_advantages`.

    Where all fail it adds nothing, unless `reward.process.all_fail` is set, nor where no process model scored steps.
    """
    settings, members = config.learner.advantage, group.trajectories
    scores = [member.step_scores for member, keep in zip(members, kept_G, strict=True) if keep]
    asked = config.reward.process.all_fail or any(member.success for member in members)
    if not (asked and scores) or any(of_member is None for of_member in scores):
        return
    worth = iter(turn_advantages([s for s in scores if s is not None], settings.eps, settings.turn_discount))
    for g, (member, keep) in enumerate(zip(members, kept_G, strict=True)):
        if keep:
            assert member.step_ends is not None
            steps_T = np.searchsorted(member.step_ends, np.arange(len(member.tokens)), side="right")
            padded = np.append(next(worth), np.float32(0))  # behind the last step
            advantages[g] += np.float32(factor) * np.where(member.loss_mask, padded[steps_T], 0)


def _statistics(
    groups: Sequence[Group],
    kept: list[np.ndarray],
    rewards: Sequence[np.ndarray],
    advantages: Sequence[Sequence[np.ndarray]],
) -> dict[str, float]:
    trajectories = [t for group in groups for t in group.trajectories]
    kept_all = np.concatenate(kept)
    lengths = np.asarray([t.loss_mask.sum() for t in trajectories], np.float64)
    earned = np.concatenate([np.asarray(of_group, np.float64) for of_group in rewards])
    count = max(int(kept_all.sum()), 1)
    teaches = [any(advantages_T.any() for advantages_T in of_group) for of_group in advantages]
    return {
        "reward_kept": float(earned[kept_all].sum() / count),
        "length_kept": float(lengths[kept_all].sum() / count),
        "truncated_share": float(np.mean([t.finish_reason == FinishReason.LENGTH for t in trajectories])),
        "zero_advantage_groups": float(teaches.count(False)),
        "zero_advantage": float(not any(teaches)),
    }
