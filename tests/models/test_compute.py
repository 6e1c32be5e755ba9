"""bfloat16 compute on float32 weights, and recomputation: what they change and what they do not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.config_model import AttentionConfig, ModelConfig
from asyncrl_jax.models import graph_of, init_params, merge
from asyncrl_jax.models.attention import attend_einsum, attend_library, packed_mask

CONFIG = ModelConfig(
    num_layers=3, hidden_dim=12, num_heads=4, num_kv_heads=2, head_dim=6, num_experts=3, expert_dim=10, vocab_size=19,
    mlp_pattern="dm", mlp_dim=14, init_std=0.2,
    attention=AttentionConfig(pattern="gs", window=3, sinks=True, v_head_dim=4),
)  # fmt: skip
TOKENS_BT = np.random.default_rng(0).integers(0, 19, (2, 24))


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, 0)


def loss_of(config):
    def loss(params):
        logits_BTV = merge(graph_of(config), params)(TOKENS_BT)
        return jnp.mean(jax.nn.logsumexp(logits_BTV, axis=-1) - logits_BTV[..., 0]), logits_BTV

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.fixture(scope="module")
def expected(params):
    return loss_of(CONFIG)(params)


@pytest.mark.parametrize("remat", ["dots", "layers"])
def test_recomputation_changes_nothing_but_memory(params, expected, remat):
    (loss, _), gradients = loss_of(dataclasses.replace(CONFIG, remat=remat))(params)
    np.testing.assert_allclose(loss, expected[0][0], rtol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[1][name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_recomputation_keeps_less_for_the_backward_pass():
    """Bytes that the forward pass leaves for the backward pass, without the weights. Compilers may keep less still."""
    shapes = jax.eval_shape(lambda: init_params(CONFIG, 0))

    def kept_bytes(remat):
        graph = graph_of(dataclasses.replace(CONFIG, remat=remat))
        _, pull = jax.eval_shape(lambda params: jax.vjp(lambda p: merge(graph, p)(TOKENS_BT), params), shapes)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))

    kept = {remat: kept_bytes(remat) for remat in ("none", "dots", "layers")}
    assert kept["layers"] < kept["dots"] < kept["none"]
    assert kept["layers"] < 0.3 * kept["none"], kept


def test_bfloat16_computes_near_float32_on_float32_weights_and_gradients(params, expected):
    (loss, logits_BTV), gradients = loss_of(dataclasses.replace(CONFIG, compute_dtype="bfloat16"))(params)
    assert logits_BTV.dtype == jnp.float32
    assert all(gradient.dtype == jnp.float32 for gradient in gradients.values())
    gap = np.linalg.norm(logits_BTV - expected[0][1]) / np.linalg.norm(expected[0][1])
    assert 1e-4 < gap < 0.05  # other than float32, and no more than bfloat16 explains
    np.testing.assert_allclose(loss, expected[0][0], rtol=0.02)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("value_dim", [4, 9])
def test_the_library_attends_as_the_reference_does(sinks, value_dim):
    """What accelerators use, here by its XLA version; keys and values of different widths, and sinks."""
    rng = np.random.default_rng(1)
    q_BTHK, k_BTGK, v_BTGU = (
        rng.normal(size=(2, 11, heads, width)).astype(np.float32) for heads, width in [(6, 7), (3, 7), (3, value_dim)]
    )
    mask_BTT = packed_mask(np.repeat([[1, 2]], [6, 5], axis=1) * np.ones((2, 1), np.int32), window=4)
    sinks_H = rng.normal(size=6).astype(np.float32) if sinks else None
    weights = rng.normal(size=(2, 11, 6, value_dim))

    def run(attend):
        return jax.value_and_grad(
            lambda *arrays: jnp.sum(weights * attend(*arrays[:3], mask_BTT, arrays[3] if sinks else None)),
            argnums=tuple(range(4 if sinks else 3)),
        )(q_BTHK, k_BTGK, v_BTGU, sinks_H)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), run(attend_library), run(attend_einsum)
    )
