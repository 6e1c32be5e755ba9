"""Cached decoding for the engine: the same function as a forward pass over the whole sequence.

A global layer keeps all positions, position p at slot p. A sliding layer keeps as many as it sees, position p at slot
p mod window: what a new token overwrites has just left the window of every query to come.

Dimensions: B rows of the cache, N rows of a call, T tokens of one of them, S positions of the cache, C slots of one
layer's cache (S, or the window where that is less), D hidden width, G key/value heads, K width of a key head, U width
of a value head, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from asyncrl_jax.config import ModelConfig
from asyncrl_jax.models.attention import AttentionSpec, attend_cached
from asyncrl_jax.models.transformer import Decoder


class LayerCache(NamedTuple):
    """Keys and values of one layer, in the compute dtype. Laid out as the products want them: rows by rows."""

    k_BGKC: jax.Array
    v_BGCU: jax.Array


KVCache = tuple[LayerCache, ...]  # of every layer; each array's first dimension is the sequence


def _num_slots(spec: AttentionSpec, length: int) -> int:
    return min(spec.window, length) if spec.window else length


def init_cache(config: ModelConfig, batch: int, length: int) -> KVCache:
    """An empty cache for `batch` sequences of up to `length` tokens."""
    caches = []
    for layer in range(config.num_layers):
        spec = AttentionSpec.of(config, layer)
        heads, num_slots = (batch, spec.num_kv_heads), _num_slots(spec, length)
        keys = jnp.zeros((*heads, spec.head_dim, num_slots), config.compute_dtype)
        caches.append(LayerCache(keys, jnp.zeros((*heads, num_slots, spec.v_head_dim), config.compute_dtype)))
    return tuple(caches)


def shortest_memory(config: ModelConfig, length: int) -> int:
    """Positions that every layer keeps of a sequence of up to `length` tokens: the newest, so many of them."""
    return min(_num_slots(AttentionSpec.of(config, layer), length) for layer in range(config.num_layers))


def part_of(cache: KVCache, rows_R: jax.Array | None, length: int) -> KVCache:
    """What some rows hold of positions below `length`, of sequences that are no longer than that.

    Args:
      cache: of B rows.
      rows_R: int32 rows, each at most once; B for none, whose part means nothing. None: all, as they stand.
      length: of the part.
    """

    leading = tuple(LayerCache(k_BGKC[..., :length], v_BGCU[:, :, :length]) for k_BGKC, v_BGCU in cache)
    return leading if rows_R is None else tuple(_rows(layer, rows_R) for layer in leading)


def with_part(cache: KVCache, part: KVCache, rows_R: jax.Array | None) -> KVCache:
    """`cache` with what `part_of` gave, changed since, put back."""

    def put_back(whole: jax.Array, new: jax.Array) -> jax.Array:
        if rows_R is None:
            return jax.lax.dynamic_update_slice(whole, new, (0, 0, 0, 0))
        return whole.at[rows_R, :, : new.shape[2], : new.shape[3]].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(put_back, cache, part)


def copy_rows(cache: KVCache, sources_N: jax.Array, targets_N: jax.Array) -> KVCache:
    """Copies sequences, one after the other; the first target of B or more, which is no row, ends it."""
    num_rows = cache[0].k_BGKC.shape[0]

    def copy(index: jax.Array, cache: KVCache) -> KVCache:
        def copied(array: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_slice_in_dim(array, sources_N[index], 1)
            return jax.lax.dynamic_update_slice_in_dim(array, row, targets_N[index], axis=0)

        return jax.tree.map(copied, cache)

    # As many as there are: a scatter of all N moves those that are none as well.
    return jax.lax.fori_loop(0, jnp.sum(targets_N < num_rows), copy, cache)


def dispatch_for(config: ModelConfig, num_rows: int) -> str:
    """How experts serve `num_rows` tokens (see `run_experts`).

    Below an assignment or so per expert nearly every expert has work, and computing them all is one product; a CPU
    takes the arithmetic that this costs harder than an accelerator, which waits for the weights in either case.
    """
    if config.dispatch == "dense" or not config.num_experts:
        return "dense"
    share = num_rows * config.experts_per_token / config.num_experts
    enough = 2 if jax.default_backend() == "cpu" else 64
    return config.dispatch if share >= enough else "dense"


def extend(
    decoder: Decoder,
    tokens_NT: jax.Array,
    rows_N: jax.Array,
    starts_N: jax.Array,
    lengths_N: jax.Array,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    """Several tokens of some sequences: their keys and values enter the cache.

    Args:
      decoder: the model.
      tokens_NT: int32, left-aligned; what follows a row's length is ignored.
      rows_N: int32 rows of the cache, each at most once; B or more for none.
      starts_N: int32; position of a row's first token. The cache must hold all earlier positions that a layer sees;
        what it holds later is not seen.
      lengths_N: int32, tokens of each row.
      cache: see `init_cache`; donate it to `jit` to have it updated in place.

    Returns:
      (the head's input [N, T, D], cache). The former has no meaning past a row's length.
    """
    steps_1T = jnp.arange(tokens_NT.shape[1], dtype=jnp.int32)[None]
    positions_NT, valid_NT = starts_N[:, None] + steps_1T, steps_1T < lengths_N[:, None]
    dispatch = dispatch_for(decoder.config, tokens_NT.size)
    x_NTD = decoder.embed(tokens_NT)
    caches = []
    for layer, old in zip(decoder.layers, cache, strict=True):
        spec, num_slots = layer.attention.spec, old.v_BGCU.shape[2]
        q, k, v = layer.attention.project(layer.normed(x_NTD), positions_NT)
        # Only the newest of each slot is written, so that no slot is written twice.
        newest_NT = valid_NT & (steps_1T >= lengths_N[:, None] - num_slots)
        new = _written(old, rows_N, positions_NT, newest_NT, k, v)
        if spec.window:
            # A chunk may overwrite what its own first queries see, so it attends to the cache as it was and to itself.
            kept = _rows(old, rows_N)
            k_NGKS = jnp.concatenate([kept.k_BGKC, k.transpose(0, 2, 3, 1)], axis=3)
            v_NGSU = jnp.concatenate([kept.v_BGCU, v.transpose(0, 2, 1, 3)], axis=2)
            own_NT = jnp.where(valid_NT, positions_NT, -1)
            at_NS = jnp.concatenate([_positions_kept(starts_N, num_slots), own_NT], axis=1)
        else:  # read after it was written: the other way around, the whole cache would be copied
            k_NGKS, v_NGSU = _rows(new, rows_N)
            at_NS = jnp.arange(num_slots)[None]
        distance_NTS = positions_NT[:, :, None] - at_NS[:, None]
        visible_NTS = (at_NS[:, None] >= 0) & (distance_NTS >= 0)
        if spec.window:
            visible_NTS &= distance_NTS < spec.window
        heads = attend_cached(q, k_NGKS, v_NGSU, visible_NTS, sinks_H=layer.attention.sink_logits())
        x_NTD += layer.attention.output(heads)
        x_NTD += layer.feed_forward(x_NTD, valid_NT, dispatch)[0]
        caches.append(new)
    return decoder.final_norm(x_NTD), tuple(caches)


def _rows(cache: LayerCache, rows_N: jax.Array) -> LayerCache:
    """Those rows of the cache; any row where one is past the end."""
    return LayerCache(*(jnp.take(array, rows_N, axis=0, mode="clip") for array in cache))


def _positions_kept(starts_N: jax.Array, num_slots: int) -> jax.Array:
    """[N, C]: the newest position before a row's start that each slot holds; negative for none."""
    last_N1 = starts_N[:, None] - 1
    return last_N1 - (last_N1 - jnp.arange(num_slots)[None]) % num_slots


def _written(
    old: LayerCache,
    rows_N: jax.Array,
    positions_NT: jax.Array,
    written_NT: jax.Array,
    k_NTGK: jax.Array,
    v_NTGU: jax.Array,
) -> LayerCache:
    """The cache with these keys and values, where `written`."""
    num_heads, head_dim, num_slots = old.k_BGKC.shape[1:]
    slots_NT = jnp.where(written_NT, positions_NT % num_slots, num_slots)  # one past the end is dropped
    row, head, slot = rows_N[:, None, None], jnp.arange(num_heads)[None, None], slots_NT[:, :, None]
    # Every number has an index of its own: with whole rows of keys, the compiler would turn the cache around for it.
    one = row[..., None], head[..., None], jnp.arange(head_dim)[None, None, None], slot[..., None]
    return LayerCache(
        old.k_BGKC.at[one].set(k_NTGK, mode="drop", unique_indices=True),
        old.v_BGCU.at[row, head, slot].set(v_NTGU, mode="drop", unique_indices=True),
    )


def decode_step(
    decoder: Decoder, tokens_B: jax.Array, positions_B: jax.Array, active_B: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """One token of every sequence: its keys and values enter the cache, and its logits predict the next token.

    Args:
      decoder: the model.
      tokens_B: int32.
      positions_B: int32; position of the token in its own sequence, each below the cache's length. The cache must hold
        all earlier positions that a layer sees; what it holds later is not seen.
      active_B: bool; the cache of other rows stays as it is, and their logits have no meaning.
      cache: see `init_cache`; donate it to `jit` to have it updated in place.

    Returns:
      (float32 logits_BV, cache).
    """
    rows_B, positions_B1 = jnp.arange(tokens_B.shape[0]), positions_B[:, None]
    dispatch = dispatch_for(decoder.config, tokens_B.size)
    x_B1D = decoder.embed(tokens_B)[:, None]
    caches = []
    for layer, old in zip(decoder.layers, cache, strict=True):
        q, k, v = layer.attention.project(layer.normed(x_B1D), positions_B1)
        new = _written(old, rows_B, positions_B1, active_B[:, None], k, v)
        # Every slot of a sliding layer that was ever written holds a position of the window.
        visible_B1C = (jnp.arange(old.v_BGCU.shape[2])[None] <= positions_B1)[:, None]
        heads = attend_cached(q, *new, visible_B1C, sinks_H=layer.attention.sink_logits())
        x_B1D += layer.attention.output(heads)
        x_B1D += layer.feed_forward(x_B1D, active_B[:, None], dispatch)[0]
        caches.append(new)
    return decoder.head(decoder.final_norm(x_B1D))[:, 0], tuple(caches)
