"""A tiny model with peaky random weights, and versions of it as the learner would publish them."""

import asyncio
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np

from asyncrl_jax.actor.engines.jax_engine import JaxEngine
from asyncrl_jax.config import ModelConfig
from asyncrl_jax.models import graph_of, init_params, merge, to_tensors
from asyncrl_jax.weights.manifest import Canary, Leaf, Manifest
from asyncrl_jax.weights.publish import publish

MODEL = ModelConfig(
    num_layers=2,
    hidden_dim=32,  # multiples of 32 here and below: vLLM's kernels for the CPU know no others
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    num_experts=4,
    experts_per_token=2,
    expert_dim=32,
    max_positions=64,
    init_std=0.3,
)
MAX_TOKENS = 48  # more than a block of vLLM's cache


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens_1T, segment_ids_1T):
    positions_1T = jnp.arange(MAX_TOKENS, dtype=jnp.int32)[None]
    return merge(graph_of(model), params)(tokens_1T, positions_1T, segment_ids_1T)[0]


def full_logits(params, tokens, model=MODEL):
    """Logits [T, V] of one sequence, without a cache and without the engine."""
    padding = (0, MAX_TOKENS - len(tokens))
    tokens_1T = np.pad(np.asarray(tokens, np.int32), padding)[None]
    segment_ids_1T = np.pad(np.ones(len(tokens), np.int32), padding)[None]
    return np.asarray(_logits(model, params, tokens_1T, segment_ids_1T))[: len(tokens)]


def full_logprobs(params, tokens, temperature=1.0, model=MODEL):
    """Log-prob [T - 1] of tokens[1:], each given those before it."""
    scaled = full_logits(params, tokens, model)[:-1].astype(np.float64) / temperature
    logprobs = scaled - np.log(np.exp(scaled - scaled.max(1, keepdims=True)).sum(1, keepdims=True))
    logprobs -= scaled.max(1, keepdims=True)
    return np.take_along_axis(logprobs, np.asarray(tokens)[1:, None], axis=1)[:, 0]


@functools.cache
def make_version(number):
    """(params, manifest, tensors by Hugging Face name) of version `number`."""
    params = init_params(MODEL, number)
    return params, *version_of(MODEL, params, number)


def version_of(model, params, number):
    """(manifest, tensors by Hugging Face name) of weights, as the learner would publish them."""
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (4, 12)).astype(np.int32)
    logprobs = np.stack([full_logprobs(params, row, model=model) for row in tokens]).astype(np.float32)
    tensors = {name: np.asarray(value) for name, value in to_tensors(model, params).items()}
    leaves = tuple(Leaf.of(name, tensors[name]) for name in sorted(tensors))
    manifest = Manifest(
        number=number,
        parent=None,
        line=0,
        update=number,
        leaves=leaves,
        canary=Canary(tokens, logprobs),
        created_at=0.0,
    )
    return manifest, tensors


def publish_versions(directory, numbers=range(3)):
    """Versions on disk, as they would be announced."""
    versions = []
    for number in numbers:
        _, manifest, tensors = make_version(number)
        version = publish(directory, tensors, number=number, parent=None, line=0, update=number, canary=manifest.canary)
        versions.append(version)
    return versions


def make_engine(num_slots=4, **kwargs):
    return JaxEngine(MODEL, num_slots=num_slots, max_tokens=MAX_TOKENS, canary_tolerance=1e-3, **kwargs)


@contextlib.asynccontextmanager
async def running(*engines):
    tasks = [asyncio.create_task(engine.run()) for engine in engines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
