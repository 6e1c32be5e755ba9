"""Tiny random checkpoints of every family, made by transformers. Sizes are odd on purpose."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import functools

import torch
import transformers
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

_SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
# The reference paths; the grouped matmul of the other one wants aligned sizes.
_EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOW = 4

# (config class, what differs from _SIZES)
_MODELS = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "num_experts": 5, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 14, "intermediate_size": 22, "norm_topk_prob": True, "mlp_only_layers": [1]}
        | {"num_hidden_layers": 3},
    ),
    "mixtral": (
        "MixtralConfig",
        {"head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 14}
        | {"sliding_window": WINDOW},
    ),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 14, "clip_qkv": 0.5, "eos_token_id": None}
        | {"num_key_value_heads": 3},
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {"num_attention_heads": 6, "head_dim": 18, "v_head_dim": 7, "n_routed_experts": 5, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 14, "intermediate_size": 22, "sliding_window": WINDOW, "num_hidden_layers": 3}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "routed_scaling_factor": 1.3},
    ),
    "llama": (
        "LlamaConfig",
        {"intermediate_size": 14, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
        | {"rope_parameters": _LLAMA_3},
    ),
    "qwen2": (
        "Qwen2Config",
        {"intermediate_size": 14, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"intermediate_size": 14, "head_dim": 10, "tie_word_embeddings": True}),
}
FAMILIES = tuple(_MODELS)


def make_model(family):
    """A random transformers model in which every weight matters: norms, biases and sinks too are random."""
    class_name, changes = _MODELS[family]
    config = getattr(transformers, class_name)(**_SIZES | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, **_EAGER)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                center = 1.0 if "norm" in name else 0.0
                value.copy_(center + 0.3 * torch.randn(value.shape, generator=generator))
    return model.eval()


def load_model(directory):
    """transformers' model of a directory; every tensor must be there and be known."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, **_EAGER
    )
    problems = {name: list(keys) for name, keys in info.items() if keys}
    assert not problems, problems
    return model.eval()


@functools.cache
def checkpoint(family, directory):
    """(transformers' model, directory it was saved to)."""
    model = make_model(family)
    model.save_pretrained(f"{directory}/{family}")
    return model, f"{directory}/{family}"
