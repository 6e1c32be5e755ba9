"""The decoder of every family: training on packed rows, and cached decoding for the engine (`decoding.py`).

Parameters travel as a flat dict by dotted name (`"layers.0.moe.gate_proj"`): `params_of` takes them out of a decoder,
and `merge(graph_of(config), params)` puts them back, inside or outside of `jit`. They are float32; products are
computed in `compute_dtype`, and norms, rotary angles, router and softmax in float32 all the same.

Dimensions: B rows, T positions of a row, L layers with experts, D hidden width, E experts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from asyncrl_jax.config import ModelConfig
from asyncrl_jax.models.attention import Attention, AttentionSpec, rms_norm
from asyncrl_jax.models.head import TargetScores, score_targets
from asyncrl_jax.models.mlp import MLP
from asyncrl_jax.models.moe import ANYWHERE, MoE, Placement
from asyncrl_jax.models.router import RouterOptions, Routing

Params = dict[str, jax.Array]


class DecoderOutput(NamedTuple):
    """What a forward pass gives."""

    logits_BTV: jax.Array  # float32; position t predicts token t + 1
    routing: Routing  # every field stacked over layers with experts: counts and prob_sums [L, E], others [L]


class Trunk(NamedTuple):
    """What a forward pass gives before the head."""

    x_BTD: jax.Array  # normalised, in the compute dtype: the head's input
    routing: Routing  # as in `DecoderOutput`


class Layer(nnx.Module):
    """Attention and experts or an MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, rngs: nnx.Rngs):
        c = config
        self.norm_eps = c.norm_eps
        self.is_moe = c.is_moe(index)
        self.attention_norm = nnx.Param(jnp.ones(c.hidden_dim))
        self.attention = Attention(AttentionSpec.of(c, index), rngs)
        if self.is_moe:
            self.moe_norm = nnx.Param(jnp.ones(c.hidden_dim))
            options = RouterOptions(c.experts_per_token, **dataclasses.asdict(c.router))
            self.moe = MoE(c.hidden_dim, c.expert_dim, c.num_experts, options, c.init_std, rngs)
        else:
            self.mlp_norm = nnx.Param(jnp.ones(c.hidden_dim))
            self.mlp = MLP(c.hidden_dim, c.mlp_dim, bias=c.mlp_bias, std=c.init_std, rngs=rngs)

    def normed(self, x_BTD: jax.Array) -> jax.Array:
        """The attention's input."""
        return rms_norm(x_BTD, self.attention_norm[...], self.norm_eps)

    def feed_forward(
        self,
        x_BTD: jax.Array,
        valid_BT: jax.Array,
        dispatch: str,
        *,
        replay_BTA: jax.Array | None = None,
        noise_key: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing | None]:
        """(what experts or MLP add to the residual stream, what the router did). Keywords as in `router.route`."""
        if not self.is_moe:
            return self.mlp(rms_norm(x_BTD, self.mlp_norm[...], self.norm_eps)), None
        h_BTD = rms_norm(x_BTD, self.moe_norm[...], self.norm_eps)
        return self.moe(h_BTD, valid_BT, dispatch, replay_BTA=replay_BTA, noise_key=noise_key)


class Decoder(nnx.Module):
    """Embedding, layers, norm and head.

    `Decoder(config, rngs=nnx.Rngs(seed))` is random; the same seed gives the same weights.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(config.init_std)
        self.config = config
        self.placement = ANYWHERE
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_dim)))
        self.layers = nnx.List([Layer(config, index, rngs) for index in range(config.num_layers)])
        self.norm = nnx.Param(jnp.ones(config.hidden_dim))
        if not config.tie_embeddings:
            self.lm_head = nnx.Param(init(rngs.params(), (config.hidden_dim, config.vocab_size)))

    def __call__(
        self, tokens_BT: jax.Array, positions_BT: jax.Array | None = None, segment_ids_BT: jax.Array | None = None
    ) -> jax.Array:
        """float32 logits [B, T, V]; see `forward`. Left out, positions count from 0 and a row is one sequence."""
        tokens_BT = jnp.asarray(tokens_BT)
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
        if segment_ids_BT is None:
            segment_ids_BT = jnp.ones_like(tokens_BT)
        return self.forward(tokens_BT, positions_BT, segment_ids_BT).logits_BTV

    def forward(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array,
        *,
        replay_BTLA: jax.Array | None = None,
        noise_key: jax.Array | None = None,
    ) -> DecoderOutput:
        """Logits of packed rows, and what the routers did.

        Args:
          tokens_BT: int32.
          positions_BT: int32; position of each token in its own sequence.
          segment_ids_BT: int32; tokens of one sequence share an id, and 0 is padding: it is seen by no sequence, is
            routed nowhere and counts nowhere.
          replay_BTLA: int32 experts to choose in each layer with experts; rows of −1 are routed live (see `route`).
          noise_key: of the routers' selection noise; without one there is none.
        """
        x_BTD, routing = self.trunk(
            tokens_BT, positions_BT, segment_ids_BT, replay_BTLA=replay_BTLA, noise_key=noise_key
        )
        return DecoderOutput(self.head(x_BTD), routing)

    def trunk(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array,
        *,
        replay_BTLA: jax.Array | None = None,
        noise_key: jax.Array | None = None,
    ) -> Trunk:
        """All but the head, whose logits are the largest array of a step. Arguments as in `forward`."""

        def run(
            layer: Layer, x_BTD: jax.Array, replay_BTA: jax.Array | None, key: jax.Array | None
        ) -> tuple[jax.Array, Routing | None]:
            x_BTD += layer.attention(layer.normed(x_BTD), positions_BT, segment_ids_BT)
            y_BTD, routing = layer.feed_forward(
                x_BTD, segment_ids_BT > 0, self.config.dispatch, replay_BTA=replay_BTA, noise_key=key
            )
            return x_BTD + y_BTD, routing

        x_BTD = self.embed(tokens_BT)
        routings: list[Routing | None] = []
        for layer in self.layers:
            index = sum(routing is not None for routing in routings)  # among the layers with experts
            replay_BTA = replay_BTLA[:, :, index] if replay_BTLA is not None and layer.is_moe else None
            key = None if noise_key is None else jax.random.fold_in(noise_key, index)
            x_BTD, routing = _recomputed(functools.partial(run, layer), self.config.remat)(x_BTD, replay_BTA, key)
            routings.append(routing)
        return Trunk(self.final_norm(x_BTD), stack_routing(self.config, routings))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Rows of the embedding, in the compute dtype."""
        return jnp.take(self.embedding[...], tokens, axis=0).astype(self.config.compute_dtype)

    def final_norm(self, x_BTD: jax.Array) -> jax.Array:
        """The head's input."""
        return rms_norm(x_BTD, self.norm[...], self.config.norm_eps)

    def head(self, x: jax.Array) -> jax.Array:
        """float32 logits of normalised outputs [..., D]."""
        return jnp.matmul(x, self.head_DV.astype(x.dtype), preferred_element_type=jnp.float32)

    def score(
        self, x_BTD: jax.Array, targets_BT: jax.Array, temperature_BT: jax.Array, asked_BT: jax.Array
    ) -> TargetScores:
        """Log-probs and entropy of targets, from the trunk's output; see `score_targets`."""
        return score_targets(
            x_BTD,
            self.head_DV,
            targets_BT,
            temperature_BT,
            asked_BT,
            chunk_tokens=self.config.head_chunk_tokens,
            mesh=self.placement.mesh,
        )

    @property
    def head_DV(self) -> jax.Array:
        """Weights of the head."""
        return self.embedding[...].T if self.config.tie_embeddings else self.lm_head[...]


def _recomputed(function: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """`function`, whose backward pass computes again what `remat` says instead of keeping it."""
    if remat == "none":
        return function
    keep_dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(function, policy=keep_dots if remat == "dots" else None)


def stack_routing(config: ModelConfig, routings: Sequence[Routing | None]) -> Routing:
    """That of all layers with experts; of no layers for a dense model."""
    of_moe = [routing for routing in routings if routing is not None]
    if of_moe:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_moe)
    per_expert = {"counts_E", "prob_sums_E"}
    shapes = [(0, config.num_experts) if name in per_expert else (0,) for name in Routing._fields]
    return Routing(*map(jnp.zeros, shapes))


@functools.cache
def graph_of(config: ModelConfig, placement: Placement = ANYWHERE) -> nnx.GraphDef:
    """The structure of `Decoder(config)` without its weights. Hashable, so `jit` may close over it.

    Args:
      config: of the model.
      placement: the devices that experts and head run on; the function computed is the same.
    """
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    decoder.placement = placement
    for layer in decoder.layers:
        if layer.is_moe:
            layer.moe.placement = placement
    return nnx.split(decoder)[0]


def params_of(decoder: Decoder) -> Params:
    """Weights by dotted name."""
    flat = nnx.to_flat_state(nnx.state(decoder, nnx.Param))
    return {".".join(map(str, path)): leaf[...] for path, leaf in flat}


def merge(graph: nnx.GraphDef, params: Params) -> Decoder:
    """The decoder with these weights; free inside `jit`."""
    flat: dict[Any, Any] = {}
    for name, value in params.items():
        flat[tuple(int(part) if part.isdigit() else part for part in name.split("."))] = nnx.Param(value)
    return nnx.merge(graph, nnx.from_flat_state(flat))


def init_params(config: ModelConfig, seed: int) -> Params:
    """Random weights, the same for the same seed."""
    return params_of(Decoder(config, rngs=nnx.Rngs(seed)))


@functools.cache
def abstract_params(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every weight, without making any. Shared: do not change it."""
    return jax.eval_shape(lambda: init_params(config, 0))
