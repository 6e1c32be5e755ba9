"""Log-probs of targets and entropy, of the distribution that was sampled from.

Dimensions: B rows, T positions (position t predicts token t + 1), V vocabulary.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def token_logprobs(
    logits_BTV: jax.Array, targets_BT: jax.Array, temperature_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy, of softmax(logits / temperature).

    Args:
      logits_BTV: float32.
      targets_BT: int32.
      temperature_BT: float32, more than 0.

    Returns:
      (logprobs_BT, entropy_BT) in nats, both with gradient.
    """
    chex.assert_rank([logits_BTV, targets_BT, temperature_BT], [3, 2, 2])
    chex.assert_equal_shape([targets_BT, temperature_BT])
    logprobs_BTV = jax.nn.log_softmax(logits_BTV / temperature_BT[:, :, None], axis=-1)
    logprobs_BT = jnp.take_along_axis(logprobs_BTV, targets_BT[:, :, None], axis=-1)[:, :, 0]
    return logprobs_BT, -jnp.sum(jnp.exp(logprobs_BTV) * logprobs_BTV, axis=-1)
