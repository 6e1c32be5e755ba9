import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.learner.logprobs import token_logprobs


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
