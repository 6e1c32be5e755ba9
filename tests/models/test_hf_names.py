import numpy as np
import pytest

from asyncrl_jax.config import ModelConfig
from asyncrl_jax.models import from_tensors, init_params, to_tensors

CONFIG = ModelConfig(num_layers=2, hidden_dim=8, num_heads=4, num_kv_heads=2, head_dim=6, num_experts=3, expert_dim=5)


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, 0)


@pytest.fixture
def tensors(params):
    return {name: np.asarray(value) for name, value in to_tensors(CONFIG, params).items()}


def test_names_and_shapes_are_those_of_a_stacked_qwen3_moe_checkpoint(tensors):
    layer = {
        "input_layernorm.weight": (8,),
        "mlp.experts.down_proj": (3, 8, 5),
        "mlp.experts.gate_up_proj": (3, 10, 8),
        "mlp.gate.weight": (3, 8),
        "post_attention_layernorm.weight": (8,),
        "self_attn.k_norm.weight": (6,),
        "self_attn.k_proj.weight": (12, 8),
        "self_attn.o_proj.weight": (8, 24),
        "self_attn.q_norm.weight": (6,),
        "self_attn.q_proj.weight": (24, 8),
        "self_attn.v_proj.weight": (12, 8),
    }
    expected = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    expected |= {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,), "lm_head.weight": (32, 8)}
    assert {name: value.shape for name, value in tensors.items()} == expected


def test_elements_are_where_hugging_face_has_them(params, tensors):
    """Linear weights are [out, in]; heads are flattened head first; gate stands before up."""
    p = {name: np.asarray(value) for name, value in params.items()}
    assert tensors["model.layers.1.self_attn.q_proj.weight"][2 * 6 + 4, 7] == p["layers.1.attention.q_proj"][7, 2, 4]
    assert tensors["model.layers.1.self_attn.o_proj.weight"][7, 2 * 6 + 4] == p["layers.1.attention.o_proj"][2, 4, 7]
    assert tensors["model.layers.1.mlp.experts.gate_up_proj"][2, 3, 7] == p["layers.1.moe.gate_proj"][2, 7, 3]
    assert tensors["model.layers.1.mlp.experts.gate_up_proj"][2, 5 + 3, 7] == p["layers.1.moe.up_proj"][2, 7, 3]
    assert tensors["model.layers.1.mlp.experts.down_proj"][2, 7, 3] == p["layers.1.moe.down_proj"][2, 3, 7]
    assert tensors["model.layers.1.mlp.gate.weight"][2, 7] == p["layers.1.moe.router"][7, 2]
    assert tensors["lm_head.weight"][9, 7] == p["lm_head"][7, 9]


def test_a_layers_tensors_stand_together(tensors):
    layers = [name.split(".")[2] for name in tensors if name.startswith("model.layers.")]
    assert layers == sorted(layers)


def test_the_round_trip_is_exact(params, tensors):
    back = from_tensors(CONFIG, tensors)
    assert back.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(back[name], value, strict=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.gate.weight"), "missing tensors: model.layers.1.mlp.gate.weight"),
        (lambda t: t.update({"model.layers.0.bias": t["lm_head.weight"]}), "unknown tensors: model.layers.0.bias"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T}), r"'lm_head.weight' has shape \(8, 32\)"),
    ],
)
def test_errors_name_the_leaf(tensors, change, message):
    change(tensors)
    with pytest.raises(ValueError, match=message):
        from_tensors(CONFIG, tensors)


def test_an_unknown_leaf_is_refused():
    with pytest.raises(ValueError, match=r"'layers\.0\.bias'"):
        to_tensors(CONFIG, {"layers.0.bias": np.zeros(3)})
