"""`config.json` of a Hugging Face checkpoint as model settings, and back.

    read_hf_config(directory) -> ModelConfig        hf_config(model) -> contents of config.json

Reads what the hub has and what transformers 4 and 5 write. A value that would make the model compute something else
than this decoder can is refused by name, and so is a key that nobody here knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl_jax.config_leaf import require
from asyncrl_jax.config_model import AttentionConfig, ModelConfig, RopeScalingConfig, RouterConfig, differences

# Of training, generation and bookkeeping: they do not change what the model computes.
_WITHOUT_EFFECT = {
    "architectures",
    "attention_chunk_size",  # MiMo-V2's files carry it; the model does not use it
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "hybrid_block_size",
    "initializer_range",
    "max_window_layers",
    "moe_router_dtype",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "return_dict",
    "rope_interleaved",
    "router_aux_loss_coef",
    "task_specific_params",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}

_ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_REQUIRED = object()


class _Fields:
    """The keys of a config.json, each taken once; what is left over is refused."""

    def __init__(self, raw: Mapping[str, Any]):
        self._left = dict(raw)

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of `name`; the default where it is absent or null."""
        value = self._left.pop(name, None)
        if value is None and default is _REQUIRED:
            raise ValueError(f"config.json has no {name!r}")
        return default if value is None else value

    def expect(self, name: str, *supported: Any) -> None:
        """Refuses a value of `name` that is not one of these; absent and null are the first."""
        value = self.take(name, supported[0])
        if value not in supported:
            raise ValueError(f"config.json: {name} = {value!r} is not supported, only {supported[0]!r} is")

    def finish(self) -> None:
        """Refuses what nobody took, unless it is without effect or switched off."""
        for name, value in self._left.items():
            if name not in _WITHOUT_EFFECT and not name.startswith("_") and value not in (None, False, [], {}):
                raise ValueError(f"config.json: {name} = {value!r} is unknown here, and may change the model")


# ------------------------------------------------------------------------------------------------------------- reading


def read_hf_config(directory: str | Path) -> ModelConfig:
    """Settings of the model in a Hugging Face directory. Settings of a run in it (dispatch, …) are the defaults.

    Raises:
      ValueError: if there is no readable config.json, or it says something that is not supported.
    """
    path = Path(directory) / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return model_config(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_teachers(directories: Sequence[str], vocab_size: int) -> tuple[ModelConfig, ...]:
    """Settings of the teachers that `learner.distill.teachers` names.

    Args:
      directories: one for each.
      vocab_size: of the student.

    Raises:
      ValueError: for a directory that is no checkpoint, or a teacher with other tokens than the student.
    """
    models = tuple(read_hf_config(directory) for directory in directories)
    for directory, model in zip(directories, models, strict=True):
        require(
            model.vocab_size == vocab_size,
            "learner.distill.teachers",
            directory,
            f"it knows {model.vocab_size} tokens and model.vocab_size is {vocab_size}; a teacher reads the student's",
        )
    return models


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Settings of the model that a config.json describes.

    Raises:
      ValueError: for a family or a value that is not supported.
    """
    fields = _Fields(raw)
    family = fields.take("model_type")
    if family not in _READERS:
        raise ValueError(f"model_type {family!r}: use one of {', '.join(_READERS)}")
    fields.expect("hidden_act", "silu")
    fields.expect("attention_dropout", 0.0)
    fields.expect("quantization_config", None)
    num_heads = fields.take("num_attention_heads")
    hidden_dim = fields.take("hidden_size")
    common = {
        "family": family,
        "num_layers": fields.take("num_hidden_layers"),
        "hidden_dim": hidden_dim,
        "num_heads": num_heads,
        "num_kv_heads": fields.take("num_key_value_heads", num_heads),
        "head_dim": fields.take("head_dim", hidden_dim // num_heads),
        "vocab_size": fields.take("vocab_size"),
        "max_positions": fields.take("max_position_embeddings"),
        "init_std": raw.get("initializer_range", 0.02),
        "tie_embeddings": fields.take("tie_word_embeddings", False),
        "mlp_pattern": "d",
        "num_experts": 0,
        "experts_per_token": 0,
        "expert_dim": 0,
    }
    config = ModelConfig(**common | _READERS[family](fields, common))
    fields.finish()
    return config


def _rope(fields: _Fields, default_theta: float) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, from the keys of transformers 4 or 5."""
    theta = fields.take("rope_theta", default_theta)
    scaling = dict(fields.take("rope_scaling", {}))
    rope = dict(fields.take("rope_parameters", {})) | scaling
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    theta = rope.pop("rope_theta", theta)
    names = {
        "default": {},
        "linear": {"factor": "factor"},
        "llama3": {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_positions",
        },
    }
    if kind not in names:
        raise ValueError(f"config.json: rope_type {kind!r} is not supported, only {', '.join(names)} are")
    if unknown := sorted(rope.keys() - names[kind].keys()):
        raise ValueError(
            f"config.json: rope_parameters has {unknown[0]!r}, which rope_type {kind!r} does not take here"
        )
    settings = {names[kind][name]: value for name, value in rope.items()}
    return {
        "rope_theta": float(theta),
        "rope_scaling": RopeScalingConfig(kind="none" if kind == "default" else kind, **settings),
    }


def _pattern(letters: list[str]) -> str:
    """One letter a layer, or a single one for all."""
    return letters[0] if len(set(letters)) == 1 else "".join(letters)


def _by_name(name: str, values: list[Any], letters: Mapping[Any, str], num_layers: int) -> str:
    """The pattern that a list with one value a layer spells."""
    if len(values) != num_layers or not set(values) <= letters.keys():
        raise ValueError(f"config.json: {name} = {values!r}: {num_layers} values of {', '.join(map(str, letters))}")
    return _pattern([letters[value] for value in values])


def _windows(fields: _Fields, num_layers: int) -> dict[str, Any]:
    """`pattern` and `window` of Qwen2 and Qwen3: the layers from `max_window_layers` on slide, or `layer_types`."""
    window = fields.take("sliding_window", 0) if fields.take("use_sliding_window", False) else 0
    fields.take("sliding_window", 0)
    first = fields.take("max_window_layers", 28)
    default = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(num_layers)]
    pattern = _by_name("layer_types", fields.take("layer_types", default), _LAYER_TYPES, num_layers)
    return {"pattern": pattern, "window": window if "s" in pattern else 0}


_LAYER_TYPES = {"full_attention": "g", "sliding_attention": "s"}


def _read_llama(fields: _Fields, _: dict[str, Any]) -> dict[str, Any]:
    fields.expect("pretraining_tp", 1)
    bias = fields.take("attention_bias", False)
    return _rope(fields, 10_000.0) | {
        "mlp_dim": fields.take("intermediate_size"),
        "mlp_bias": fields.take("mlp_bias", False),
        "norm_eps": fields.take("rms_norm_eps", 1e-6),
        "attention": AttentionConfig(qk_norm="none", qkv_bias=bias, output_bias=bias),
    }


def _read_qwen2(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    return _rope(fields, 10_000.0) | {
        "mlp_dim": fields.take("intermediate_size"),
        "norm_eps": fields.take("rms_norm_eps", 1e-6),
        "attention": AttentionConfig(qk_norm="none", qkv_bias=True, **_windows(fields, common["num_layers"])),
    }


def _read_qwen3(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    bias = fields.take("attention_bias", False)
    return _rope(fields, 10_000.0) | {
        "mlp_dim": fields.take("intermediate_size"),
        "norm_eps": fields.take("rms_norm_eps", 1e-6),
        "attention": AttentionConfig(qkv_bias=bias, output_bias=bias, **_windows(fields, common["num_layers"])),
    }


def _read_qwen3_moe(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    bias = fields.take("attention_bias", False)
    window = fields.take("sliding_window", 0) if fields.take("use_sliding_window", False) else 0
    fields.take("sliding_window", 0)
    dense, step = set(fields.take("mlp_only_layers", [])), fields.take("decoder_sparse_step", 1)
    mlps = ["d" if layer in dense or (layer + 1) % step else "m" for layer in range(common["num_layers"])]
    mlp_dim = fields.take("intermediate_size", 0)
    return _rope(fields, 10_000.0) | {
        "mlp_pattern": _pattern(mlps),
        "mlp_dim": mlp_dim if "d" in mlps else 0,
        "num_experts": fields.take("num_local_experts", None) or fields.take("num_experts"),
        "experts_per_token": fields.take("num_experts_per_tok"),
        "expert_dim": fields.take("moe_intermediate_size"),
        "norm_eps": fields.take("rms_norm_eps", 1e-6),
        "attention": AttentionConfig(pattern="s" if window else "g", window=window, qkv_bias=bias, output_bias=bias),
        "router": RouterConfig(renormalise=fields.take("norm_topk_prob", False)),
    }


def _read_mixtral(fields: _Fields, _: dict[str, Any]) -> dict[str, Any]:
    fields.expect("router_jitter_noise", 0.0)
    window = fields.take("sliding_window", 0)
    return _rope(fields, 1e6) | {
        "mlp_pattern": "m",
        "num_experts": fields.take("num_local_experts"),
        "experts_per_token": fields.take("num_experts_per_tok"),
        "expert_dim": fields.take("intermediate_size"),
        "norm_eps": fields.take("rms_norm_eps", 1e-5),
        "attention": AttentionConfig(qk_norm="none", pattern="s" if window else "g", window=window),
    }


def _read_olmoe(fields: _Fields, _: dict[str, Any]) -> dict[str, Any]:
    bias = fields.take("attention_bias", False)
    return _rope(fields, 10_000.0) | {
        "mlp_pattern": "m",
        "num_experts": fields.take("num_experts"),
        "experts_per_token": fields.take("num_experts_per_tok"),
        "expert_dim": fields.take("intermediate_size"),
        "norm_eps": fields.take("rms_norm_eps", 1e-5),
        "attention": AttentionConfig(
            qk_norm="full", qkv_bias=bias, output_bias=bias, clip=fields.take("clip_qkv", 0.0)
        ),
        "router": RouterConfig(renormalise=fields.take("norm_topk_prob", False)),
    }


def _read_mimo(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    num_layers = common["num_layers"]
    only = {"n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    for name, supported in only.items():
        fields.expect(name, supported)
    fields.expect("n_shared_experts", None, 0)
    sparse = fields.take("moe_layer_freq", [0] + [1] * (num_layers - 1))
    mlps = fields.take("mlp_layer_types", ["sparse" if one else "dense" for one in sparse])
    pattern = _by_name("mlp_layer_types", mlps, {"dense": "d", "sparse": "m"}, num_layers)
    mlp_dim = fields.take("intermediate_size")
    return _mimo_attention(fields, common) | {
        "mlp_pattern": pattern,
        "mlp_dim": mlp_dim if "d" in pattern else 0,
        "num_experts": fields.take("n_routed_experts"),
        "experts_per_token": fields.take("num_experts_per_tok"),
        "expert_dim": fields.take("moe_intermediate_size"),
        "norm_eps": fields.take("layernorm_epsilon", fields.take("rms_norm_eps", 1e-5)),
        "router": RouterConfig(
            score="sigmoid",
            selection_bias=True,
            renormalise=fields.take("norm_topk_prob", True),
            scale=fields.take("routed_scaling_factor", 1.0),
        ),
    }


def _mimo_attention(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    """`attention` and `rope_theta` of MiMo-V2, in the words of the hub or of transformers."""
    num_layers, v_head_dim = common["num_layers"], fields.take("v_head_dim")
    default = [not (i == 0 or (i + 1) % 6 == 0) for i in range(num_layers)]
    slides = fields.take("hybrid_layer_pattern", default)
    types = fields.take("layer_types", ["sliding_attention" if one else "full_attention" for one in slides])
    pattern = _by_name("layer_types", types, _LAYER_TYPES, num_layers)
    window = fields.take("sliding_window", 129)
    window = fields.take("sliding_window_size", window - 1) + 1  # the hub counts the tokens before the current one
    fields.expect("swa_num_attention_heads", None, common["num_heads"])
    fields.expect("swa_head_dim", None, common["head_dim"])
    fields.expect("swa_v_head_dim", None, v_head_dim)
    fields.expect("add_full_attention_sink_bias", False)
    fields.expect("add_swa_attention_sink_bias", True)
    thetas = {"full_attention": fields.take("rope_theta", 5e6), "sliding_attention": fields.take("swa_rope_theta", 1e4)}
    shares = {fields.take("partial_rotary_factor", 0.334)}
    if nested := fields.take("rope_parameters", None):
        for kind in thetas:
            if nested[kind].get("rope_type", "default") != "default":
                raise ValueError(f"config.json: rope_type {nested[kind]['rope_type']!r} is not supported")
            thetas[kind] = nested[kind]["rope_theta"]
        shares = {nested[kind].get("partial_rotary_factor", 0.334) for kind in thetas}
    if len(shares) > 1:
        raise ValueError(f"config.json: partial_rotary_factor is {shares}: one for all layers is supported")
    sliding_kv_heads = fields.take("swa_num_key_value_heads", 2 * common["num_kv_heads"])
    sliding: dict[str, Any] = {}
    if "s" in pattern:
        theta = thetas["sliding_attention"]
        sliding = {"window": window, "sliding_kv_heads": sliding_kv_heads, "sliding_rope_theta": theta, "sinks": True}
    attention = AttentionConfig(
        pattern=pattern,
        v_head_dim=v_head_dim,
        value_scale=fields.take("attention_value_scale", 1.0),
        rotary_share=shares.pop(),
        qk_norm="none",
        qkv_bias=fields.take("attention_bias", False),
        **sliding,
    )
    return {"attention": attention, "rope_theta": thetas["full_attention"]}


_READERS: dict[str, Callable[[_Fields, dict[str, Any]], dict[str, Any]]] = {
    "qwen3_moe": _read_qwen3_moe,
    "mixtral": _read_mixtral,
    "olmoe": _read_olmoe,
    "mimo_v2_flash": _read_mimo,
    "llama": _read_llama,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
}


# ------------------------------------------------------------------------------------------------------------- writing


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Contents of config.json for transformers and vLLM.

    Raises:
      ValueError: for settings that the family's config.json can't express; it names them.
    """
    a, layers = config.attention, range(config.num_layers)
    types = ["sliding_attention" if config.is_sliding(layer) else "full_attention" for layer in layers]
    slides = "s" in a.pattern
    contents: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "hidden_act": "silu",
        "hidden_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": a.qkv_bias,
        "intermediate_size": config.mlp_dim or config.expert_dim,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_dim,
        "norm_topk_prob": config.router.renormalise,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    contents |= _write_rope(config)
    if config.family in ("qwen2", "qwen3"):
        contents |= {"layer_types": types, "use_sliding_window": slides, "max_window_layers": config.num_layers}
    if config.family == "qwen3_moe":
        dense = [layer for layer in layers if not config.is_moe(layer)]
        contents |= {"num_experts": config.num_experts, "mlp_only_layers": dense, "use_sliding_window": slides}
    if config.family in ("qwen2", "qwen3", "qwen3_moe", "mixtral") and slides:
        contents["sliding_window"] = a.window
    if config.family == "mixtral":
        contents |= {"num_local_experts": config.num_experts}
    if config.family == "olmoe":
        contents |= {"num_experts": config.num_experts, "clip_qkv": a.clip or None}
    if config.family == "llama":
        contents |= {"mlp_bias": config.mlp_bias}
    if config.family == "mimo_v2_flash":
        contents |= _write_mimo(config, types)
    unused = {
        "qwen2": ("attention_bias", *_OF_EXPERTS),
        "qwen3": _OF_EXPERTS,
        "llama": _OF_EXPERTS,
        "mixtral": ("attention_bias", "moe_intermediate_size", "norm_topk_prob"),
        "olmoe": ("head_dim", "moe_intermediate_size"),
    }
    for name in unused.get(config.family, ()):
        del contents[name]
    if lost := differences(config, model_config(contents)):
        raise ValueError(f"a config.json of {config.family} can't express {'; '.join(lost)}")
    return contents


_OF_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    """In the words of transformers 5, and of 4 for older servers."""
    s = config.rope_scaling
    if s.kind == "none":
        return {"rope_theta": config.rope_theta, "rope_parameters": _plain_rope(config.rope_theta)}
    rope: dict[str, Any] = {"rope_type": s.kind, "factor": s.factor}
    if s.kind == "llama3":
        rope |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
        rope |= {"original_max_position_embeddings": s.original_positions}
    theta = {"rope_theta": config.rope_theta}
    return theta | {"rope_scaling": rope, "rope_parameters": rope | theta}


def _plain_rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def _write_mimo(config: ModelConfig, types: list[str]) -> dict[str, Any]:
    """MiMo-V2 in the words of transformers, and of the hub, which vLLM reads."""
    a, layers = config.attention, range(config.num_layers)
    sliding_theta = a.sliding_rope_theta or config.rope_theta
    v_head_dim = a.v_head_dim or config.head_dim
    return {
        "layer_types": types,
        "hybrid_layer_pattern": [int(config.is_sliding(layer)) for layer in layers],
        "sliding_window": a.window or None,
        "sliding_window_size": a.window - 1 if a.window else None,
        "v_head_dim": v_head_dim,
        "swa_num_attention_heads": config.num_heads,
        "swa_num_key_value_heads": a.sliding_kv_heads or config.num_kv_heads,
        "swa_head_dim": config.head_dim,
        "swa_v_head_dim": v_head_dim,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_value_scale": a.value_scale,
        "rope_parameters": {
            "full_attention": _plain_rope(config.rope_theta, partial_rotary_factor=a.rotary_share),
            "sliding_attention": _plain_rope(sliding_theta, partial_rotary_factor=a.rotary_share),
        },
        "swa_rope_theta": sliding_theta,
        "partial_rotary_factor": a.rotary_share,
        "mlp_layer_types": ["sparse" if config.is_moe(layer) else "dense" for layer in layers],
        "moe_layer_freq": [int(config.is_moe(layer)) for layer in layers],
        "n_routed_experts": config.num_experts,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": config.router.scale,
        "layernorm_epsilon": config.norm_eps,
    }
