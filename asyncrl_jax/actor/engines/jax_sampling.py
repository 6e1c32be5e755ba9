"""Sampling on the device: one uniform number of each row, from its own seed and position, and the inverse of its CDF.

Compared with Gumbel noise on every logit it draws one number instead of V and takes no logarithm of each. The CDF is
searched in two levels: sums of spans of about √V tokens, then the tokens of one span. Both searches take the first
entry whose running sum reaches the target, so a token without probability is never sampled.

Dimensions: B rows, V vocabulary, W tokens of a span, X spans.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def sample(logits_BV: jax.Array, temperature_B: jax.Array, uniform_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A token of each row, and its log-prob.

    Args:
      logits_BV: of any float type.
      temperature_B: float32, more than 0.
      uniform_B: float32 in (0, 1], see `uniform`; every position of a sequence has a number of its own.

    Returns:
      (int32 [B], float32 [B] in nats), of softmax(logits / temperature).
    """
    scaled_BV = logits_BV.astype(jnp.float32) / temperature_B[:, None]  # fp32: log-probs enter ratios
    shifted_BV = scaled_BV - jnp.max(scaled_BV, axis=1, keepdims=True)
    vocab_size = shifted_BV.shape[1]
    width = 1 << (vocab_size - 1).bit_length() // 2
    num_spans = math.ceil(vocab_size / width)
    padding = ((0, 0), (0, num_spans * width - vocab_size))
    weights_BXW = jnp.pad(jnp.exp(shifted_BV), padding).reshape(-1, num_spans, width)
    sums_BX = jnp.cumsum(jnp.sum(weights_BXW, axis=2), axis=1)
    targets_B1 = (uniform_B * sums_BX[:, -1])[:, None]
    span_B = _first_reaching(sums_BX, targets_B1)
    before_BX = jnp.pad(sums_BX[:, :-1], ((0, 0), (1, 0)))
    inner_BW = jnp.cumsum(jnp.take_along_axis(weights_BXW, span_B[:, None, None], axis=1)[:, 0], axis=1)
    rest_B1 = targets_B1 - jnp.take_along_axis(before_BX, span_B[:, None], axis=1)
    # The sums of a span round differently in either level.
    token_B = span_B * width + _first_reaching(inner_BW, jnp.minimum(rest_B1, inner_BW[:, -1:]))
    logprobs_B = jnp.take_along_axis(shifted_BV, token_B[:, None], axis=1)[:, 0] - jnp.log(sums_BX[:, -1])
    return token_B, logprobs_B


def uniform(seed_2: jax.Array, position: jax.Array) -> jax.Array:
    """A number in (0, 1] of one row, from its own seed and position: batch-mates cannot change it."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl="threefry2x32"), position)
    return (jax.random.bits(key).astype(jnp.float32) + 1.0) * 2.0**-32


def _first_reaching(sums_BX: jax.Array, targets_B1: jax.Array) -> jax.Array:
    """int32 [B]: first entry of each row of running sums that is at least its target."""
    return jnp.sum(sums_BX < targets_B1, axis=1, dtype=jnp.int32)
