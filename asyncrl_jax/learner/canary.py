"""Log-probs of fixed tokens, which the manifest of a version carries. Dimensions: C canary rows, T positions."""

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


@functools.cache
def _scorer(config: ModelConfig, mesh: Mesh | None) -> CompiledStep:
    """Compiled once per model, not once per published version."""
    forward = Forward(graph_of(config))

    def score(params: Params, tokens_CT: jax.Array) -> jax.Array:
        positions_CT = jnp.broadcast_to(jnp.arange(tokens_CT.shape[1])[None], tokens_CT.shape)
        ones = jnp.ones_like(tokens_CT)
        batch = SupervisedBatch(tokens_CT, tokens_CT, ones, positions_CT, ones.astype(bool), ones)
        logits_CTV, _ = forward.logits(params, batch)
        targets = tokens_CT[:, 1:]
        return token_logprobs(logits_CTV[:, :-1], targets, jnp.ones(targets.shape))[0]

    return CompiledStep(score, **({} if mesh is None else {"out_shardings": replicated(mesh)}))


def canary_logprobs(config: Config, params: Params, tokens_CT: np.ndarray) -> np.ndarray:
    """Log-probs of tokens 1 … T−1 of C sequences, teacher-forced at temperature 1: float32 [C, T−1].

    An engine that holds these weights gives the same numbers; the manifest of a version carries them.
    """
    sharding = next(iter(params.values())).sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None  # every process then gets all of the result
    return np.asarray(_scorer(config.model, mesh)(params, np.asarray(tokens_CT, np.int32)))
