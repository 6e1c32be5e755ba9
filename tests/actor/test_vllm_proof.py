"""The arithmetic of proofs; the proofs themselves run against a real vLLM."""

import numpy as np
import pytest

from asyncrl_jax.actor.engines.vllm_backend import TOP
from asyncrl_jax.actor.engines.vllm_proof import _TEMPERATURE, _misreported


def log_softmax(logits_V):
    return logits_V - np.logaddexp.reduce(logits_V)


def top_and(logprobs_V, token, count):
    """What vLLM reports of a position: the most likely tokens, and the given one."""
    tokens = {*np.argsort(logprobs_V)[-count:].tolist(), token}
    return {token: float(logprobs_V[token]) for token in tokens}


@pytest.mark.parametrize("vocab_size", [20, 500])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_what_temperature_makes_of_a_distribution_is_known_from_its_top(vocab_size, spread):
    for seed in range(50):
        logits_V = np.random.default_rng(seed).normal(size=vocab_size) * spread
        token = seed % vocab_size  # often far below the top
        confirmed = top_and(log_softmax(logits_V), token, TOP)
        right = top_and(log_softmax(logits_V / _TEMPERATURE), token, 1)
        assert _misreported(right, confirmed, _TEMPERATURE) < 1e-9
        if spread > 1:
            ignored = top_and(log_softmax(logits_V), token, 1)
            assert _misreported(ignored, confirmed, _TEMPERATURE) > 0.05
