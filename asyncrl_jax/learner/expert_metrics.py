"""What the experts of each layer did in one update: load, idle experts, entropies, gradient norms, drops.

Dimensions: L layers with experts, E experts of one.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from asyncrl_jax.models.router import Routing

EXPERT_LEAVES = ("gate_proj", "up_proj", "down_proj")


def expert_gradient_norms(gradients: Mapping[str, jax.Array]) -> dict[int, jax.Array]:
    """Norm of the gradient of every expert, [E], by the number of its decoder layer."""
    squares: dict[int, jax.Array] = {}
    for name, gradient in gradients.items():
        layer, _, leaf = name.removeprefix("layers.").partition(".moe.")
        if leaf in EXPERT_LEAVES:
            square_E = jnp.sum(jnp.square(gradient.astype(jnp.float32)), axis=(1, 2))
            squares[int(layer)] = squares.get(int(layer), jnp.zeros(())) + square_E
    return {layer: jnp.sqrt(squares[layer]) for layer in sorted(squares)}


def expert_metrics(routing: Routing, gradients: Mapping[str, jax.Array], alarm_ratio: float) -> dict[str, jax.Array]:
    """Metrics of each layer i with experts, counted over all decoder layers, and of all.

      expert_load/layer_<i>               [E]; assignments ÷ the balanced load
      expert_load_max/layer_<i>, expert_load_min/layer_<i>   the largest and smallest of those: 1 is balanced
      expert_load_max_over_min/layer_<i>  their quotient; an idle expert counts as one with a single assignment
      expert_load_entropy/layer_<i>       of the shares of assignments, in nats; log E is balanced
      router_entropy/layer_<i>            mean over tokens of the entropy of the router's probabilities, in nats
      expert_grad_norm/layer_<i>          [E]
      dead_experts                        experts without an assignment, over all layers
      imbalanced_layers                   layers whose quotient is above `alarm_ratio`
      dropped_share                       assignments over capacity ÷ all
      unreplayed_share                    tokens without a row to replay ÷ all, where routing is replayed

    Args:
      routing: of the whole step, every field stacked over layers.
      gradients: by leaf name, of the whole step.
      alarm_ratio: largest load ÷ smallest that is still fine.
    """
    counts_LE = routing.counts_E
    tokens_L = jnp.maximum(routing.num_tokens, 1.0)
    assignments_L = jnp.maximum(jnp.sum(counts_LE, axis=1), 1.0)
    share_LE = counts_LE / assignments_L[:, None]
    load_LE = share_LE * counts_LE.shape[1]
    entropy_L = -jnp.sum(share_LE * jnp.log(jnp.maximum(share_LE, 1e-30)), axis=1)
    ratio_L = jnp.max(counts_LE, axis=1) / jnp.maximum(jnp.min(counts_LE, axis=1), 1.0)
    metrics = {
        "dead_experts": jnp.sum(counts_LE == 0),
        "imbalanced_layers": jnp.sum(ratio_L > alarm_ratio),
        "dropped_share": jnp.sum(routing.dropped) / jnp.maximum(jnp.sum(assignments_L), 1.0),
        "unreplayed_share": jnp.sum(routing.unreplayed) / jnp.maximum(jnp.sum(tokens_L), 1.0),
    }
    for row, (layer, norm_E) in enumerate(expert_gradient_norms(gradients).items()):
        metrics |= {
            f"expert_load/layer_{layer}": load_LE[row],
            f"expert_load_max/layer_{layer}": jnp.max(load_LE[row]),
            f"expert_load_min/layer_{layer}": jnp.min(load_LE[row]),
            f"expert_load_max_over_min/layer_{layer}": ratio_L[row],
            f"expert_load_entropy/layer_{layer}": entropy_L[row],
            f"router_entropy/layer_{layer}": routing.entropy_sum[row] / tokens_L[row],
            f"expert_grad_norm/layer_{layer}": norm_E,
        }
    return metrics
