"""Rows of tokens with their log-probs, which the manifest of a version carries.

Where a router's choice between two experts is a tie but for the last bits, another program with the same weights may
choose the other one, and log-probs jump by tenths of a nat. Of a version's canary that must not be: an engine would
refuse good weights for ever. So a version takes, of twice as many rows as it needs, those that stay where they are when
the embeddings are nudged.

Dimensions: C rows, T positions, D of the embedding.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from asyncrl_jax.config import Config, ModelConfig
from asyncrl_jax.learner.compiled import CompiledStep
from asyncrl_jax.learner.forward import Forward
from asyncrl_jax.learner.logprobs import token_logprobs
from asyncrl_jax.learner.supervised import SupervisedBatch
from asyncrl_jax.models.mesh import replicated
from asyncrl_jax.models.transformer import Params, graph_of
from asyncrl_jax.weights.manifest import Canary

_ROWS, _CANDIDATES, _LENGTH = 4, 8, 24
_NUDGE = {"float32": 1e-5, "bfloat16": 1e-2}  # relative: more than programs differ by, and little besides


@functools.cache
def _scorer(config: ModelConfig, mesh: Mesh | None) -> CompiledStep:
    """Compiled once per model, not once per published version."""
    forward = Forward(graph_of(config))

    def score(params: Params, tokens_CT: jax.Array, scale_D: jax.Array) -> jax.Array:
        params = params | {"embedding": params["embedding"] * scale_D[None]}
        positions_CT = jnp.broadcast_to(jnp.arange(tokens_CT.shape[1])[None], tokens_CT.shape)
        ones = jnp.ones_like(tokens_CT)
        batch = SupervisedBatch(tokens_CT, tokens_CT, ones, positions_CT, ones.astype(bool), ones)
        logits_CTV, _ = forward.logits(params, batch)
        targets = tokens_CT[:, 1:]
        return token_logprobs(logits_CTV[:, :-1], targets, jnp.ones(targets.shape))[0]

    return CompiledStep(score, **({} if mesh is None else {"out_shardings": replicated(mesh)}))


def candidate_rows(seed: int, vocab_size: int, max_tokens: int) -> np.ndarray:
    """Rows that versions take their canary from: int32 [C, T], T at most `max_tokens`."""
    shape = (_CANDIDATES, min(_LENGTH, max_tokens))
    return np.random.default_rng(seed).integers(0, vocab_size, shape, dtype=np.int32)


def make_canary(config: Config, params: Params, candidates_CT: np.ndarray) -> Canary:
    """The canary of these weights: the rows that are least in doubt, in their order. The same for the same weights."""
    logprobs = canary_logprobs(config, params, candidates_CT)
    nudge_D = np.random.default_rng(0).standard_normal(config.model.hidden_dim)  # any direction: a tie has two sides
    doubt_C = np.zeros(len(candidates_CT))
    for sign in (1.0, -1.0):
        scale_D = 1.0 + sign * _NUDGE[config.model.compute_dtype] * nudge_D
        nudged = canary_logprobs(config, params, candidates_CT, scale_D)
        doubt_C = np.maximum(doubt_C, np.abs(nudged - logprobs).max(axis=1))
    chosen = np.sort(np.argsort(doubt_C, kind="stable")[:_ROWS])
    return Canary(candidates_CT[chosen], logprobs[chosen])


def canary_logprobs(
    config: Config, params: Params, tokens_CT: np.ndarray, scale_D: np.ndarray | None = None
) -> np.ndarray:
    """Log-probs of tokens 1 … T−1 of C sequences, teacher-forced at temperature 1: float32 [C, T−1].

    An engine that holds these weights gives the same numbers; the manifest of a version carries them.

    Args:
      scale_D: factors on the columns of the embedding; 1 without.
    """
    sharding = next(iter(params.values())).sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None  # every process then gets all of the result
    scale = np.ones(config.model.hidden_dim) if scale_D is None else scale_D
    scorer = _scorer(config.model, mesh)
    return np.asarray(scorer(params, np.asarray(tokens_CT, np.int32), np.asarray(scale, np.float32)))
