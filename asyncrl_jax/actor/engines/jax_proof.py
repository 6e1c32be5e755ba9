"""Proves weights with the programs that serve, before anything is sampled with them.

The canary's log-probs must be those that the manifest carries. Then rows of the canary are sampled on from as sessions
would be, at a temperature that is not 1, and the log-probs that this reports must be those that a pass over the whole
sequence gives, which shares no cache, no chunks and no sampling with it. The programs for blocks of decode steps differ
in rows and length alone; those that just hold the canary are the ones that are proven.

Dimensions: R rows of the canary, T its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncrl_jax.actor.engines.jax_programs import Programs, Shapes, on_device
from asyncrl_jax.actor.engines.jax_slots import Slots
from asyncrl_jax.config import ModelConfig
from asyncrl_jax.models import KVCache, Params, from_tensors, init_cache
from asyncrl_jax.weights.manifest import Manifest, WeightsMismatch, check_canary

_TEMPERATURE = 0.7  # not 1, so that a temperature applied twice or never shows
_NUM_TOKENS = 8  # sampled in a proof


def prove(
    config: ModelConfig,
    programs: Programs,
    shapes: Shapes,
    manifest: Manifest,
    tensors: Mapping[str, np.ndarray],
    tolerance: float,
) -> tuple[Params, KVCache]:
    """The weights on the device, proven, and a cache of the engine's shape whose contents mean nothing.

    Args:
      config: of the model.
      programs: of the engine.
      shapes: of the engine.
      manifest: of the version.
      tensors: its arrays by Hugging Face name.
      tolerance: largest log-prob difference, in nats.

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

    def score(tokens_RT: np.ndarray, temperature: float) -> np.ndarray:
        padded = np.zeros((len(canary_RT), padded_length), np.int32)  # one shape for canary and continuation
        padded[: len(tokens_RT), : tokens_RT.shape[1]] = tokens_RT
        logprobs = np.asarray(programs.score(params, padded, np.float32(temperature)))
        return logprobs[: len(tokens_RT), : tokens_RT.shape[1] - 1]

    check_canary(manifest, score(canary_RT, 1.0), tolerance)
    start = max(1, min(length, shapes.max_tokens - _NUM_TOKENS))
    prompts_RT = canary_RT[: shapes.num_slots, :start]
    tokens_RT, reported, cache = _sample(config, programs, shapes, params, prompts_RT, padded_length - start)
    worst = float(np.abs(score(tokens_RT, _TEMPERATURE)[:, start - 1 :] - reported).max())
    if not worst <= tolerance:  # written so that NaN fails
        detail = f"{where}: sampling reports log-probs that differ by {worst:.3g} nats from those of a whole pass"
        raise WeightsMismatch("continuation", detail)
    return params, cache


def _sample(
    config: ModelConfig, programs: Programs, shapes: Shapes, params: Params, prompts_RT: np.ndarray, num_new: int
) -> tuple[np.ndarray, np.ndarray, KVCache]:
    """(prompts and `num_new` sampled tokens, log-probs of the latter, cache)."""
    num_rows, start = prompts_RT.shape
    slots = Slots(shapes, config.vocab_size)
    for row, prompt in enumerate(prompts_RT):
        slots.open(row, row, _TEMPERATURE)
        slots.begin(row, prompt, frozenset(), num_new)
    cache = init_cache(config, shapes.num_slots, shapes.max_tokens)
    stop_BV = on_device(slots.stop_BV)
    while slots.generating_B.any():
        if slots.num_to_prefill():
            plan = slots.plan_chunk()
            cache = programs.prefill(params, cache, plan.work)
            slots.chunk_done(plan)
        else:
            block = slots.plan_block()
            length = shapes.length_for(block.work)
            sampled, cache = programs.decode(params, cache, block.work, stop_BV, np.int32(0), length=length)
            tokens_NR, logprobs_NR, fed_R, _ = map(np.asarray, sampled)
            slots.block_done(block, tokens_NR, logprobs_NR, fed_R, version=0)
    end = start + num_new
    return slots.tokens_BS[:num_rows, :end], slots.logprobs_BS[:num_rows, start:end], cache
