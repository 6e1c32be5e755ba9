"""The objective, term by term. Pure functions; every mean is a masked sum over a denominator given by the caller.

The denominator is the token count of the *whole optimizer step*, so the terms of microbatches add up to the step's
loss, and microbatch size, row order and sharding change nothing.

Dimensions: B rows, T positions (position t predicts token t + 1), V vocabulary, L layers, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

LOG_RATIO_LIMIT = 10.0  # nats; log-ratios are held within it before exp, which would overflow and turn gradients to NaN
KL_RATIO_CAP = 2.0  # importance weights of the KL term are truncated here


class PolicyTerms(NamedTuple):
    """Per token, [B, T]; 0 where the mask is 0."""

    loss: jax.Array
    ratio: jax.Array  # target ÷ proximal probability (no gradient)
    clipped: jax.Array  # 1 where clipping took the gradient away


def token_logprobs(
    logits_BTV: jax.Array, targets_BT: jax.Array, temperature_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy, of the distribution sampled from: softmax(logits / temperature).

    Args:
      logits_BTV: float32.
      targets_BT: int32.
      temperature_BT: float32, more than 0.

    Returns:
      (logprobs_BT, entropy_BT) in nats; the entropy has no gradient.
    """
    chex.assert_rank([logits_BTV, targets_BT, temperature_BT], [3, 2, 2])
    chex.assert_equal_shape([targets_BT, temperature_BT])
    logprobs_BTV = jax.nn.log_softmax(logits_BTV / temperature_BT[:, :, None], axis=-1)
    logprobs_BT = jnp.take_along_axis(logprobs_BTV, targets_BT[:, :, None], axis=-1)[:, :, 0]
    detached_BTV = jax.lax.stop_gradient(logprobs_BTV)
    return logprobs_BT, -jnp.sum(jnp.exp(detached_BTV) * detached_BTV, axis=-1)


def _log_ratio(numerator: jax.Array, denominator: jax.Array, mask: jax.Array) -> jax.Array:
    """Bounded difference of log-probabilities, 0 (with zero gradient) where the mask is 0."""
    # Masked here and not after exp: there, a masked inf would still leak NaN into the gradient.
    difference = jnp.where(mask, numerator - denominator, 0.0)
    return jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_policy_terms(
    *,
    target_logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    advantages: jax.Array,
    loss_mask: jax.Array,
    clip_range: float,
    proximal_logprobs: jax.Array | None = None,
) -> PolicyTerms:
    """PPO's clipped objective per token (Schulman et al. 2017, arXiv 1707.06347, equation 7), to be minimised.

    The ratio is taken to the behaviour policy, which sampled the tokens. With `proximal_logprobs` it is taken to that
    policy and the loss weighted by proximal ÷ behaviour (decoupled PPO, Hilton et al. 2022, arXiv 2110.00641).

    Args:
      target_logprobs: float32 [B, T], of the weights being trained.
      behaviour_logprobs: float32 [B, T], of the distribution sampled from.
      advantages: float32 [B, T].
      loss_mask: bool [B, T]; the one effective mask.
      clip_range: ε.
      proximal_logprobs: float32 [B, T], or None for the behaviour policy.
    """
    chex.assert_rank([target_logprobs, behaviour_logprobs, advantages, loss_mask], 2)
    chex.assert_equal_shape([target_logprobs, behaviour_logprobs, advantages, loss_mask])
    behaviour_logprobs = jax.lax.stop_gradient(behaviour_logprobs)
    proximal = behaviour_logprobs if proximal_logprobs is None else jax.lax.stop_gradient(proximal_logprobs)
    advantages = jax.lax.stop_gradient(jnp.where(loss_mask, advantages, 0.0))
    ratio = jnp.exp(_log_ratio(target_logprobs, proximal, loss_mask))
    weight = jnp.exp(_log_ratio(proximal, behaviour_logprobs, loss_mask))
    plain = ratio * advantages
    bounded = jnp.clip(ratio, 1.0 - clip_range, 1.0 + clip_range) * advantages
    return PolicyTerms(
        loss=-weight * jnp.minimum(plain, bounded),
        ratio=jax.lax.stop_gradient(jnp.where(loss_mask, ratio, 0.0)),
        clipped=jax.lax.stop_gradient((bounded < plain).astype(jnp.float32)),
    )


def k3_kl(*, target_logprobs: jax.Array, reference_logprobs: jax.Array, loss_mask: jax.Array) -> jax.Array:
    """The k3 estimate of KL(target ‖ reference) per token: r − 1 − log r, r = reference ÷ target probability.

    Schulman 2020, "Approximating KL divergence"; never negative. 0 where the mask is 0.
    """
    chex.assert_equal_shape([target_logprobs, reference_logprobs, loss_mask])
    log_ratio = _log_ratio(jax.lax.stop_gradient(reference_logprobs), target_logprobs, loss_mask)
    return jnp.exp(log_ratio) - 1.0 - log_ratio


def kl_terms(
    *,
    target_logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    reference_logprobs: jax.Array,
    loss_mask: jax.Array,
    ratio_cap: float = KL_RATIO_CAP,
) -> jax.Array:
    """KL(target ‖ reference) per token, from tokens of the behaviour policy: min(target ÷ behaviour, cap) · k3.

    k3 alone estimates the value only for tokens of the target policy, and its gradient is that of the *other* direction
    of the KL. With the importance weight, through which the gradient flows too, value and gradient are both unbiased
    (DeepSeek-V3.2, arXiv 2512.02556, equation 7) as long as no weight is truncated.
    """
    chex.assert_rank([target_logprobs, behaviour_logprobs, reference_logprobs, loss_mask], 2)
    ratio = jnp.exp(_log_ratio(target_logprobs, jax.lax.stop_gradient(behaviour_logprobs), loss_mask))
    k3 = k3_kl(target_logprobs=target_logprobs, reference_logprobs=reference_logprobs, loss_mask=loss_mask)
    return jnp.minimum(ratio, ratio_cap) * k3


def masked_mean(values: jax.Array, loss_mask: jax.Array, denominator: jax.Array | float) -> jax.Array:
    """Sum of `values` where the mask is 1, over max(denominator, 1): 0 and not NaN when everything is masked."""
    chex.assert_equal_shape([values, loss_mask])
    return jnp.sum(jnp.where(loss_mask, values, 0.0)) / jnp.maximum(denominator, 1.0)


def switch_balance_loss(
    *, counts_LE: jax.Array, prob_sums_LE: jax.Array, num_tokens: jax.Array, experts_per_token: int
) -> jax.Array:
    """Switch load-balance loss (Fedus et al. 2021, arXiv 2101.03961, equation 4), mean over layers; 1 when balanced.

    E · Σ_e f_e · P_e with f_e the share of assignments and P_e the mean router probability. Linear in `prob_sums_LE`:
    with the whole step's counts and token count, the losses of its microbatches add up to the step's.

    Args:
      counts_LE: float32; assignments of the *whole step*, no gradient.
      prob_sums_LE: float32; router probabilities summed over the tokens of this part of the step.
      num_tokens: float32 scalar; tokens of the *whole step*.
      experts_per_token: assignments of one token.
    """
    chex.assert_rank([counts_LE, prob_sums_LE], 2)
    chex.assert_equal_shape([counts_LE, prob_sums_LE])
    num_tokens = jnp.maximum(num_tokens, 1.0)
    fraction_LE = jax.lax.stop_gradient(counts_LE) / (num_tokens * experts_per_token)
    return counts_LE.shape[1] * jnp.mean(jnp.sum(fraction_LE * prob_sums_LE / num_tokens, axis=1))
