"""What the JAX engine runs on the device: a block of decode steps, a chunk of prompts, a copy of prefixes, a score.

All shapes are static, and every shape is compiled in `warm_up`:

    decode    up to N steps in one loop on the device, sampling included; one program for each of a few lengths L of
              cache, so that attention reads what is filled and little more, and for all rows or a part of them
    prefill   a chunk of several prompts, in one of a few shapes [rows, tokens]; makes keys and values, no logits
    copy      keys and values of a prefix, from row to row
    score     log-probs of whole sequences, without a cache; proofs alone need it

Dimensions: B rows (slots of the engine), R rows of a block, N steps of a block, P rows of a prefill, T tokens of one of
them, S positions of the cache, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncrl_jax.actor.engines.jax_sampling import sample, uniform
from asyncrl_jax.config import ModelConfig
from asyncrl_jax.models import KVCache, Params, graph_of, merge
from asyncrl_jax.models.decoding import copy_rows, decode_step, extend, part_of, with_part

COPIED_ROWS = 16  # of one copy
_SHORTEST_LENGTH = 32  # below it attention is no part of a step's time
_MOST_LENGTHS = 4
_FEWEST_ROWS = 8  # fewer take hardly less time
_MOST_ROW_COUNTS = 3
_PREFILL_WIDTHS = (16, 32, 64, 256)  # tokens of a row


Array = Any  # NumPy's on the host, JAX's inside of a program


class Block(NamedTuple):
    """What a block of decode steps is to do. NumPy arrays that nobody changes any more."""

    rows_R: Array  # int32 rows of the cache, each at most once; B for none. All B of them stand in their order
    tokens_R: Array  # int32; next token to feed
    positions_R: Array  # int32; its position
    steps_R: Array  # int32; tokens to feed at most, 0 for a row that rests
    given_NR: Array  # int32; what follows the token that step n feeds, where that is known; -1 where it is sampled
    seeds_R2: Array  # uint32
    temperature_R: Array  # float32


class Sampled(NamedTuple):
    """What a block of decode steps did."""

    tokens_NR: Array  # int32; the token that followed step n
    logprobs_NR: Array  # float32; of that token, where it was sampled
    fed_R: Array  # int32; steps that fed a token of the row
    num_steps: Array  # int32


class Chunk(NamedTuple):
    """Several tokens of some rows. NumPy arrays that nobody changes any more."""

    tokens_PT: Array  # int32
    rows_P: Array  # int32; B for none
    starts_P: Array  # int32
    lengths_P: Array  # int32


class Programs(NamedTuple):
    """Compiled for one model and shared by all engines of a process."""

    # (params, cache, block, stop_BV, patience, length=L) → (Sampled, cache). The loop ends early when rows that have
    # ended rested for more than `patience` steps, all together.
    decode: Callable[..., tuple[Sampled, KVCache]]
    prefill: Callable[..., KVCache]  # (params, cache, chunk)
    copy: Callable[..., KVCache]  # (cache, sources, targets)
    score: Callable[..., jax.Array]  # (params, tokens_PT, temperature_PT) → log-probs [P, T - 1] of tokens 1 to T - 1

    def num_compiled(self) -> int:
        """Programs that were compiled in this process, all shapes."""
        return sum(getattr(program, "_cache_size", int)() for program in self)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes of everything that is compiled."""

    num_slots: int  # B
    max_tokens: int  # S
    num_steps: int = 8  # N
    prefill_tokens: int = 256  # of a chunk, about
    memory: int = 0  # positions that every layer keeps of a sequence, the newest; 0: all
    share_prefixes: bool = True
    batch_invariant: bool = False  # every token goes through one program, so that its bits depend on nothing else

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Cache lengths that decode is compiled for: the whole one and a few halves of it."""
        lengths = [self.max_tokens]
        while not self.batch_invariant and lengths[-1] // 2 >= _SHORTEST_LENGTH and len(lengths) < _MOST_LENGTHS:
            lengths.append(lengths[-1] // 2)
        return tuple(reversed(lengths))

    @functools.cached_property
    def row_counts(self) -> tuple[int, ...]:
        """Rows R that decode is compiled for: all, and quarters of them for when few sequences want tokens."""
        counts = [self.num_slots]
        while not self.batch_invariant and counts[-1] // 4 >= _FEWEST_ROWS and len(counts) < _MOST_ROW_COUNTS:
            counts.append(counts[-1] // 4)
        return tuple(reversed(counts))

    @functools.cached_property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """[P, T] of the prefills."""
        narrowest, *others = _PREFILL_WIDTHS
        widths = [narrowest, *(width for width in others if width <= self.max_tokens)]
        return tuple((max(1, min(self.num_slots, self.prefill_tokens // width)), width) for width in widths)

    def length_for(self, block: Block) -> int:
        """The shortest cache length that holds what the block feeds."""
        end = int((block.positions_R + block.steps_R)[block.steps_R > 0].max(initial=0))
        return next(length for length in self.lengths if length >= end)


@functools.cache
def programs_for(config: ModelConfig) -> Programs:
    """The programs of a model; nothing is compiled yet."""
    graph = graph_of(config)

    def decode(
        params: Params, cache: KVCache, block: Block, stop_BV: jax.Array, patience: jax.Array, *, length: int
    ) -> tuple[Sampled, KVCache]:
        decoder = merge(graph, params)
        num_slots, (most_steps, num_rows) = stop_BV.shape[0], block.given_NR.shape
        whole = num_rows == num_slots  # then nothing is moved
        stop_RV = stop_BV if whole else jnp.take(stop_BV, block.rows_R, axis=0, mode="clip")
        order_R = jnp.arange(num_rows)
        # Every step feeds a token of each row that goes on. All at once, these take as long as those of one step.
        positions_NR = block.positions_R[None] + jnp.arange(most_steps, dtype=jnp.int32)[:, None]
        uniform_NR = jax.vmap(jax.vmap(uniform), (None, 0))(block.seeds_R2, positions_NR)

        def goes_on(state: tuple[Any, ...]) -> jax.Array:
            step, rested, left_R = state[:3]
            return (step < most_steps) & (rested <= patience) & jnp.any(left_R > 0)

        def one_step(state: tuple[Any, ...]) -> tuple[Any, ...]:
            step, rested, left_R, fed_R, tokens_R, cache, tokens_NR, logprobs_NR = state
            active_R, positions_R = left_R > 0, block.positions_R + fed_R
            logits_RV, cache = decode_step(decoder, tokens_R, positions_R, active_R, cache)
            sampled_R, logprobs_R = sample(logits_RV, block.temperature_R, uniform_NR[step])
            given_R = block.given_NR[step]
            next_R = jnp.where(given_R >= 0, given_R, sampled_R)
            ended_R = (given_R < 0) & stop_RV[order_R, next_R]
            left_R = jnp.where(ended_R, 0, jnp.maximum(left_R - 1, 0))
            rested += jnp.sum((block.steps_R > 0) & (left_R == 0), dtype=jnp.int32)
            tokens_NR, logprobs_NR = tokens_NR.at[step].set(next_R), logprobs_NR.at[step].set(logprobs_R)
            return step + 1, rested, left_R, fed_R + active_R, next_R, cache, tokens_NR, logprobs_NR

        none, nothing_R = jnp.zeros((), jnp.int32), jnp.zeros_like(block.steps_R)
        outputs_NR = jnp.zeros(block.given_NR.shape, jnp.int32), jnp.zeros(block.given_NR.shape, jnp.float32)
        rows_R = None if whole else block.rows_R
        state = none, none, block.steps_R, nothing_R, block.tokens_R, part_of(cache, rows_R, length), *outputs_NR
        num_steps, _, _, fed_R, _, part, tokens_NR, logprobs_NR = jax.lax.while_loop(goes_on, one_step, state)
        return Sampled(tokens_NR, logprobs_NR, fed_R, num_steps), with_part(cache, part, rows_R)

    def prefill(params: Params, cache: KVCache, chunk: Chunk) -> KVCache:
        return extend(merge(graph, params), *chunk, cache)[1]

    def score(params: Params, tokens_PT: jax.Array, temperature_PT: jax.Array) -> jax.Array:
        decoder = merge(graph, params)
        positions_PT = jnp.broadcast_to(jnp.arange(tokens_PT.shape[1], dtype=jnp.int32)[None], tokens_PT.shape)
        trunk = decoder.trunk(tokens_PT, positions_PT, jnp.ones_like(tokens_PT))
        targets_PT = jnp.roll(tokens_PT, -1, axis=1)
        scores = decoder.score(trunk.x_BTD, targets_PT, temperature_PT, jnp.ones(tokens_PT.shape, bool))
        return scores.logprobs[:, :-1]

    return Programs(
        jax.jit(decode, donate_argnums=1, static_argnames="length"),
        jax.jit(prefill, donate_argnums=1),
        jax.jit(copy_rows, donate_argnums=0),
        jax.jit(score),
    )


def on_device(array: np.ndarray) -> jax.Array:
    """A copy on the device, which later changes of the array do not reach."""
    return jnp.array(array, copy=True)


def warm_up(programs: Programs, shapes: Shapes, params: Params, cache: KVCache, vocab_size: int) -> KVCache:
    """Compiles every shape, by runs that do nothing; returns the cache."""
    stop_BV = on_device(np.zeros((shapes.num_slots, vocab_size), bool))
    for num_rows in shapes.row_counts:
        nothing_R, ones_R = np.zeros(num_rows, np.int32), np.ones(num_rows, np.float32)
        given_NR, seeds_R2 = np.zeros((shapes.num_steps, num_rows), np.int32), np.zeros((num_rows, 2), np.uint32)
        block = Block(np.arange(num_rows, dtype=np.int32), nothing_R, nothing_R, nothing_R, given_NR, seeds_R2, ones_R)
        for length in shapes.lengths:
            cache = programs.decode(params, cache, block, stop_BV, np.int32(0), length=length)[1]
    if shapes.batch_invariant:
        return cache
    for num_rows, width in shapes.chunks:
        rows_P, zeros_P = np.full(num_rows, shapes.num_slots, np.int32), np.zeros(num_rows, np.int32)
        cache = programs.prefill(params, cache, Chunk(np.zeros((num_rows, width), np.int32), rows_P, zeros_P, zeros_P))
    sources, targets = np.zeros(COPIED_ROWS, np.int32), np.full(COPIED_ROWS, shapes.num_slots, np.int32)
    return programs.copy(cache, sources, targets)
