"""Reading and writing checkpoints: parts, files, and what is wrong with them. No transformers needed."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from asyncrl_jax.config_model import AttentionConfig, ModelConfig, RouterConfig
from asyncrl_jax.models import from_hf, init_params, load_params, params_of, save_params, to_tensors
from asyncrl_jax.models.hf_names import read_part, separate_tensors

MODEL = ModelConfig(
    family="mimo_v2_flash", num_layers=2, hidden_dim=12, num_heads=6, num_kv_heads=1, head_dim=6, mlp_pattern="dm",
    mlp_dim=14, num_experts=5, expert_dim=10, vocab_size=19, router=RouterConfig(score="sigmoid", selection_bias=True),
    attention=AttentionConfig(
        pattern="gs", window=3, sliding_kv_heads=2, sliding_rope_theta=10.0, sinks=True, v_head_dim=4, qk_norm="none",
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def params():
    keys = iter(jax.random.split(jax.random.key(0), 100))
    return {name: jax.random.normal(next(keys), leaf.shape) for name, leaf in init_params(MODEL, 0).items()}


@pytest.fixture
def directory(params, tmp_path):
    save_params(MODEL, params, tmp_path)
    return tmp_path


@pytest.mark.parametrize("stacked", [True, False])
def test_a_part_of_a_weight_is_read_from_that_part_of_the_files_alone(params, stacked):
    """So a host reads its own shards. Cut in two along each dimension, but never within a head."""
    arrays = {name: np.asarray(value) for name, value in params.items()}
    apart = [separate_tensors(MODEL, name, value) for name, value in arrays.items()]
    tensors = to_tensors(MODEL, arrays) if stacked else dict(itertools.chain(*apart))
    for name, whole in arrays.items():
        for dim, size in enumerate(whole.shape):
            in_head = "attention." in name and whole.ndim == 3 and dim == (1 if name.endswith("o_proj") else 2)
            if in_head or size == 1:
                continue
            part = tuple(slice(0, length) for length in whole.shape)
            part = (*part[:dim], slice(size // 2, size), *part[dim + 1 :])
            sizes = []

            def read(hub_name, of_tensor, sizes=sizes):
                sizes.append(tensors[hub_name][of_tensor].size)
                return tensors[hub_name][of_tensor]

            found = read_part(MODEL, name, whole.shape, part, read, stacked=stacked)
            np.testing.assert_array_equal(found, whole[part], err_msg=f"{name} {part}")
            assert sum(sizes) == whole[part].size


def test_bfloat16_files_hold_what_bfloat16_can_and_the_router_in_full(params, tmp_path):
    save_params(MODEL, params, tmp_path, dtype="bfloat16")
    again = params_of(from_hf(tmp_path))
    for name, value in params.items():
        exact = name.endswith(("moe.router", "moe.router_bias"))
        expected = value if exact else value.astype("bfloat16").astype("float32")
        np.testing.assert_array_equal(again[name], expected, err_msg=name)


def test_what_was_written_before_is_gone(params, tmp_path):
    save_params(MODEL, params, tmp_path, shard_bytes=4000)
    several = len(list(tmp_path.glob("*.safetensors")))
    save_params(MODEL, params, tmp_path)
    assert several > 1
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def change_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.gate.weight"), "missing tensors: model.layers.1.mlp.gate.weight"),
        (lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), r"missing tensors: .*experts\.3\.up_proj"),
        (lambda t: t.update({"model.layers.0.extra": np.zeros(2)}), "unknown tensors: model.layers.0.extra"),
        (lambda t: t.update({"lm_head.weight": np.zeros((12, 19))}), r"'lm_head.weight' has shape \(12, 19\)"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(directory, change, message):
    change_tensors(directory, change)
    with pytest.raises(ValueError, match=message):
        from_hf(directory)


def test_heads_for_several_tokens_and_old_rotary_tables_are_left_out(directory, params):
    extra = {"model.mtp.layers.0.x": np.zeros(3), "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3)}
    change_tensors(directory, lambda tensors: tensors.update(extra))
    np.testing.assert_array_equal(params_of(from_hf(directory))["norm"], params["norm"])


def test_a_checkpoint_of_another_model_is_refused_by_what_differs(directory):
    other = dataclasses.replace(MODEL, experts_per_token=3, dispatch="dense")
    with pytest.raises(ValueError, match=r"another model than configured: experts_per_token: 3 and 2$"):
        load_params(directory, other)


def test_a_tied_head_that_is_there_must_be_the_embedding(tmp_path):
    tied = ModelConfig(
        family="llama", mlp_pattern="d", mlp_dim=6, tie_embeddings=True, attention=AttentionConfig(qk_norm="none")
    )
    save_params(tied, init_params(tied, 0), tmp_path)
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert "lm_head" not in params_of(from_hf(tmp_path))
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match=r"'lm_head.weight' differs"):
        from_hf(tmp_path)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_that_is_no_checkpoint_is_refused(directory, missing):
    (directory / missing).unlink()
    with pytest.raises(ValueError, match=missing):
        from_hf(directory)


def test_the_tokenizer_and_its_ids_come_along(params, directory, tmp_path):
    (directory / "tokenizer.json").write_text("{}")
    raw = json.loads((directory / "config.json").read_text()) | {"eos_token_id": 7}
    (directory / "config.json").write_text(json.dumps(raw))
    save_params(MODEL, params, tmp_path / "out", tokenizer_from=directory)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 7
