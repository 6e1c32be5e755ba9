"""Which experts serve a token, with what weight: softmax, sigmoid, selection bias, replay, noise, capacity.

The families' routers are settings of one function, `route`:

    Qwen3-MoE    softmax over all experts, the top k, renormalised     score="softmax", renormalise=True
    Mixtral      the top k, softmax over those: the same numbers       score="softmax", renormalise=True
    OLMoE        softmax over all experts, the top k as they are       score="softmax", renormalise=False
    MiMo-V2      sigmoid scores; a bias enters the selection alone     score="sigmoid", selection_bias=True
    (DeepSeek-V3 without groups of experts: the same)

Dimensions: N tokens, E experts, A experts of one token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

SCORES = ("softmax", "sigmoid")
NO_EXPERT = -1  # in `Choice.ids_NA`: this assignment is computed by nobody


class RouterOptions(NamedTuple):
    """How experts are chosen and weighted. Hashable: a part of the model's structure."""

    experts_per_token: int
    score: str = "softmax"  # or "sigmoid"
    renormalise: bool = True  # whether the weights of a token's choice sum to `scale`
    selection_bias: bool = False  # whether the layer has a bias that the selection alone sees
    scale: float = 1.0  # of all weights (`routed_scaling_factor` of DeepSeek-V3 and MiMo-V2)
    noise: float = 0.0  # standard deviation of Gaussian noise on the logits that the selection sees
    capacity_factor: float = 0.0  # an expert takes at most this times the balanced load; 0: all that is sent to it


class Choice(NamedTuple):
    """Experts of each token."""

    ids_NA: jax.Array  # int32; NO_EXPERT for padding and for what capacity dropped
    weights_NA: jax.Array  # float32; 0 where the id is NO_EXPERT


class Routing(NamedTuple):
    """Sums over tokens, padding left out, so that those of microbatches add up to those of the whole step."""

    counts_E: jax.Array  # float32; assignments of each expert before capacity (no gradient)
    prob_sums_E: jax.Array  # float32; router probability of each expert
    num_tokens: jax.Array  # float32 scalar; tokens that were routed
    z_sum: jax.Array  # float32 scalar; squared logsumexp of the logits
    entropy_sum: jax.Array  # float32 scalar; entropy of the router's probabilities in nats (no gradient)
    dropped: jax.Array  # float32 scalar; assignments over capacity
    unreplayed: jax.Array  # float32 scalar; tokens without a row to replay, though replay is on


def route(
    logits_NE: jax.Array,
    valid_N: jax.Array,
    options: RouterOptions,
    *,
    bias_E: jax.Array | None = None,
    replay_NA: jax.Array | None = None,
    noise_key: jax.Array | None = None,
) -> tuple[Choice, Routing]:
    """Chooses the experts of every token.

    Weights, and with them all gradients, come from the current, unbiased scores without noise; only the selection sees
    bias, noise and replay. Weights of a replayed choice are those of R3 (arXiv 2510.11370): the softmax over the
    replayed experts' current logits, when renormalised.

    Args:
      logits_NE: float32 router logits.
      valid_N: bool; False for padding, which is routed nowhere and counted nowhere.
      options: the router's kind.
      bias_E: float32 added to the scores for the selection (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
      replay_NA: int32 ids to choose instead of the router's own. A row with an id outside of [0, E), such as −1, is
        routed live and counted.
      noise_key: of the selection noise. Without one there is none, as in decoding, evaluation and the reference.

    Raises:
      ValueError: for an unknown score.
    """
    num_experts = logits_NE.shape[-1]
    ids_NA, one_hots_NE = _select(_selection_scores(logits_NE, options, bias_E, noise_key), options.experts_per_token)
    unreplayed = jnp.zeros((), jnp.float32)
    if replay_NA is not None:
        replayed_N = jnp.all((replay_NA >= 0) & (replay_NA < num_experts), axis=-1)
        ids_NA = jnp.where(replayed_N[:, None], replay_NA, ids_NA)
        one_hots_NE = [jax.nn.one_hot(ids_N, num_experts, dtype=bool) for ids_N in ids_NA.T]
        unreplayed = jnp.sum(valid_N & ~replayed_N, dtype=jnp.float32)
    weights_NA = _weights(logits_NE, one_hots_NE, options)
    taken_NE = sum(one_hot.astype(jnp.float32) for one_hot in one_hots_NE) * valid_N[:, None]
    kept_NA = jnp.broadcast_to(valid_N[:, None], ids_NA.shape)
    dropped = jnp.zeros((), jnp.float32)
    if options.capacity_factor:
        within_NA = _within_capacity(one_hots_NE, valid_N, options)
        dropped = jnp.sum(kept_NA & ~within_NA, dtype=jnp.float32)
        kept_NA &= within_NA
    choice = Choice(jnp.where(kept_NA, ids_NA, NO_EXPERT), jnp.where(kept_NA, weights_NA, 0.0))
    return choice, _sums(logits_NE, taken_NE, valid_N, options, dropped=dropped, unreplayed=unreplayed)


def probabilities(logits_NE: jax.Array, score: str) -> jax.Array:
    """The router's probabilities: softmax, or sigmoid scores divided by their sum."""
    if score == "softmax":
        return jax.nn.softmax(logits_NE, axis=-1)
    scores_NE = jax.nn.sigmoid(logits_NE)
    return scores_NE / (jnp.sum(scores_NE, axis=-1, keepdims=True) + 1e-20)


def capacity(num_tokens: jax.Array, num_experts: int, options: RouterOptions) -> jax.Array:
    """Assignments that one expert takes: ceil(capacity_factor · tokens · A ÷ E), at least 1. float32 scalar."""
    balanced = num_tokens * options.experts_per_token / num_experts
    return jnp.maximum(jnp.ceil(options.capacity_factor * balanced), 1.0)


def _selection_scores(
    logits_NE: jax.Array, options: RouterOptions, bias_E: jax.Array | None, noise_key: jax.Array | None
) -> jax.Array:
    if options.score not in SCORES:
        raise ValueError(f"router score {options.score!r}: use one of {', '.join(SCORES)}")
    logits_NE = jax.lax.stop_gradient(logits_NE)
    if options.noise and noise_key is not None:
        logits_NE = logits_NE + options.noise * jax.random.normal(noise_key, logits_NE.shape)
    score = jax.nn.softmax if options.score == "softmax" else jax.nn.sigmoid
    scores_NE = score(logits_NE)
    return scores_NE if bias_E is None else scores_NE + jax.lax.stop_gradient(bias_E)[None]


def _select(scores_NE: jax.Array, experts_per_token: int) -> tuple[jax.Array, list[jax.Array]]:
    """(ids_NA, one bool [N, E] per choice) of the highest scores."""
    # A argmax passes: on CPU several times faster than top_k, with the same order and ties to the lower id.
    ids, one_hots = [], []
    for _ in range(experts_per_token):
        ids.append(jnp.argmax(scores_NE, axis=-1))
        one_hots.append(jax.nn.one_hot(ids[-1], scores_NE.shape[-1], dtype=bool))
        scores_NE = jnp.where(one_hots[-1], -jnp.inf, scores_NE)
    return jnp.stack(ids, axis=-1), one_hots


def _weights(logits_NE: jax.Array, one_hots_NE: list[jax.Array], options: RouterOptions) -> jax.Array:
    """Weights of the choice, from unbiased scores of the current logits."""

    def gather(values_NE: jax.Array) -> jax.Array:
        return jnp.stack([jnp.sum(jnp.where(hot, values_NE, 0.0), axis=-1) for hot in one_hots_NE], axis=-1)

    if options.score == "softmax" and options.renormalise:
        # Softmax over the choice: the same as dividing probabilities, and right where those underflow.
        return options.scale * jax.nn.softmax(gather(logits_NE), axis=-1)
    score = jax.nn.softmax if options.score == "softmax" else jax.nn.sigmoid
    weights_NA = gather(score(logits_NE))
    if options.renormalise:
        weights_NA = weights_NA / (jnp.sum(weights_NA, axis=-1, keepdims=True) + 1e-20)
    return options.scale * weights_NA


def _within_capacity(one_hots_NE: list[jax.Array], valid_N: jax.Array, options: RouterOptions) -> jax.Array:
    """bool [N, A]: whether the expert still has room. First choices go first, and then earlier tokens."""
    limit = capacity(jnp.sum(valid_N, dtype=jnp.float32), one_hots_NE[0].shape[-1], options)
    used_E = jnp.zeros((one_hots_NE[0].shape[-1],), jnp.int32)
    within = []
    for hot_NE in one_hots_NE:
        wanted_NE = (hot_NE & valid_N[:, None]).astype(jnp.int32)
        place_NE = used_E[None] + jnp.cumsum(wanted_NE, axis=0)  # 1 for the first
        within.append(jnp.sum(jnp.where(hot_NE, place_NE, 0), axis=-1) <= limit)
        used_E = used_E + jnp.sum(wanted_NE, axis=0)
    return jnp.stack(within, axis=-1)


def _sums(
    logits_NE: jax.Array,
    taken_NE: jax.Array,
    valid_N: jax.Array,
    options: RouterOptions,
    *,
    dropped: jax.Array,
    unreplayed: jax.Array,
) -> Routing:
    probs_NE = probabilities(logits_NE, options.score)
    fixed_NE = jax.lax.stop_gradient(probs_NE)
    entropy_N = -jnp.sum(fixed_NE * jnp.log(jnp.maximum(fixed_NE, 1e-30)), axis=-1)
    z_N = jnp.square(jax.scipy.special.logsumexp(logits_NE, axis=-1))
    return Routing(
        counts_E=jax.lax.stop_gradient(jnp.sum(taken_NE, axis=0)),
        prob_sums_E=jnp.sum(jnp.where(valid_N[:, None], probs_NE, 0.0), axis=0),
        num_tokens=jnp.sum(valid_N, dtype=jnp.float32),
        z_sum=jnp.sum(jnp.where(valid_N, z_N, 0.0)),
        entropy_sum=jnp.sum(jnp.where(valid_N, entropy_N, 0.0)),
        dropped=dropped,
        unreplayed=unreplayed,
    )
