"""Importance weights between policies: bounded log-ratios, proximal policies, truncation and masks.

Three policies: *behaviour* sampled the tokens, *target* is being trained, and *proximal* is the one that the target may
not leave too quickly. All log-probs are float32 [B, T], of the tokens that were sampled.

Dimensions: B rows, T positions of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from asyncrl_jax.learner.aggregation import sequence_sums

LOG_RATIO_LIMIT = 10.0  # nats; log-ratios are held within it before exp, which would overflow and turn gradients to NaN
LEVELS = ("token", "sequence", "geometric")
BOUNDS = ("none", "truncate", "mask")


class ImportanceWeights(NamedTuple):
    """Per token, [B, T], without gradient; 0 where the mask is 0."""

    weight: jax.Array
    bounded: jax.Array  # 1 where truncation or a mask changed the weight


def log_ratio(numerator: jax.Array, denominator: jax.Array, loss_mask: jax.Array) -> jax.Array:
    """Bounded difference of log-probabilities, 0 (with zero gradient) where the mask is 0."""
    # Masked here and not after exp: there, a masked inf would still leak NaN into the gradient.
    difference = jnp.where(loss_mask, numerator - denominator, 0.0)
    return jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(
    numerator: jax.Array, denominator: jax.Array, loss_mask: jax.Array, segment_ids: jax.Array, *, mean: bool
) -> jax.Array:
    """Bounded sum (or mean) of log-ratios over each token's own sequence, [B, T]."""
    difference = jnp.where(loss_mask, numerator - denominator, 0.0)
    total = sequence_sums(difference, segment_ids)
    if mean:
        total = total / jnp.maximum(sequence_sums(loss_mask.astype(jnp.float32), segment_ids), 1.0)
    return jnp.where(loss_mask, jnp.clip(total, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)


def interpolated_proximal(
    *, target_logprobs: jax.Array, behaviour_logprobs: jax.Array, token_lag: jax.Array
) -> jax.Array:
    """Log-probs of a proximal policy one update behind the target, without a forward pass of its own; no gradient.

    On the straight line between behaviour and target: behaviour + (d − 1)/d · (target − behaviour) at lag d; the
    behaviour policy itself at lag 0 and 1 (AReaL, "Proximal log-probability approximation", 2025).

    Args:
      target_logprobs: float32 [B, T].
      behaviour_logprobs: float32 [B, T].
      token_lag: int32 [B, T], in updates.
    """
    chex.assert_rank([target_logprobs, behaviour_logprobs, token_lag], 2)
    chex.assert_equal_shape([target_logprobs, behaviour_logprobs, token_lag])
    lag = jnp.maximum(token_lag, 1).astype(jnp.float32)
    towards_target = (lag - 1.0) / lag * (target_logprobs - behaviour_logprobs)
    return jax.lax.stop_gradient(behaviour_logprobs + towards_target)


def importance_weights(
    *,
    proximal_logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    loss_mask: jax.Array,
    segment_ids: jax.Array,
    level: str = "token",
    bound: str = "none",
    floor: float = 0.0,
    cap: float = float("inf"),
) -> ImportanceWeights:
    """proximal ÷ behaviour per token, bounded. No gradient flows through it.

    Level: `token`; `sequence`, the product over the sequence; `geometric`, its geometric mean. Bound: `truncate` takes
    min(weight, cap) (Ionides 2008; for the mismatch of engine and trainer, Yao et al. 2025, "TIS"); `mask` takes 0
    outside [floor, cap] and leaves the rest as it is (IcePop, Ling team 2025, with level `token`; with the levels of
    sequences a whole sequence is in or out). A weight of 0 leaves the token in every denominator: it is a weight, not
    a hole in the loss mask.

    Args:
      proximal_logprobs: float32 [B, T]; of the target policy where there is no other.
      behaviour_logprobs: float32 [B, T].
      loss_mask: bool [B, T]; the one effective mask.
      segment_ids: int32 [B, T]; see `sequence_sums`.
      level: one of `LEVELS`.
      bound: one of `BOUNDS`.
      floor: smallest weight that `mask` keeps.
      cap: largest weight.

    Raises:
      ValueError: for another level or bound.
    """
    chex.assert_rank([proximal_logprobs, behaviour_logprobs, loss_mask, segment_ids], 2)
    chex.assert_equal_shape([proximal_logprobs, behaviour_logprobs, loss_mask, segment_ids])
    if level not in LEVELS or bound not in BOUNDS:
        raise ValueError(f"level {level!r}, bound {bound!r}: use one of {LEVELS} and one of {BOUNDS}")
    if level == "token":
        log_weight = log_ratio(proximal_logprobs, behaviour_logprobs, loss_mask)
    else:
        mean = level == "geometric"
        log_weight = sequence_log_ratio(proximal_logprobs, behaviour_logprobs, loss_mask, segment_ids, mean=mean)
    weight = jnp.exp(log_weight)
    inside = (weight <= cap) & ((weight >= floor) | (bound != "mask"))
    outside = jnp.minimum(weight, cap) if bound == "truncate" else jnp.zeros_like(weight)
    kept = weight if bound == "none" else jnp.where(inside, weight, outside)
    kept = jnp.where(loss_mask, kept, 0.0)
    bounded = jnp.where(loss_mask & ~inside, 1.0, 0.0) if bound != "none" else jnp.zeros_like(weight)
    return ImportanceWeights(jax.lax.stop_gradient(kept), jax.lax.stop_gradient(bounded))
