"""Proves weights with the programs that serve, before anything is sampled with them.

Rows of the canary are sampled on from as sessions would be, at a temperature that is not 1. One pass over canary and
continuation, which shares no cache, no chunks and no sampling with that, then says whether the canary's log-probs are
those that the manifest carries, and whether the log-probs that the sampling reported are its own. The programs for
blocks of decode steps differ in rows and length alone; those that just hold the canary are the ones that are proven.

Little is waited for: on a CPU each wait is one for the block that is being sampled meanwhile.

Dimensions: R rows of the canary, T its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncrl_jax.actor.engines.jax_programs import Programs, Shapes, on_device
from asyncrl_jax.actor.engines.jax_slots import Slots
from asyncrl_jax.config import ModelConfig
from asyncrl_jax.models import KVCache, Params, from_tensors, init_cache
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.weights.manifest import Manifest, WeightsMismatch, check_canary

_TEMPERATURE = 0.7  # not 1, so that a temperature applied twice or never shows
_NUM_TOKENS = 4  # sampled of each row in a proof


def prove(
    config: ModelConfig,
    programs: Programs,
    shapes: Shapes,
    manifest: Manifest,
    tensors: Mapping[str, np.ndarray],
    tolerance: float,
    attempt: int,
) -> tuple[Params, KVCache]:
    """The weights on the device, proven, and a cache of the engine's shape whose contents mean nothing.

    Args:
      config: of the model.
      programs: of the engine.
      shapes: of the engine.
      manifest: of the version.
      tensors: its arrays by Hugging Face name.
      tolerance: largest log-prob difference, in nats.
      attempt: another one samples other tokens. Where a router's choice is a tie but for the last bits, blocks and a
        whole pass may choose differently, which says nothing against the weights.

    Raises:
      WeightsMismatch: with reason "leaves", "canary" or "continuation".
    """
    where = f"v{manifest.number}"
    try:
        params = from_tensors(config, tensors)
    except ValueError as error:
        raise WeightsMismatch("leaves", f"{where}: {error}") from error
    canary_RT = manifest.canary.tokens
    length = canary_RT.shape[1]
    if length > shapes.max_tokens or canary_RT.max() >= config.vocab_size:
        raise WeightsMismatch("canary", f"{where}: its canary {canary_RT.shape} does not fit the engine")
    padded_length = min(length + _NUM_TOKENS, shapes.max_tokens)

    start = max(1, min(length, shapes.max_tokens - _NUM_TOKENS))
    prompts_RT = canary_RT[: shapes.num_slots, :start]
    tokens_RT, reported, cache = _sample(config, programs, shapes, params, prompts_RT, padded_length - start, attempt)

    def score(first: int, *rows: np.ndarray) -> np.ndarray:
        """Log-probs of these rows, the later ones over the earlier; from token `first` on at the other temperature."""
        padded_RT = np.zeros((len(canary_RT), padded_length), np.int32)  # one shape, compiled once
        for tokens in rows:
            padded_RT[: len(tokens), : tokens.shape[1]] = tokens
        temperatures_RT = np.ones(padded_RT.shape, np.float32)
        temperatures_RT[:, first - 1 :] = _TEMPERATURE
        return np.asarray(programs.score(params, padded_RT, temperatures_RT))

    # Where the engine's sequences hardly hold the canary, the continuation goes on from less than all of it.
    shared = start == length
    scores = score(length, canary_RT, tokens_RT) if shared else score(length, canary_RT)
    check_canary(manifest, scores[:, : length - 1], tolerance)
    scores = scores if shared else score(start, tokens_RT)
    worst = float(np.abs(scores[: len(tokens_RT), start - 1 : padded_length - 1] - reported).max())
    if not worst <= tolerance:  # written so that NaN fails
        detail = f"{where}: sampling reports log-probs that differ by {worst:.3g} nats from those of a whole pass"
        raise WeightsMismatch("continuation", detail)
    return params, cache


def _sample(
    config: ModelConfig,
    programs: Programs,
    shapes: Shapes,
    params: Params,
    prompts_RT: np.ndarray,
    num_new: int,
    attempt: int,
) -> tuple[np.ndarray, np.ndarray, KVCache]:
    """(prompts and `num_new` sampled tokens, log-probs of the latter, cache)."""
    num_rows, start = prompts_RT.shape
    slots = Slots(shapes, config.vocab_size)
    for row, prompt in enumerate(prompts_RT):
        slots.open(row, derive_seed(attempt, row), _TEMPERATURE)
        slots.begin(row, prompt, frozenset(), num_new)
    cache = init_cache(config, shapes.num_slots, shapes.max_tokens)
    stop_BV, first = on_device(slots.stop_BV), True
    while slots.generating_B.any():
        if slots.num_to_prefill():
            plan = slots.plan_chunk()
            cache = programs.prefill(params, cache, plan.work)
            slots.chunk_done(plan)
        else:
            block = slots.plan_block()
            # The first one ends half way, so that another reads what it has put back into the cache.
            most = max(1, int(block.work.steps_R.max()) // 2) if first else shapes.num_steps
            first, work = False, block.work._replace(steps_R=np.minimum(block.work.steps_R, most))
            length = shapes.length_for(work)
            sampled, cache = programs.decode(params, cache, work, stop_BV, np.int32(0), length=length)
            tokens_NR, logprobs_NR, fed_R, _ = map(np.asarray, sampled)
            slots.block_done(block, tokens_NR, logprobs_NR, fed_R, version=0)
    end = start + num_new
    return slots.tokens_BS[:num_rows, :end], slots.logprobs_BS[:num_rows, start:end], cache
