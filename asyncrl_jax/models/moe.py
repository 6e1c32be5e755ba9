"""Mixture of experts: a router (`router.py`) and SwiGLU experts (`experts.py`), dropless unless a capacity is set.

Dimensions: B rows, T positions, N tokens, D hidden width, E experts, A experts of one token, F expert width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from asyncrl_jax.models.experts import Experts, run_experts
from asyncrl_jax.models.router import RouterOptions, Routing, route


def moe(
    x_ND: jax.Array,
    valid_N: jax.Array,
    router_DE: jax.Array,
    experts: Experts,
    options: RouterOptions,
    *,
    dispatch: str,
    bias_E: jax.Array | None = None,
    replay_NA: jax.Array | None = None,
    noise_key: jax.Array | None = None,
) -> tuple[jax.Array, Routing]:
    """Output of one MoE layer, and what its router did.

    Args:
      x_ND: tokens; the router computes in float32 whatever their dtype.
      valid_N: bool; False for padding, whose output is 0.
      router_DE: router weights.
      experts: SwiGLU weights.
      options: the router's kind.
      dispatch: "blocked", "ragged" or "dense"; all compute the same function (see `run_experts`).
      bias_E: see `route`.
      replay_NA: see `route`.
      noise_key: see `route`.

    Raises:
      ValueError: for another dispatch or router.
    """
    logits_NE = x_ND.astype(jnp.float32) @ router_DE
    choice, routing = route(logits_NE, valid_N, options, bias_E=bias_E, replay_NA=replay_NA, noise_key=noise_key)
    return run_experts(x_ND, choice.ids_NA, choice.weights_NA, experts, dispatch=dispatch), routing


class MoE(nnx.Module):
    """One MoE layer."""

    def __init__(
        self, hidden_dim: int, expert_dim: int, num_experts: int, options: RouterOptions, std: float, rngs: nnx.Rngs
    ):
        init = nnx.initializers.normal(std)
        self.options = options
        self.router = nnx.Param(init(rngs.params(), (hidden_dim, num_experts)))
        if options.selection_bias:
            self.router_bias = nnx.Param(jnp.zeros(num_experts))
        self.gate_proj = nnx.Param(init(rngs.params(), (num_experts, hidden_dim, expert_dim)))
        self.up_proj = nnx.Param(init(rngs.params(), (num_experts, hidden_dim, expert_dim)))
        self.down_proj = nnx.Param(init(rngs.params(), (num_experts, expert_dim, hidden_dim)))

    def __call__(self, x_BTD: jax.Array, valid_BT: jax.Array, dispatch: str) -> tuple[jax.Array, Routing]:
        """Args: valid_BT: bool, False for padding; dispatch: see `moe`."""
        dtype = x_BTD.dtype
        y_ND, routing = moe(
            x_BTD.reshape(-1, x_BTD.shape[-1]),
            valid_BT.reshape(-1),
            self.router[...],
            Experts(*(weights[...].astype(dtype) for weights in (self.gate_proj, self.up_proj, self.down_proj))),
            self.options,
            dispatch=dispatch,
            bias_E=self.router_bias[...] if self.options.selection_bias else None,
        )
        return y_ND.reshape(x_BTD.shape).astype(dtype), routing
