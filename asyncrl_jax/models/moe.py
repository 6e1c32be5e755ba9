"""Mixture of experts: a router (`router.py`) and SwiGLU experts (`experts.py`), dropless unless a capacity is set.

`expert_parallel.py` spreads the experts over a mesh.

Dimensions: B rows, T positions, N tokens, D hidden width, E experts, A experts of one token, F expert width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from asyncrl_jax.models.expert_parallel import BUFFER_FACTOR, run_experts_on_mesh
from asyncrl_jax.models.experts import Experts, run_experts
from asyncrl_jax.models.router import RouterOptions, Routing, route


class Placement(NamedTuple):
    """Where experts and head run. Hashable: a part of the model's structure."""

    mesh: Mesh | None = None  # None: where the compiler puts them, on one device as a rule
    buffer_factor: float = BUFFER_FACTOR  # see `run_experts_on_mesh`


ANYWHERE = Placement()


def moe(
    x_BTD: jax.Array,
    valid_BT: jax.Array,
    router_DE: jax.Array,
    experts: Experts,
    options: RouterOptions,
    *,
    dispatch: str,
    placement: Placement = ANYWHERE,
    bias_E: jax.Array | None = None,
    replay_BTA: jax.Array | None = None,
    noise_key: jax.Array | None = None,
) -> tuple[jax.Array, Routing]:
    """Output of one MoE layer, and what its router did.

    Args:
      x_BTD: tokens; the router computes in float32 whatever their dtype.
      valid_BT: bool; False for padding, whose output is 0.
      router_DE: router weights.
      experts: SwiGLU weights.
      options: the router's kind.
      dispatch: "blocked", "ragged" or "dense"; all compute the same function (see `run_experts`).
      placement: the devices it runs on; all compute the same function.
      bias_E: see `route`.
      replay_BTA: see `route`.
      noise_key: see `route`.

    Raises:
      ValueError: for another dispatch or router, and for a mesh that does not divide rows or experts.
    """
    flat_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    replay_NA = None if replay_BTA is None else replay_BTA.reshape(-1, replay_BTA.shape[-1])
    # Experts first, and the weights transposed beforehand: a CPU takes a fifth of the time for the weights' gradient.
    router_ED = jax.lax.optimization_barrier(router_DE.T)
    logits_NE = jnp.matmul(router_ED, flat_ND.astype(jnp.float32).T).T
    choice, routing = route(
        logits_NE, valid_BT.reshape(-1), options, bias_E=bias_E, replay_NA=replay_NA, noise_key=noise_key
    )
    if placement.mesh is None or placement.mesh.size == 1:
        y_ND = run_experts(flat_ND, choice.ids_NA, choice.weights_NA, experts, dispatch=dispatch)
        return y_ND.reshape(x_BTD.shape), routing
    ids_BTA, weights_BTA = (array.reshape(*valid_BT.shape, -1) for array in choice)
    y_BTD = run_experts_on_mesh(
        x_BTD,
        ids_BTA,
        weights_BTA,
        experts,
        placement.mesh,
        dispatch=dispatch,
        buffer_factor=placement.buffer_factor,
    )
    return y_BTD, routing


class MoE(nnx.Module):
    """One MoE layer."""

    def __init__(
        self, hidden_dim: int, expert_dim: int, num_experts: int, options: RouterOptions, std: float, rngs: nnx.Rngs
    ):
        init = nnx.initializers.normal(std)
        self.options = options
        self.placement = ANYWHERE
        self.router = nnx.Param(init(rngs.params(), (hidden_dim, num_experts)))
        if options.selection_bias:
            self.router_bias = nnx.Param(jnp.zeros(num_experts))
        self.gate_proj = nnx.Param(init(rngs.params(), (num_experts, hidden_dim, expert_dim)))
        self.up_proj = nnx.Param(init(rngs.params(), (num_experts, hidden_dim, expert_dim)))
        self.down_proj = nnx.Param(init(rngs.params(), (num_experts, expert_dim, hidden_dim)))

    def __call__(
        self,
        x_BTD: jax.Array,
        valid_BT: jax.Array,
        dispatch: str,
        *,
        replay_BTA: jax.Array | None = None,
        noise_key: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing]:
        """`moe` with this layer's weights."""
        dtype = x_BTD.dtype
        y_BTD, routing = moe(
            x_BTD,
            valid_BT,
            self.router[...],
            Experts(*(weights[...].astype(dtype) for weights in (self.gate_proj, self.up_proj, self.down_proj))),
            self.options,
            dispatch=dispatch,
            placement=self.placement,
            bias_E=self.router_bias[...] if self.options.selection_bias else None,
            replay_BTA=replay_BTA,
            noise_key=noise_key,
        )
        return y_BTD.astype(dtype), routing
