"""The chunked head: the same scores and gradients as the plain formula, in less memory, for what is asked.

Dimensions: B rows, T positions, D hidden width, V vocabulary.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.models.head import score_targets

B, T, D, V = 3, 11, 6, 13


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(B, T, D)).astype(np.float32),
        rng.normal(size=(D, V)).astype(np.float32),
        rng.integers(0, V, (B, T)),
        rng.uniform(0.5, 2.0, (B, T)).astype(np.float32),
        rng.random((B, T)) < 0.4,
    )


def plain(x_BTD, head_DV, targets_BT, temperature_BT, asked_BT):
    logprobs_BTV = jax.nn.log_softmax(x_BTD @ head_DV / temperature_BT[..., None])
    logprobs_BT = jnp.take_along_axis(logprobs_BTV, targets_BT[..., None], axis=2)[..., 0]
    entropy_BT = -jnp.sum(jnp.exp(logprobs_BTV) * logprobs_BTV, axis=2)
    return tuple(jnp.where(asked_BT, of_BT, 0.0) for of_BT in (logprobs_BT, entropy_BT))


@pytest.mark.parametrize("chunk_tokens", [1, 4, 33, 1000])
def test_scores_and_gradients_are_those_of_the_plain_formula(inputs, chunk_tokens):
    weights = np.random.default_rng(1).normal(size=(2, B, T))

    def loss(score, x_BTD, head_DV):
        logprobs_BT, entropy_BT = score(x_BTD, head_DV, *inputs[2:])[:2]
        return jnp.sum(logprobs_BT * weights[0] + entropy_BT * weights[1]), (logprobs_BT, entropy_BT)

    def chunked(*args):
        return score_targets(*args, chunk_tokens=chunk_tokens)

    found, expected = (
        jax.jit(jax.value_and_grad(lambda *args, score=score: loss(score, *args), (0, 1), has_aux=True))(*inputs[:2])
        for score in (chunked, plain)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)


def test_it_says_where_the_target_is_the_likeliest_token(inputs):
    x_BTD, head_DV, targets_BT, temperature_BT, asked_BT = inputs
    best_BT = np.argmax(x_BTD @ head_DV, axis=2)
    targets_BT = np.where(np.arange(T) % 2, best_BT, targets_BT)
    scores = score_targets(x_BTD, head_DV, targets_BT, temperature_BT, asked_BT, chunk_tokens=4)
    np.testing.assert_array_equal(scores.is_likeliest, (targets_BT == best_BT) & asked_BT)


def test_nothing_asked_is_nothing_computed(inputs):
    """Not a number in what nobody asks for does not show, and the loop takes no turn."""
    x_BTD, head_DV, *rest = inputs
    poisoned = np.where(rest[2][..., None], x_BTD, np.nan)
    scores = score_targets(poisoned, head_DV, *rest, chunk_tokens=1)
    assert all(np.isfinite(leaf).all() for leaf in scores)
    nothing = score_targets(np.full_like(x_BTD, np.nan), head_DV, *rest[:2], np.zeros((B, T), bool), chunk_tokens=4)
    assert not any(np.any(leaf) for leaf in nothing)


def test_memory_is_that_of_a_chunk_and_not_of_the_batch():
    """By the compiler's own analysis of loss and gradient: 4096 positions of a vocabulary of 8192 are 128 MiB."""
    rows, length, width, vocabulary, chunk_tokens = 16, 256, 8, 8192, 128
    logits_bytes = 4 * rows * length * vocabulary
    floats, ints = jax.ShapeDtypeStruct((rows, length), jnp.float32), jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def temporary_bytes(score):
        def loss(x_BTD, head_DV, targets_BT, temperature_BT, asked_BT):
            return jnp.sum(score(x_BTD, head_DV, targets_BT, temperature_BT, asked_BT)[0])

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(
            jax.ShapeDtypeStruct((rows, length, width), jnp.float32),
            jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
            ints,
            floats,
            jax.ShapeDtypeStruct((rows, length), jnp.bool_),
        )
        return compiled.compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(plain) >= logits_bytes
    assert temporary_bytes(lambda *args: score_targets(*args, chunk_tokens=chunk_tokens)) < logits_bytes / 8


def test_a_mesh_gives_the_same_scores_and_gradients():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    program = Path(__file__).with_name("head_on_mesh.py")
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal on") == 6
