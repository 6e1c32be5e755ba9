"""Values: a small critic head, generalised advantage estimation on packed rows, and the value loss.

An action is a token that the policy sampled. Tokens of tools and prompts lie between actions; a value is carried over
them, so that neither they nor padding nor a neighbour in the row enter anything.

Dimensions: B rows, T positions of a row (position t predicts token t + 1), D hidden width of the trunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]

CRITIC_PREFIX = "critic."


class Credit(NamedTuple):
    """Per token, [B, T], without gradient; 0 where the mask is 0."""

    advantages: jax.Array
    returns: jax.Array  # what values are to predict


def init_critic(hidden_dim: int, seed: int) -> Params:
    """A head of one hidden layer; its output layer is 0, so that every value starts at 0."""
    weights = jax.random.normal(jax.random.key(seed), (hidden_dim, hidden_dim)) * hidden_dim**-0.5
    return {
        f"{CRITIC_PREFIX}hidden": weights,
        f"{CRITIC_PREFIX}hidden_bias": jnp.zeros(hidden_dim),
        f"{CRITIC_PREFIX}out": jnp.zeros((hidden_dim, 1)),
        f"{CRITIC_PREFIX}out_bias": jnp.zeros(1),
    }


def critic_values(critic: Params, x_BTD: jax.Array, norm_eps: float = 1e-6) -> jax.Array:
    """Values [B, T] of the trunk's output; no gradient flows into the trunk, which is the policy's alone."""
    chex.assert_rank(x_BTD, 3)
    x_BTD = jax.lax.stop_gradient(x_BTD).astype(jnp.float32)
    x_BTD = x_BTD * jax.lax.rsqrt(jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True) + norm_eps)
    hidden_BTD = jax.nn.silu(x_BTD @ critic["critic.hidden"] + critic["critic.hidden_bias"][None, None])
    return (hidden_BTD @ critic["critic.out"] + critic["critic.out_bias"][None, None])[..., 0]


def suffix_sums(values_BT: jax.Array, loss_mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Sum of the values of this and all later actions of the sequence, [B, T]; 0 where the mask is 0."""
    rewards = jnp.where(loss_mask_BT, values_BT, 0.0)
    zeros = jnp.zeros_like(rewards)
    return gae(
        rewards=rewards, values=zeros, loss_mask=loss_mask_BT, segment_ids=segment_ids_BT, discount=1.0, decay=1.0
    ).advantages


def gae(
    *,
    rewards: jax.Array,
    values: jax.Array,
    loss_mask: jax.Array,
    segment_ids: jax.Array,
    discount: float,
    decay: float,
) -> Credit:
    """Generalised advantage estimation over actions alone (Schulman et al. 2016, arXiv 1506.02438, eq. 11 to 16).

    δ_t = r_t + γ V_t' − V_t, A_t = δ_t + γλ A_t', with t' the next action of the sequence and V = A = 0 after the last.

    Args:
      rewards: float32 [B, T], given for actions; read where the mask is 1.
      values: float32 [B, T], before each action.
      loss_mask: bool [B, T]; actions.
      segment_ids: int32 [B, T]; positions of one row with the same id are one sequence, side by side.
      discount: γ per action.
      decay: λ.
    """
    arrays = [rewards, values, loss_mask, segment_ids]
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape(arrays)
    rewards, values = (jax.lax.stop_gradient(jnp.where(loss_mask, x, 0.0)) for x in (rewards, values))

    def earlier(carry: Any, at: Any) -> tuple[Any, jax.Array]:
        next_value, next_advantage, next_segment = carry
        reward, value, action, segment = at
        same = segment == next_segment
        next_value, next_advantage = (jnp.where(same, x, 0.0) for x in (next_value, next_advantage))
        advantage = reward + discount * next_value - value + discount * decay * next_advantage
        carried = jnp.where(action, value, next_value), jnp.where(action, advantage, next_advantage), segment
        return carried, jnp.where(action, advantage, 0.0)

    by_time = tuple(x.T for x in (rewards, values, loss_mask, segment_ids))
    zeros_B = jnp.zeros_like(rewards[:, 0])
    start = (zeros_B, zeros_B, jnp.full_like(segment_ids[:, 0], -1))
    _, advantages_TB = jax.lax.scan(earlier, start, by_time, reverse=True)
    advantages = advantages_TB.T
    return Credit(advantages, advantages + values)


def value_terms(
    *,
    values: jax.Array,
    old_values: jax.Array,
    returns: jax.Array,
    loss_mask: jax.Array,
    clip_range: float,
) -> jax.Array:
    """PPO's value loss per token, [B, T]: half the squared error, or that of the clipped value if it is larger.

    ½ max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²): a step past V_old ± ε gains nothing (Schulman et al. 2017, as
    in their released code).

    Args:
      values: float32 [B, T], with gradient.
      old_values: float32 [B, T]; values of an earlier critic.
      returns: float32 [B, T].
      loss_mask: bool [B, T]; terms outside are 0.
      clip_range: ε, in units of reward; infinity is off.
    """
    chex.assert_rank([values, old_values, returns, loss_mask], 2)
    chex.assert_equal_shape([values, old_values, returns, loss_mask])
    old, goal = (jax.lax.stop_gradient(jnp.where(loss_mask, x, 0.0)) for x in (old_values, returns))
    values = jnp.where(loss_mask, values, 0.0)
    held = old + jnp.clip(values - old, -clip_range, clip_range)
    return 0.5 * jnp.maximum(jnp.square(values - goal), jnp.square(held - goal))
