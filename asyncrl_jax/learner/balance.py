"""What keeps the experts' load balanced: losses, and biases that need none. Dimensions: L layers, E experts."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from asyncrl_jax.models.router import Routing
from asyncrl_jax.models.transformer import Params


def balance_loss(step_routing: Routing, prob_sums_LE: jax.Array, experts_per_token: int) -> jax.Array:
    """Balance loss of the part of the step that these probabilities were summed over; 0 for a dense model."""
    if step_routing.counts_E.shape[0] == 0:
        return jnp.zeros(())
    return switch_balance_loss(
        counts_LE=step_routing.counts_E,
        prob_sums_LE=prob_sums_LE,
        num_tokens=step_routing.num_tokens[0],
        experts_per_token=experts_per_token,
    )


def router_z_loss(step_routing: Routing, z_sum_L: jax.Array) -> jax.Array:
    """Router z-loss (Zoph et al. 2022, arXiv 2202.08906, equation 5), mean over layers, of a part of the step.

    The mean over tokens of the squared logsumexp of the router's logits; `z_sum_L` is summed over the part's tokens.
    0 for a dense model.
    """
    if z_sum_L.shape[0] == 0:
        return jnp.zeros(())
    return jnp.mean(z_sum_L / jnp.maximum(jax.lax.stop_gradient(step_routing.num_tokens), 1.0))


def balanced_biases(params: Params, counts_LE: jax.Array, rate: jax.Array | float) -> Params:
    """`params` whose selection biases moved by `rate` towards balance: b += rate · sign(mean load − load).

    Auxiliary-loss-free balancing (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), on the whole step's counts. No
    gradient is involved, and the weights of a token's experts do not see the bias.
    """
    names = [name for name in params if name.endswith(".moe.router_bias")]
    moved = dict(params)
    for row, name in enumerate(sorted(names, key=lambda name: int(name.split(".")[1]))):
        counts_E = counts_LE[row]
        moved[name] = params[name] + rate * jnp.sign(jnp.mean(counts_E) - counts_E)
    return moved


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
