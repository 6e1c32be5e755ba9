"""Models of several families in a live vLLM: the learner's log-probs, also after weights came in anew."""

import asyncio
import dataclasses

import numpy as np
import pytest
from engine_contract import EngineHost, converse
from engine_setup import MODEL, full_logprobs, version_of
from vllm_setup import make_engine

from asyncrl_jax.actor.engines import vllm_process
from asyncrl_jax.config import ModelConfig
from asyncrl_jax.config_model import AttentionConfig, RouterConfig
from asyncrl_jax.models import init_params
from asyncrl_jax.weights.manifest import WeightsMismatch
from asyncrl_jax.weights.publish import publish

# A start alone may take a minute on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LIMIT = 1e-4  # nats, in fp32
NONE = AttentionConfig(qk_norm="none")

FAMILIES = {
    "qwen3_moe": dataclasses.replace(MODEL, num_layers=3, mlp_pattern="mdm", mlp_dim=64),
    "mixtral": dataclasses.replace(
        MODEL,
        family="mixtral",
        num_experts=5,
        experts_per_token=3,
        attention=dataclasses.replace(NONE, pattern="s", window=8),
    ),
    "mimo_v2_flash": dataclasses.replace(
        MODEL,
        family="mimo_v2_flash",
        num_layers=3,
        mlp_pattern="dmm",
        mlp_dim=64,
        num_heads=4,
        attention=AttentionConfig(
            pattern="gsg",
            window=8,
            sliding_kv_heads=2,
            sliding_rope_theta=50.0,
            sinks=True,
            value_scale=0.707,
            rotary_share=0.5,
            qk_norm="none",
        ),
        router=RouterConfig(score="sigmoid", selection_bias=True),
    ),
    "llama, tied head": ModelConfig(
        family="llama",
        num_layers=2,
        hidden_dim=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        mlp_pattern="d",
        mlp_dim=96,
        tie_embeddings=True,
        init_std=0.2,
        attention=NONE,
    ),
}


MUTANTS = {"mimo_v2_flash": "stale sinks", "llama, tied head": "stale tied head"}


def params_of_version(model, number):
    """Random weights in which norms, biases and sinks matter too."""
    rng = np.random.default_rng(number)
    params = init_params(model, number)
    return {name: value + 0.1 * rng.normal(size=value.shape).astype(np.float32) for name, value in params.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_learner_agree_after_every_load(family, tmp_path, monkeypatch):
    model = FAMILIES[family]
    params = [params_of_version(model, number) for number in range(2)]

    def publish_both(directory):
        versions = []
        for number in range(2):
            manifest, tensors = version_of(model, params[number], number)
            versions.append(
                publish(directory, tensors, number=number, parent=None, line=0, update=number, canary=manifest.canary)
            )
        return versions

    monkeypatch.setattr(vllm_process, "WORKER_EXTENSION", "mutants.MutantWorker")
    host = EngineHost(make_engine(model), tmp_path, publish_both)
    try:
        for number in (0, 1, 0):

            async def run(number=number):
                await host.load(number)
                return await asyncio.gather(*(converse(host.engine, seed) for seed in range(4)))

            for tokens, logprobs, versions in host.run(run()):
                sampled = versions[1:] == number
                assert sampled.sum() == 18
                expected = full_logprobs(params[number], tokens, model=model)
                np.testing.assert_allclose(logprobs[1:][sampled], expected[sampled], atol=LIMIT)
        if family in MUTANTS:
            host.run(host.engine._backend.call("mutate", name=MUTANTS[family]))
            with pytest.raises(WeightsMismatch) as caught:
                host.run(host.load(1))
            assert caught.value.reason == "canary"
            assert host.engine.version == 0
    finally:
        host.close()
