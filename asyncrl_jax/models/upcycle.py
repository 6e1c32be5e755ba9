"""A mixture of experts from a dense model (Komatsuzaki et al. 2022, arXiv 2212.05055): the same function at first.

Every expert of a layer is a copy of its MLP, and the weights of a token's experts sum to 1; so whatever the router
chooses, the layer gives what the MLP gave. The router starts small and random, so that the choice is spread and experts
become different in training.

Dimensions: D hidden width, E experts, F width of the MLP.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from asyncrl_jax.config_model import ModelConfig, RouterConfig
from asyncrl_jax.models.transformer import Params, abstract_params

_MATRICES = ("gate_proj", "up_proj", "down_proj")


def upcycle(
    params: Params,
    config: ModelConfig,
    num_experts: int,
    experts_per_token: int,
    seed: int,
    *,
    router_std: float = 0.02,
    noise: float = 0.0,
) -> tuple[Params, ModelConfig]:
    """(weights, settings) of a mixture of experts that computes what the dense model computes.

    Args:
      params: of the dense model.
      config: of the dense model: Llama or Qwen3, without biases. The result is a Mixtral or a Qwen3-MoE.
      num_experts: E of every layer.
      experts_per_token: experts that serve a token.
      seed: of router and noise.
      router_std: standard deviation of the router's weights.
      noise: standard deviation of noise on the experts, relative to that of each matrix; 0 keeps the function exactly.

    Raises:
      ValueError: for a model that has experts already, or that no family with experts can express.
    """
    made = _with_experts(config, num_experts, experts_per_token)
    key = jax.random.key(seed)
    upcycled: Params = {}
    for number, (name, leaf) in enumerate(abstract_params(made).items()):
        of_leaf = jax.random.fold_in(key, number)
        prefix, _, last = name.rpartition(".moe.")
        if not prefix:
            upcycled[name] = params[name.replace(".moe_norm", ".mlp_norm")]
        elif last in _MATRICES:
            upcycled[name] = _copies(params[f"{prefix}.mlp.{last}"], num_experts, noise, of_leaf)
        else:
            upcycled[name] = router_std * jax.random.normal(of_leaf, leaf.shape, leaf.dtype)
    return upcycled, made


def _with_experts(config: ModelConfig, num_experts: int, experts_per_token: int) -> ModelConfig:
    attention = config.attention
    if config.num_moe_layers:
        raise ValueError(f"{config.family}: {config.num_moe_layers} layers have experts already")
    families = {"none": "mixtral", "head": "qwen3_moe"}
    biased = attention.qkv_bias or attention.output_bias or config.mlp_bias
    if biased or attention.qk_norm not in families:
        what = "biases" if biased else f"qk_norm {attention.qk_norm!r}"
        raise ValueError(f"{config.family} with {what}: no family with experts can express it")
    return dataclasses.replace(
        config,
        family=families[attention.qk_norm],
        checkpoint="",
        mlp_pattern="m",
        mlp_dim=0,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_dim=config.mlp_dim,
        router=RouterConfig(),
    )


def _copies(matrix: jax.Array, num_experts: int, noise: float, key: jax.Array) -> jax.Array:
    """[E, …] copies of a matrix, with noise if asked for."""
    copies = jnp.broadcast_to(matrix[None], (num_experts, *matrix.shape))
    if noise:
        copies = copies + noise * jnp.std(matrix) * jax.random.normal(key, copies.shape, copies.dtype)
    return copies
