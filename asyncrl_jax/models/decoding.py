"""Cached decoding for the engine: the same function as a forward pass over the whole sequence.

A global layer keeps all positions, position p at slot p. A sliding layer keeps as many as it sees, position p at slot
p mod window: what a new token overwrites has just left the window of every query to come.

Dimensions: B rows, S positions of the cache, C slots of one layer's cache (S, or the window where that is less), D
hidden width, G key/value heads, K width of a key head, U width of a value head, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from asyncrl_jax.config import ModelConfig
from asyncrl_jax.models.attention import AttentionSpec, attend_cached, attend_packed
from asyncrl_jax.models.transformer import Decoder


class LayerCache(NamedTuple):
    """Keys and values of one layer, in the compute dtype."""

    k_BCGK: jax.Array
    v_BCGU: jax.Array


KVCache = tuple[LayerCache, ...]  # of every layer; each array's first dimension is the sequence


def _num_slots(spec: AttentionSpec, length: int) -> int:
    return min(spec.window, length) if spec.window else length


def init_cache(config: ModelConfig, batch: int, length: int) -> KVCache:
    """An empty cache for `batch` sequences of up to `length` tokens."""
    caches = []
    for layer in range(config.num_layers):
        spec = AttentionSpec.of(config, layer)
        shape = (batch, _num_slots(spec, length), spec.num_kv_heads)
        keys = jnp.zeros((*shape, spec.head_dim), config.compute_dtype)
        caches.append(LayerCache(keys, jnp.zeros((*shape, spec.v_head_dim), config.compute_dtype)))
    return tuple(caches)


def prefill(decoder: Decoder, tokens_BS: jax.Array, lengths_B: jax.Array) -> tuple[jax.Array, KVCache]:
    """Logits of whole sequences, and a cache of S positions to decode on from.

    Args:
      decoder: the model.
      tokens_BS: int32, left-aligned; what follows a sequence's length is ignored.
      lengths_B: int32, tokens of each sequence; 0 for an unused slot.

    Returns:
      (float32 logits_BSV, cache). Logits and cache past a sequence's length have no meaning.
    """
    batch, length = tokens_BS.shape
    positions_BS = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    one_sequence_BS = jnp.ones((batch, length), jnp.int32)
    valid_BS = positions_BS < lengths_B[:, None]
    x_BSD = decoder.embed(tokens_BS)
    caches = []
    for layer in decoder.layers:
        spec, sinks_H = layer.attention.spec, layer.attention.sink_logits()
        q, k, v = layer.attention.project(layer.normed(x_BSD), positions_BS)
        x_BSD += layer.attention.output(attend_packed(q, k, v, one_sequence_BS, window=spec.window, sinks_H=sinks_H))
        x_BSD += layer.feed_forward(x_BSD, valid_BS, "dense")[0]
        num_slots = _num_slots(spec, length)
        caches.append(LayerCache(*(_newest(kept, lengths_B, num_slots) for kept in (k, v))))
    return decoder.head(decoder.final_norm(x_BSD)), tuple(caches)


def _newest(kept_BSGK: jax.Array, lengths_B: jax.Array, num_slots: int) -> jax.Array:
    """[B, C, G, K]: at slot c the newest position p below the length with p mod C = c."""
    if num_slots == kept_BSGK.shape[1]:
        return kept_BSGK
    last_B1 = lengths_B[:, None] - 1
    position_BC = last_B1 - (last_B1 - jnp.arange(num_slots)[None]) % num_slots
    return jnp.take_along_axis(kept_BSGK, jnp.maximum(position_BC, 0)[:, :, None, None], axis=1)


def decode_step(
    decoder: Decoder, tokens_B: jax.Array, positions_B: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """One token of every sequence: its keys and values enter the cache, and its logits predict the next token.

    Args:
      decoder: the model.
      tokens_B: int32.
      positions_B: int32; position of the token in its own sequence, each below the cache's length. The cache must hold
        all earlier positions that a layer sees; what it holds later is not seen.
      cache: see `init_cache`; donate it to `jit` to have it updated in place.

    Returns:
      (float32 logits_BV, cache).
    """
    rows_B, positions_B1 = jnp.arange(tokens_B.shape[0]), positions_B[:, None]
    valid_B1 = jnp.ones(positions_B1.shape, bool)
    x_B1D = decoder.embed(tokens_B)[:, None]
    caches = []
    for layer, old in zip(decoder.layers, cache, strict=True):
        q, k, v = layer.attention.project(layer.normed(x_B1D), positions_B1)
        num_slots = old.k_BCGK.shape[1]
        k_BCGK = old.k_BCGK.at[rows_B, positions_B % num_slots].set(k[:, 0])
        v_BCGU = old.v_BCGU.at[rows_B, positions_B % num_slots].set(v[:, 0])
        # Every slot of a sliding layer that was ever written holds a position of the window.
        visible_BC = jnp.arange(num_slots)[None] <= positions_B1
        sinks_H = layer.attention.sink_logits()
        heads_BHU = attend_cached(q[:, 0], k_BCGK, v_BCGU, visible_BC, sinks_H=sinks_H)
        x_B1D += layer.attention.output(heads_BHU[:, None])
        x_B1D += layer.feed_forward(x_B1D, valid_B1, "dense")[0]
        caches.append(LayerCache(k_BCGK, v_BCGU))
    return decoder.head(decoder.final_norm(x_B1D))[:, 0], tuple(caches)
