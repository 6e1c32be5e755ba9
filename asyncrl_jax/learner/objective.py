"""The loss of a step, put together from its parts as the config says. Pure: log-probs in, sums out.

    behaviour ─┐
    proximal  ─┼─▶ importance weights ─┐
    target ────┴─▶ policy terms ───────┼─▶ × weight of each token ─▶ Σ   + KL − entropy + values
                                       advantages                    + KL to the teachers

Dimensions: B rows, T positions of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncrl_jax.config_learner import LearnerConfig, ObjectiveConfig
from asyncrl_jax.learner import kl, policy_losses
from asyncrl_jax.learner.aggregation import token_weights, weighted_sum
from asyncrl_jax.learner.importance import ImportanceWeights, importance_weights, interpolated_proximal
from asyncrl_jax.learner.lag_worth import NUM_LAGS, sums_by_lag
from asyncrl_jax.learner.values import value_terms


class CriticTokens(NamedTuple):
    """What the value loss is a function of. Arrays are [B, T]."""

    values: jax.Array  # with gradient
    old_values: jax.Array
    returns: jax.Array


class Tokens(NamedTuple):
    """What the loss is a function of. Arrays are [B, T]; an optional one is None where the config does not ask for it.

    Only `target`, `entropy`, `divergence` and the critic's values carry a gradient.
    """

    target: jax.Array  # log-probs of the weights being trained
    entropy: jax.Array  # of their distribution, in nats
    behaviour: jax.Array  # log-probs of the distribution sampled from
    advantages: jax.Array
    loss_mask: jax.Array  # bool; the one effective mask
    segment_ids: jax.Array  # int32
    token_lag: jax.Array  # int32, in updates
    explored: jax.Array | None = None  # bool; sampled by another policy
    reference: jax.Array | None = None  # log-probs
    proximal: jax.Array | None = None  # log-probs of the average of past weights
    divergence: jax.Array | None = None  # KL to the teachers, with its gradient
    critic: CriticTokens | None = None


class Counts(NamedTuple):
    """Denominators: those of the whole step."""

    num_tokens: jax.Array  # float32 scalar
    num_sequences: jax.Array  # float32 scalar
    constant_length: float


class Sums(NamedTuple):
    """What microbatches add up: the parts of the loss as they enter it, the rest summed over tokens of the mask."""

    policy_loss: jax.Array
    kl_loss: jax.Array  # before its coefficient
    entropy_bonus: jax.Array  # before its coefficient
    value_loss: jax.Array  # before its coefficient
    distill_loss: jax.Array  # before its coefficient
    kl: jax.Array  # estimate of the KL to the reference (no gradient)
    entropy: jax.Array
    clipped: jax.Array
    ratio: jax.Array  # target ÷ behaviour, as the next
    ratio_squared: jax.Array
    weight: jax.Array  # importance weights
    weight_bounded: jax.Array
    gap_lag0: jax.Array  # |target − behaviour| log-prob over tokens of lag 0
    tokens_lag0: jax.Array
    lag: jax.Array
    by_lag: jax.Array  # [4, W], see lag_worth.py


def step_loss(
    config: LearnerConfig, tokens: Tokens, counts: Counts, kl_coefficient: jax.Array | float
) -> tuple[jax.Array, tuple[Sums, jax.Array]]:
    """(this part of the step's loss, (its sums, its largest ratio target ÷ behaviour)).

    Losses of the parts of a step add up to the step's, whichever way it is cut into rows and microbatches.

    Args:
      config: objective, KL, critic.
      tokens: of the part.
      counts: of the whole step.
      kl_coefficient: weight of the KL, as a number or a scalar array.
    """
    if config.objective.behaviour_logprobs == "absent":
        tokens = tokens._replace(behaviour=jax.lax.stop_gradient(tokens.target))
    weights = token_weights(
        loss_mask=tokens.loss_mask,
        segment_ids=tokens.segment_ids,
        aggregation=config.objective.aggregation,
        num_tokens=counts.num_tokens,
        num_sequences=counts.num_sequences,
        constant_length=counts.constant_length,
    )
    terms, importance = policy_terms(config.objective, tokens)
    policy_loss = weighted_sum(terms.loss, weights)
    loss = config.objective.coefficient * policy_loss
    zero = jnp.zeros(())
    kl_loss = entropy_bonus = value_loss = distill_loss = zero
    if tokens.reference is not None and config.kl.placement == "loss":
        kl_loss = weighted_sum(_kl_terms(config.kl.estimator, tokens), weights)
        loss += kl_coefficient * kl_loss
    if config.objective.entropy_coefficient:
        entropy_bonus = weighted_sum(tokens.entropy, weights)
        loss -= config.objective.entropy_coefficient * entropy_bonus
    if tokens.critic is not None:
        of_values = value_terms(
            **tokens.critic._asdict(), loss_mask=tokens.loss_mask, clip_range=config.critic.clip_range
        )
        value_loss = weighted_sum(of_values, weights)
        loss += config.critic.coefficient * value_loss
    if tokens.divergence is not None:
        distill_loss = weighted_sum(tokens.divergence, weights)
        loss += config.distill.coefficient * distill_loss
    parts = Sums(policy_loss, kl_loss, entropy_bonus, value_loss, distill_loss, *[zero] * 11)
    parts = parts._replace(by_lag=jnp.zeros((4, NUM_LAGS)))
    sums, ratio_max = _measured(parts, tokens, terms, importance)
    return loss, (sums, ratio_max)


def policy_terms(config: ObjectiveConfig, tokens: Tokens) -> tuple[policy_losses.PolicyTerms, ImportanceWeights | None]:
    """The policy objective that the config names, and the importance weights in it, if it has any."""
    detached = jax.lax.stop_gradient(tokens.target)
    interpolated = interpolated_proximal(
        target_logprobs=tokens.target, behaviour_logprobs=tokens.behaviour, token_lag=tokens.token_lag
    )
    if tokens.explored is not None:  # another policy is no few updates away, whatever its version says
        interpolated = jnp.where(tokens.explored, detached, interpolated)
    proximal = {
        "ratio": tokens.behaviour,
        "decoupled": tokens.proximal,
        "interpolated": interpolated,
        "importance": detached,
        "none": detached,
    }[config.correction]
    assert proximal is not None, "correction decoupled without log-probs of the proximal policy"
    importance = None
    if config.uses_weights:
        importance = importance_weights(
            proximal_logprobs=proximal,
            behaviour_logprobs=tokens.behaviour,
            loss_mask=tokens.loss_mask,
            segment_ids=tokens.segment_ids,
            level=config.weight_level,
            bound=config.weight_bound,
            floor=config.weight_floor,
            cap=config.weight_cap,
        )
    given: dict[str, Any] = {
        "target_logprobs": tokens.target,
        "advantages": tokens.advantages,
        "loss_mask": tokens.loss_mask,
        "weights": None if importance is None else importance.weight,
    }
    if config.loss == "reinforce":
        return policy_losses.reinforce_terms(**given), importance
    given |= {"proximal_logprobs": proximal, "clip_range": config.clip}
    if config.loss == "gspo":
        return policy_losses.gspo_terms(**given, segment_ids=tokens.segment_ids), importance
    if config.loss == "cispo":
        return policy_losses.cispo_terms(**given), importance
    return policy_losses.ppo_terms(**given, dual_clip=config.dual_clip or None), importance


def _kl_terms(estimator: str, tokens: Tokens) -> jax.Array:
    assert tokens.reference is not None
    return kl.kl_loss_terms(
        target_logprobs=tokens.target,
        behaviour_logprobs=tokens.behaviour,
        reference_logprobs=tokens.reference,
        loss_mask=tokens.loss_mask,
        estimator=estimator,
    )


def _measured(
    parts: Sums, tokens: Tokens, terms: policy_losses.PolicyTerms, importance: ImportanceWeights | None
) -> tuple[Sums, jax.Array]:
    """The sums with what is measured, and the largest ratio; nothing here has a gradient."""
    tokens = jax.lax.stop_gradient(tokens)
    mask = tokens.loss_mask
    own = mask if tokens.explored is None else mask & ~tokens.explored  # the lag of another policy says nothing
    lag0 = own & (tokens.token_lag == 0)
    ratio = jnp.exp(policy_losses.log_ratio(tokens.target, tokens.behaviour, mask))

    def total(values: jax.Array, mask: jax.Array = mask) -> jax.Array:
        return jnp.sum(jnp.where(mask, values.astype(jnp.float32), 0.0))

    zero = jnp.zeros(())
    sums = parts._replace(
        kl=zero if tokens.reference is None else total(_kl_terms("k3", tokens)),
        entropy=total(tokens.entropy),
        clipped=total(terms.clipped),
        ratio=total(ratio),
        ratio_squared=total(jnp.square(ratio)),
        weight=zero if importance is None else total(importance.weight),
        weight_bounded=zero if importance is None else total(importance.bounded),
        gap_lag0=total(jnp.abs(tokens.target - tokens.behaviour), lag0),
        tokens_lag0=jnp.sum(lag0, dtype=jnp.float32),
        lag=total(tokens.token_lag, own),
        by_lag=sums_by_lag(ratio, tokens.token_lag, own),
    )
    return sums, jnp.max(jnp.where(mask, ratio, 0.0))
