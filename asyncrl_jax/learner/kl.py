"""KL to a reference policy, estimated from sampled tokens: as a loss, as a reward, and its coefficient.

Three estimators of KL(target ‖ reference) per token, with d = log target − log reference (Schulman 2020,
"Approximating KL divergence"):

    estimator   value                mean for tokens of the target   gradient of that mean, used as a plain loss
    k1          d                    the KL                          0: the reference does not even enter
    k2          d² / 2               close to the KL                 that of the KL
    k3          exp(−d) − 1 + d      the KL                          that of KL(reference ‖ target), the other direction

So none is used as a plain loss here: `kl_loss_terms` weights each by target ÷ behaviour in the way that makes the
gradient that of KL(target ‖ reference), on policy and off. As a reward (no gradient through it) only k1 is right.

All log-probs are float32 [B, T]. Dimensions: B rows, T positions.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from asyncrl_jax.learner.importance import log_ratio

ESTIMATORS = ("k1", "k2", "k3")
KL_RATIO_CAP = 2.0  # importance weights of the KL loss are truncated here
ADAPTATION_CLIP = 0.2  # a coefficient changes by at most this share of its rate in one update


def kl_estimate(
    *, target_logprobs: jax.Array, reference_logprobs: jax.Array, loss_mask: jax.Array, estimator: str
) -> jax.Array:
    """The estimator by its formula, [B, T]; 0 where the mask is 0. See the table above before using it as a loss.

    Raises:
      ValueError: for an estimator that is not one of `ESTIMATORS`.
    """
    chex.assert_rank([target_logprobs, reference_logprobs, loss_mask], 2)
    chex.assert_equal_shape([target_logprobs, reference_logprobs, loss_mask])
    d = log_ratio(target_logprobs, jax.lax.stop_gradient(reference_logprobs), loss_mask)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * jnp.square(d)
    if estimator == "k3":
        return jnp.exp(-d) - 1.0 + d
    raise ValueError(f"KL estimator {estimator!r}: use one of {', '.join(ESTIMATORS)}")


def kl_loss_terms(
    *,
    target_logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    reference_logprobs: jax.Array,
    loss_mask: jax.Array,
    estimator: str = "k3",
    ratio_cap: float = KL_RATIO_CAP,
) -> jax.Array:
    """KL(target ‖ reference) per token as a loss, from tokens of the behaviour policy: min(ratio, cap) · estimator.

    Its expected gradient is that of KL(target ‖ reference), as long as no weight is truncated. For k1 and k3 gradient
    flows through the ratio target ÷ behaviour too, and the value is unbiased (DeepSeek-V3.2, arXiv 2512.02556, equation
    7); for k2 it does not, and the value is that of k2.

    Args:
      target_logprobs: of the weights being trained.
      behaviour_logprobs: of the distribution sampled from.
      reference_logprobs: of the reference; no gradient flows to it.
      loss_mask: bool [B, T]; the one effective mask.
      estimator: one of `ESTIMATORS`.
      ratio_cap: largest weight.
    """
    chex.assert_equal_shape([target_logprobs, behaviour_logprobs])
    ratio = jnp.exp(log_ratio(target_logprobs, jax.lax.stop_gradient(behaviour_logprobs), loss_mask))
    weight = jnp.minimum(ratio, ratio_cap)
    if estimator == "k2":
        weight = jax.lax.stop_gradient(weight)
    return weight * kl_estimate(
        target_logprobs=target_logprobs,
        reference_logprobs=reference_logprobs,
        loss_mask=loss_mask,
        estimator=estimator,
    )


def adapted_coefficient(
    coefficient: jax.Array | float, *, measured: jax.Array | float, target: float, rate: float
) -> jax.Array:
    """The coefficient after an update whose KL was `measured`: raised when that is above the target, else lowered.

    coefficient · (1 + rate · clip(measured / target − 1, ±0.2)) (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    Args:
      coefficient: of the update, more than 0.
      measured: mean KL per token, in nats.
      target: the KL aimed at, in nats, more than 0.
      rate: share of the coefficient that an error of the target's size would change, before the clip.
    """
    error = jnp.clip(measured / target - 1.0, -ADAPTATION_CLIP, ADAPTATION_CLIP)
    return coefficient * (1.0 + rate * error)
