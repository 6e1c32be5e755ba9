import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_setup import tiny_config

from asyncrl_jax.learner.logprobs import token_logprobs
from asyncrl_jax.models import graph_of, init_params, merge


def test_mis_05_a_head_in_bf16_differs_by_a_known_gap_and_keeps_no_copy_of_its_weights():
    """MIS-05. The same hidden states; weights that change, change the logits; and the masters stay float32."""
    config = dataclasses.replace(tiny_config().model, tie_embeddings=True)
    params, graph = init_params(config, 0), graph_of(config)
    x_BTD = jax.random.normal(jax.random.key(0), (2, 6, config.hidden_dim))
    targets = jax.random.randint(jax.random.key(1), (2, 6), 0, config.vocab_size)

    def logprobs(params, dtype):
        logits_BTV = merge(graph, params).head(x_BTD.astype(dtype))
        assert logits_BTV.dtype == jnp.float32
        return token_logprobs(logits_BTV, targets, jnp.ones((2, 6)))[0]

    gap = jnp.max(jnp.abs(logprobs(params, jnp.bfloat16) - logprobs(params, jnp.float32)))
    assert 1e-5 < gap < 0.05
    changed = params | {"embedding": 1.5 * params["embedding"]}
    for dtype in (jnp.float32, jnp.bfloat16):
        assert jnp.max(jnp.abs(logprobs(changed, dtype) - logprobs(params, dtype))) > 0.05
    assert params["embedding"].dtype == jnp.float32


def row(*values):
    return jnp.array([values], jnp.float32)


@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.0, 1.3])
def test_mis_01_the_logprobs_are_those_of_the_distribution_sampled_from(temperature):
    """MIS-01. Logits (2, 0): −0.126928 at temperature 1, −0.01814993 at 0.5; the ratio to the sampler is 1."""
    logits = jnp.array([[[2.0, 0.0]]])
    sampled = np.log(1 / (1 + np.exp(-2.0 / temperature)))
    logprobs, entropy = token_logprobs(logits, jnp.zeros((1, 1), jnp.int32), row(temperature))
    np.testing.assert_allclose(logprobs, [[sampled]], rtol=1e-5)
    np.testing.assert_allclose(np.exp(logprobs - sampled), 1.0, atol=1e-6)
    p = np.exp(sampled)
    np.testing.assert_allclose(entropy, [[-p * np.log(p) - (1 - p) * np.log(1 - p)]], rtol=1e-4)
