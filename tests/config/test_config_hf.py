"""config.json as model settings and back: the words of the hub and of transformers 4 and 5, and what is refused."""

import pytest

from asyncrl_jax.config_hf import hf_config, model_config
from asyncrl_jax.config_model import AttentionConfig, ModelConfig, RouterConfig, differences

LLAMA = {
    "model_type": "llama", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 37,
    "max_position_embeddings": 64, "intermediate_size": 14, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
MIMO = {  # in the words of the hub
    "model_type": "mimo_v2_flash", "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 18,
    "num_key_value_heads": 1, "swa_num_key_value_heads": 2, "v_head_dim": 7, "vocab_size": 37, "n_routed_experts": 5,
    "max_position_embeddings": 64, "intermediate_size": 22, "moe_intermediate_size": 14, "num_experts_per_tok": 2,
    "hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1], "sliding_window_size": 4, "sliding_window": 4,
    "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5,
    "attention_value_scale": 0.707, "add_swa_attention_sink_bias": True, "n_shared_experts": None,
    "routed_scaling_factor": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
}  # fmt: skip


def test_the_words_of_transformers_4_are_read():
    scaling = {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
    config = model_config(LLAMA | {"rope_scaling": scaling})
    assert (config.rope_theta, config.head_dim, config.num_kv_heads) == (500000.0, 8, 3)
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("llama3", 8.0)
    assert config.rope_scaling.original_positions == 32


def test_the_words_of_the_hub_are_read_for_mimo():
    config = model_config(MIMO)
    attention = config.attention
    assert (attention.pattern, config.mlp_pattern, attention.window) == ("gsg", "dmm", 5)
    assert (attention.sliding_kv_heads, attention.v_head_dim, attention.value_scale) == (2, 7, 0.707)
    assert (config.rope_theta, attention.sliding_rope_theta, attention.rotary_share) == (5e6, 1e4, 0.334)
    assert config.router == RouterConfig(score="sigmoid", selection_bias=True)
    assert not differences(config, model_config(hf_config(config)))


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA, {"model_type": "gpt2"}, "model_type 'gpt2'"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "beta": 1}}, "rope_parameters has 'beta'"),
        (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        (LLAMA, {"hidden_size": None}, "no 'hidden_size'"),
        (LLAMA, {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        (MIMO, {"n_group": 2}, "n_group = 2"),
        (MIMO, {"swa_head_dim": 20}, "swa_head_dim = 20"),
        (MIMO, {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias = True"),
        (MIMO, {"n_shared_experts": 1}, "n_shared_experts = 1"),
        (MIMO, {"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(base, change, message):
    with pytest.raises(ValueError, match=message):
        model_config(base | change)


def test_switched_off_and_private_keys_are_no_reason_to_refuse():
    assert model_config(LLAMA | {"use_mrope": False, "_name_or_path": "x", "new_thing": None}) == model_config(LLAMA)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(family="mixtral"), "attention"),
        (ModelConfig(family="qwen3_moe", router=RouterConfig(score="sigmoid")), "router"),
        (
            ModelConfig(family="qwen3", mlp_pattern="d", mlp_dim=8, attention=AttentionConfig(value_scale=2.0)),
            "attention",
        ),
        (ModelConfig(family="olmoe", head_dim=8, attention=AttentionConfig(qk_norm="full")), "head_dim: 8 and 16"),
    ],
)
def test_what_a_family_cannot_express_is_not_written(config, message):
    with pytest.raises(ValueError, match=f"can't express.*{message}"):
        hf_config(config)
