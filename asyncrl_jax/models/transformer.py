"""A decoder of the Qwen3-MoE architecture, in fp32: training on packed rows, and cached decoding for the engine.

Parameters travel as a flat dict by dotted name (`"layers.0.moe.gate_proj"`): `params_of` takes them out of a decoder,
and `merge(graph_of(config), params)` puts them back, inside or outside of `jit`.

Dimensions: B rows, T positions of a row, S positions of the cache, L layers, D hidden width, G key/value heads, K head
width, E experts, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from asyncrl_jax.config import ModelConfig
from asyncrl_jax.models.attention import Attention, attend, packed_mask, rms_norm
from asyncrl_jax.models.moe import MoE
from asyncrl_jax.models.router import RouterOptions, Routing

Params = dict[str, jax.Array]


class DecoderOutput(NamedTuple):
    """What a forward pass gives."""

    logits_BTV: jax.Array  # float32; position t predicts token t + 1
    routing: Routing  # every field stacked over layers: counts [L, E], prob_sums [L, E], num_tokens [L]


class KVCache(NamedTuple):
    """Keys and values of B sequences; position s of a sequence is at s."""

    k_LBSGK: jax.Array
    v_LBSGK: jax.Array


class Layer(nnx.Module):
    """Attention and MoE, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c = config
        self.attention_norm = nnx.Param(jnp.ones(c.hidden_dim))
        self.attention = Attention(c.hidden_dim, c.num_heads, c.num_kv_heads, c.head_dim, c.init_std, rngs)
        self.moe_norm = nnx.Param(jnp.ones(c.hidden_dim))
        options = RouterOptions(c.experts_per_token)
        self.moe = MoE(c.hidden_dim, c.expert_dim, c.num_experts, options, c.init_std, rngs)


class Decoder(nnx.Module):
    """Embedding, layers, norm and an untied head.

    `Decoder(config, rngs=nnx.Rngs(seed))` is random; the same seed gives the same weights.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(config.init_std)
        self.config = config
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_dim)))
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.Param(jnp.ones(config.hidden_dim))
        self.lm_head = nnx.Param(init(rngs.params(), (config.hidden_dim, config.vocab_size)))

    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array) -> DecoderOutput:
        """Logits of packed rows.

        Args:
          tokens_BT: int32.
          positions_BT: int32; position of each token in its own sequence.
          segment_ids_BT: int32; tokens of one sequence share an id, and 0 is padding: it is seen by no sequence, is
            routed nowhere and counts nowhere.
        """
        mask_BTT = packed_mask(segment_ids_BT)
        x_BTD, routing, _ = self.run_layers(tokens_BT, positions_BT, segment_ids_BT > 0, mask_BTT, self.config.dispatch)
        return DecoderOutput(self.head(x_BTD), routing)

    def run_layers(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, valid_BT: jax.Array, mask_BTT: jax.Array, dispatch: str
    ) -> tuple[jax.Array, Routing, KVCache]:
        """Embedding and all layers: (x_BTD, routing, keys and values of every layer)."""
        config = self.config
        x_BTD = jnp.take(self.embedding[...], tokens_BT, axis=0)
        routings, caches = [], []
        for layer in self.layers:
            h_BTD = rms_norm(x_BTD, layer.attention_norm[...], config.norm_eps)
            q_BTHK, k_BTGK, v_BTGK = layer.attention.project(h_BTD, positions_BT, config.rope_theta, config.norm_eps)
            x_BTD += layer.attention.output(attend(q_BTHK, k_BTGK, v_BTGK, mask_BTT))
            y_BTD, routing = layer.moe(rms_norm(x_BTD, layer.moe_norm[...], config.norm_eps), valid_BT, dispatch)
            x_BTD += y_BTD
            routings.append(routing)
            caches.append(KVCache(k_BTGK, v_BTGK))
        stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
        return x_BTD, stack(*routings), stack(*caches)

    def head(self, x_BTD: jax.Array) -> jax.Array:
        """Logits of the last layer's output."""
        return rms_norm(x_BTD, self.norm[...], self.config.norm_eps) @ self.lm_head[...]


def init_cache(config: ModelConfig, batch: int, length: int) -> KVCache:
    """An empty cache for `batch` sequences of up to `length` tokens."""
    shape = (config.num_layers, batch, length, config.num_kv_heads, config.head_dim)
    return KVCache(jnp.zeros(shape), jnp.zeros(shape))


def prefill(decoder: Decoder, tokens_BS: jax.Array, lengths_B: jax.Array) -> tuple[jax.Array, KVCache]:
    """Logits of whole sequences, and a cache of S positions to decode on from.

    Args:
      decoder: the model.
      tokens_BS: int32, left-aligned; what follows a sequence's length is ignored.
      lengths_B: int32, tokens of each sequence; 0 for an unused slot.

    Returns:
      (logits_BSV, cache). Logits and cache past a sequence's length have no meaning.
    """
    batch, length = tokens_BS.shape
    positions_BS = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    valid_BS = positions_BS < lengths_B[:, None]
    mask_BSS = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool))[None], (batch, length, length))
    x_BSD, _, cache = decoder.run_layers(tokens_BS, positions_BS, valid_BS, mask_BSS, "dense")
    return decoder.head(x_BSD), cache


def decode_step(
    decoder: Decoder, tokens_B: jax.Array, positions_B: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """One token of every sequence: its keys and values enter the cache, and its logits predict the next token.

    Args:
      decoder: the model.
      tokens_B: int32.
      positions_B: int32; position of the token in its own sequence, each below the cache's length. The cache must hold
        all earlier positions; what it holds later is not seen.
      cache: see `init_cache`; donate it to `jit` to have it updated in place.

    Returns:
      (logits_BV, cache).
    """
    config = decoder.config
    k_LBSGK, v_LBSGK = cache
    batch, length = k_LBSGK.shape[1:3]
    rows_B, positions_B1 = jnp.arange(batch), positions_B[:, None]
    mask_B1S = jnp.arange(length)[None, None, :] <= positions_B[:, None, None]
    valid_B1 = jnp.ones((batch, 1), bool)
    x_B1D = jnp.take(decoder.embedding[...], tokens_B, axis=0)[:, None]
    for i, layer in enumerate(decoder.layers):
        h_B1D = rms_norm(x_B1D, layer.attention_norm[...], config.norm_eps)
        q_B1HK, k_B1GK, v_B1GK = layer.attention.project(h_B1D, positions_B1, config.rope_theta, config.norm_eps)
        k_LBSGK = k_LBSGK.at[i, rows_B, positions_B].set(k_B1GK[:, 0])
        v_LBSGK = v_LBSGK.at[i, rows_B, positions_B].set(v_B1GK[:, 0])
        x_B1D += layer.attention.output(attend(q_B1HK, k_LBSGK[i], v_LBSGK[i], mask_B1S))
        y_B1D, _ = layer.moe(rms_norm(x_B1D, layer.moe_norm[...], config.norm_eps), valid_B1, "dense")
        x_B1D += y_B1D
    return decoder.head(x_B1D)[:, 0], KVCache(k_LBSGK, v_LBSGK)


@functools.cache
def graph_of(config: ModelConfig) -> nnx.GraphDef:
    """The structure of `Decoder(config)` without its weights. Hashable, so `jit` may close over it."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[0]


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
