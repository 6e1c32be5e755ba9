"""From values per token to one number: masked sums whose denominators the caller gives.

The denominators are those of the *whole optimizer step*, so the parts of microbatches add up to the step's value, and
microbatch size, row order, packing and sharding change nothing.

Dimensions: B rows, T positions of a row.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


def masked_mean(values: jax.Array, loss_mask: jax.Array, denominator: jax.Array | float) -> jax.Array:
    """Sum of `values` where the mask is 1, over max(denominator, 1): 0 and not NaN when everything is masked."""
    chex.assert_equal_shape([values, loss_mask])
    return jnp.sum(jnp.where(loss_mask, values, 0.0)) / jnp.maximum(denominator, 1.0)


def sequence_sums(values_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Sum over each position's own sequence, at every position of it: [B, T].

    Args:
      values_BT: 0 where they are not to count.
      segment_ids_BT: int32 from 0 to T; positions of one row with the same id are one sequence.
    """
    chex.assert_rank([values_BT, segment_ids_BT], 2)
    chex.assert_equal_shape([values_BT, segment_ids_BT])
    return jnp.take_along_axis(_sums_by_id(values_BT, segment_ids_BT), segment_ids_BT, axis=1)


def _sums_by_id(values_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """[B, T + 1]: sum of every segment id of every row."""
    num_ids = values_BT.shape[1] + 1
    return jax.vmap(lambda values, ids: jax.ops.segment_sum(values, ids, num_ids))(values_BT, segment_ids_BT)


def count_sequences(loss_mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Sequences with at least one token in the mask: float32 scalar."""
    chex.assert_rank([loss_mask_BT, segment_ids_BT], 2)
    return jnp.sum(_sums_by_id(loss_mask_BT.astype(jnp.float32), segment_ids_BT) > 0, dtype=jnp.float32)


def token_weights(
    *,
    loss_mask: jax.Array,
    segment_ids: jax.Array,
    aggregation: str,
    num_tokens: jax.Array | float,
    num_sequences: jax.Array | float,
    constant_length: float,
) -> jax.Array:
    """Weight of each token in the step's loss; 0 where the mask is 0.

    * `token_mean`: 1 / tokens of the step. Every token counts alike (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 8).
    * `sequence_mean`: 1 / (tokens of its sequence · sequences of the step). Every sequence counts alike (GRPO, Shao et
      al. 2024, arXiv 2402.03300, eq. 3).
    * `constant`: 1 / (constant_length · sequences of the step). No weight depends on how long an answer is (Dr. GRPO,
      Liu et al. 2025, arXiv 2503.20783).

    Args:
      loss_mask: bool [B, T]; the one effective mask.
      segment_ids: int32 [B, T]; see `sequence_sums`.
      aggregation: one of `AGGREGATIONS`.
      num_tokens: tokens in the mask of the *whole step*.
      num_sequences: sequences with a token in the mask, of the *whole step*.
      constant_length: tokens, more than 0; read by `constant` alone.

    Raises:
      ValueError: for another aggregation.
    """
    chex.assert_rank([loss_mask, segment_ids], 2)
    chex.assert_equal_shape([loss_mask, segment_ids])
    mask = loss_mask.astype(jnp.float32)
    if aggregation == "token_mean":
        return mask / jnp.maximum(num_tokens, 1.0)
    if aggregation == "sequence_mean":
        own_length = jnp.maximum(sequence_sums(mask, segment_ids), 1.0)
        return mask / (own_length * jnp.maximum(num_sequences, 1.0))
    if aggregation == "constant":
        return mask / (constant_length * jnp.maximum(num_sequences, 1.0))
    raise ValueError(f"aggregation {aggregation!r}: use one of {', '.join(AGGREGATIONS)}")


def weighted_sum(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Σ weights · values; a value whose weight is 0 may be anything, NaN included."""
    chex.assert_equal_shape([values, weights])
    return jnp.sum(jnp.where(weights > 0, values, 0.0) * weights)


def whiten(values: jax.Array, loss_mask: jax.Array, eps: float = 1e-8) -> jax.Array:
    """Mean 0 and population variance 1 over the tokens of the mask; 0 elsewhere, and 0 when all of them are equal.

    Over the *whole step*: call it before microbatches are cut. Values of the mask that are all equal are recognised by
    max = min, since their deviation need not be exactly 0 in floating point.

    Args:
      values: float32, any shape.
      loss_mask: bool of the same shape.
      eps: added to the variance.
    """
    chex.assert_equal_shape([values, loss_mask])
    count = jnp.maximum(jnp.sum(loss_mask, dtype=jnp.float32), 1.0)
    mean = jnp.sum(jnp.where(loss_mask, values, 0.0)) / count
    centred = jnp.where(loss_mask, values - mean, 0.0)
    scaled = centred * jax.lax.rsqrt(jnp.sum(jnp.square(centred)) / count + eps)
    largest, smallest = (jnp.max(jnp.where(loss_mask, sign * values, -jnp.inf)) for sign in (1.0, -1.0))
    return jnp.where(largest > -smallest, scaled, 0.0)
