"""Policy objectives, term by term, to be minimised. Pure functions; how terms are summed is the caller's choice.

Every function takes the log-probs of the policy being trained (`target_logprobs`), those of the policy its ratio is
taken to (`proximal_logprobs`: the behaviour policy, unless it is corrected for by `weights`), and the one effective
mask. A term outside the mask is 0, and so is its gradient, whatever stands there.

`weights` are importance weights proximal ÷ behaviour without gradient (`importance.importance_weights`), which make
any of these a decoupled objective (Hilton et al. 2022, arXiv 2110.00641): the ratio limits how far the target goes,
the weight corrects for who sampled. None is 1.

Dimensions: B rows, T positions (position t predicts token t + 1).
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from asyncrl_jax.learner.importance import log_ratio, sequence_log_ratio


class PolicyTerms(NamedTuple):
    """Per token, [B, T]; 0 where the mask is 0."""

    loss: jax.Array
    ratio: jax.Array  # target ÷ proximal probability (no gradient)
    clipped: jax.Array  # 1 where clipping bit (no gradient)


def _checked(advantages: jax.Array, loss_mask: jax.Array, *others: jax.Array | None) -> jax.Array:
    """Advantages of the mask without gradient, once all shapes are the same [B, T]."""
    arrays = [advantages, loss_mask, *(other for other in others if other is not None)]
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape(arrays)
    return jax.lax.stop_gradient(jnp.where(loss_mask, advantages, 0.0))


def _weighted(loss: jax.Array, weights: jax.Array | None) -> jax.Array:
    return loss if weights is None else jax.lax.stop_gradient(weights) * loss


def _clipped_terms(
    ratio: jax.Array,
    advantages: jax.Array,
    loss_mask: jax.Array,
    weights: jax.Array | None,
    clip_range: tuple[float, float],
    dual_clip: float | None,
) -> PolicyTerms:
    """−min(ratio · A, clip(ratio) · A), from below by dual_clip · A where A is negative."""
    low, high = clip_range
    plain = ratio * advantages
    bounded = jnp.clip(ratio, 1.0 - low, 1.0 + high) * advantages
    objective = jnp.minimum(plain, bounded)
    clipped = bounded < plain
    if dual_clip is not None:
        least = jnp.where(advantages < 0, dual_clip * advantages, -jnp.inf)
        clipped |= objective < least
        objective = jnp.maximum(objective, least)
    return PolicyTerms(
        loss=_weighted(-objective, weights),
        ratio=jax.lax.stop_gradient(jnp.where(loss_mask, ratio, 0.0)),
        clipped=jax.lax.stop_gradient(clipped.astype(jnp.float32)),
    )


def ppo_terms(
    *,
    target_logprobs: jax.Array,
    proximal_logprobs: jax.Array,
    advantages: jax.Array,
    loss_mask: jax.Array,
    clip_range: tuple[float, float],
    dual_clip: float | None = None,
    weights: jax.Array | None = None,
) -> PolicyTerms:
    """PPO's clipped objective (Schulman et al. 2017, arXiv 1707.06347, equation 7).

    Args:
      target_logprobs: float32 [B, T], of the weights being trained.
      proximal_logprobs: float32 [B, T]; no gradient flows to it.
      advantages: float32 [B, T].
      loss_mask: bool [B, T]; the one effective mask.
      clip_range: (ε_low, ε_high): the ratio is held in [1 − ε_low, 1 + ε_high]; DAPO's clip-higher when ε_high is the
        larger (Yu et al. 2025, arXiv 2503.14476, equation 10).
      dual_clip: c > 1 bounds the loss of a token with negative advantage by c · |A|, however large its ratio (Ye et al.
        2020, arXiv 1912.09729, equation 5); None is off.
      weights: float32 [B, T] or None; see the head of this file.
    """
    advantages = _checked(advantages, loss_mask, target_logprobs, proximal_logprobs, weights)
    ratio = jnp.exp(log_ratio(target_logprobs, jax.lax.stop_gradient(proximal_logprobs), loss_mask))
    return _clipped_terms(ratio, advantages, loss_mask, weights, clip_range, dual_clip)


def gspo_terms(
    *,
    target_logprobs: jax.Array,
    proximal_logprobs: jax.Array,
    advantages: jax.Array,
    loss_mask: jax.Array,
    segment_ids: jax.Array,
    clip_range: tuple[float, float],
    weights: jax.Array | None = None,
) -> PolicyTerms:
    """GSPO: PPO's objective with one ratio a sequence, the geometric mean of its tokens' (Zheng et al. 2025, arXiv
    2507.18071, equations 5 to 7). Its clip ranges are in the order of 3e-4. Sum it with `sequence_mean`, as they do.

    Args: as `ppo_terms`, and
      segment_ids: int32 [B, T]; positions of one row with the same id are one sequence.
    """
    advantages = _checked(advantages, loss_mask, target_logprobs, proximal_logprobs, segment_ids, weights)
    proximal = jax.lax.stop_gradient(proximal_logprobs)
    ratio = jnp.exp(sequence_log_ratio(target_logprobs, proximal, loss_mask, segment_ids, mean=True))
    return _clipped_terms(ratio, advantages, loss_mask, weights, clip_range, None)


def cispo_terms(
    *,
    target_logprobs: jax.Array,
    proximal_logprobs: jax.Array,
    advantages: jax.Array,
    loss_mask: jax.Array,
    clip_range: tuple[float, float],
    weights: jax.Array | None = None,
) -> PolicyTerms:
    """CISPO: −clip(ratio) · A · log π with no gradient through the ratio, so that clipping takes none away (MiniMax-M1,
    2025, arXiv 2506.13585, equations 4 and 5). ε_low = 1 leaves small ratios alone, as they do.

    Args: as `ppo_terms`. `clipped` marks ratios outside the range.
    """
    advantages = _checked(advantages, loss_mask, target_logprobs, proximal_logprobs, weights)
    low, high = clip_range
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(target_logprobs, proximal_logprobs, loss_mask)))
    held = jnp.clip(ratio, 1.0 - low, 1.0 + high)
    return PolicyTerms(
        loss=_weighted(-held * advantages * jnp.where(loss_mask, target_logprobs, 0.0), weights),
        ratio=jnp.where(loss_mask, ratio, 0.0),
        clipped=jnp.where(loss_mask & (held != ratio), 1.0, 0.0),
    )


def reinforce_terms(
    *,
    target_logprobs: jax.Array,
    advantages: jax.Array,
    loss_mask: jax.Array,
    weights: jax.Array | None = None,
) -> PolicyTerms:
    """REINFORCE: −A · log π (Williams 1992). Off policy give importance weights target ÷ behaviour.

    Args: as `ppo_terms`. The ratio is 1, and nothing is clipped.
    """
    advantages = _checked(advantages, loss_mask, target_logprobs, weights)
    return PolicyTerms(
        loss=_weighted(-advantages * jnp.where(loss_mask, target_logprobs, 0.0), weights),
        ratio=loss_mask.astype(jnp.float32),
        clipped=jnp.zeros_like(advantages),
    )
