"""Settings of the model and of the mesh it lies on.

One decoder serves every family, and what sets a family apart is written here: which layers have experts, which see a
sliding window only, how queries and keys are normalised and rotated, how the router scores. The defaults are those of
Qwen3-MoE. `model.family` names the layout of its Hugging Face checkpoints and nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncrl_jax.config_leaf import branch, require, setting

# Hugging Face `model_type` of every family whose checkpoints are read and written.
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "mimo_v2_flash", "llama", "qwen2", "qwen3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How a layer attends. A sliding layer may differ from a global one in window, heads, rotary base and sinks."""

    pattern: str = setting("g", "one letter a layer, repeated: g sees everything before it, s a sliding window")
    window: int = setting(0, "tokens that a sliding layer sees, the current one included")
    sliding_kv_heads: int = setting(0, "key and value heads of a sliding layer; 0: model.num_kv_heads")
    sliding_rope_theta: float = setting(0.0, "base of the rotary embedding in sliding layers; 0: model.rope_theta")
    sinks: bool = setting(False, "sliding layers learn one logit a head that takes probability and gives nothing")
    v_head_dim: int = setting(0, "width of one value head; 0: model.head_dim")
    value_scale: float = setting(1.0, "factor on the values")
    rotary_share: float = setting(1.0, "share of a head's width that is rotated")
    qk_norm: str = setting("head", "RMSNorm of queries and keys: head (of each head), full (over all heads) or none")
    qkv_bias: bool = setting(False, "biases on the query, key and value projections")
    output_bias: bool = setting(False, "bias on the output projection")
    clip: float = setting(0.0, "queries, keys and values are clipped to this size; 0: not at all")

    def __post_init__(self) -> None:
        need = "letters g and s, at least one"
        require(
            bool(self.pattern) and not set(self.pattern) - {"g", "s"}, "model.attention.pattern", self.pattern, need
        )
        slides = "s" in self.pattern
        need = "at least 1 where layers slide, and 0 where none does"
        require(self.window >= 1 if slides else self.window == 0, "model.attention.window", self.window, need)
        for name in ("sliding_kv_heads", "sliding_rope_theta", "v_head_dim", "clip"):
            require(getattr(self, name) >= 0, f"model.attention.{name}", getattr(self, name), "at least 0")
        require(slides or not self.sinks, "model.attention.sinks", self.sinks, "only sliding layers have sinks")
        require(0 < self.rotary_share <= 1, "model.attention.rotary_share", self.rotary_share, "above 0, at most 1")
        norms = ("head", "full", "none")
        require(self.qk_norm in norms, "model.attention.qk_norm", self.qk_norm, f"use one of {', '.join(norms)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """Rotary frequencies for contexts longer than those of the pretraining."""

    kind: str = setting("none", "none, linear (all frequencies ÷ factor) or llama3 (low frequencies only)")
    factor: float = setting(1.0, "by which frequencies are divided")
    low_freq_factor: float = setting(1.0, "llama3: wavelengths above original_positions ÷ this are scaled in full")
    high_freq_factor: float = setting(4.0, "llama3: wavelengths below original_positions ÷ this are left alone")
    original_positions: int = setting(8192, "llama3: context length of the pretraining, in tokens")

    def __post_init__(self) -> None:
        kinds = ("none", "linear", "llama3")
        require(self.kind in kinds, "model.rope_scaling.kind", self.kind, f"use one of {', '.join(kinds)}")
        require(self.factor >= 1, "model.rope_scaling.factor", self.factor, "at least 1")
        require(
            0 < self.low_freq_factor < self.high_freq_factor,
            "model.rope_scaling.low_freq_factor",
            self.low_freq_factor,
            f"above 0 and below high_freq_factor = {self.high_freq_factor}",
        )
        name = "model.rope_scaling.original_positions"
        require(self.original_positions >= 1, name, self.original_positions, "at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a token's experts are chosen and weighted."""

    score: str = setting("softmax", "what router logits become: softmax over all experts, or sigmoid of each")
    renormalise: bool = setting(True, "the weights of a token's experts are scaled to sum to model.router.scale")
    selection_bias: bool = setting(False, "each expert has a bias that enters the choice and not the weights")
    scale: float = setting(1.0, "factor on the weights of a token's experts")
    noise: float = setting(0.0, "standard deviation of Gaussian noise on the logits that the choice sees; 0 in RL")
    capacity_factor: float = setting(
        0.0, "an expert takes at most this times the balanced load; 0: all that it is sent"
    )

    def __post_init__(self) -> None:
        require(self.score in ("softmax", "sigmoid"), "model.router.score", self.score, "use softmax or sigmoid")
        require(self.scale > 0, "model.router.scale", self.scale, "more than 0")
        for name in ("noise", "capacity_factor"):
            require(getattr(self, name) >= 0, f"model.router.{name}", getattr(self, name), "at least 0")


_POSITIVE = ("num_layers", "hidden_dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "head_chunk_tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder. `layer i` is `attention.pattern[i]` and `mlp_pattern[i]`, both patterns repeated as needed."""

    family: str = setting("qwen3_moe", f"layout of its Hugging Face checkpoints: {', '.join(FAMILIES)}")
    checkpoint: str = setting(
        "", "Hugging Face directory that v0 starts from; the settings of the model must agree with it. Empty: random"
    )
    num_layers: int = setting(2, "decoder layers")
    hidden_dim: int = setting(64, "width of the residual stream")
    num_heads: int = setting(4, "query heads")
    num_kv_heads: int = setting(2, "key and value heads")
    head_dim: int = setting(16, "width of one head")
    mlp_pattern: str = setting("m", "one letter a layer, repeated: m is a mixture of experts, d a dense MLP")
    mlp_dim: int = setting(0, "hidden width of the MLP of a dense layer")
    mlp_bias: bool = setting(False, "biases in the MLP of a dense layer")
    num_experts: int = setting(8, "experts of a MoE layer")
    experts_per_token: int = setting(2, "experts that serve a token (top-k)")
    expert_dim: int = setting(64, "hidden width of one expert")
    vocab_size: int = setting(32, "tokens in the vocabulary, at least the environment's")
    tie_embeddings: bool = setting(False, "the head is the transposed embedding, not a matrix of its own")
    rope_theta: float = setting(100.0, "base of the rotary position embedding")
    norm_eps: float = setting(1e-6, "epsilon of RMSNorm")
    max_positions: int = setting(64, "longest trajectory, in tokens")
    dispatch: str = setting(
        "blocked", "MoE dispatch in training: blocked (runs everywhere), ragged (GPU, TPU) or dense (reference)"
    )
    compute_dtype: str = setting("float32", "of matrix products: float32 or bfloat16. Weights are float32 masters")
    remat: str = setting(
        "none", "recomputed in the backward pass: none, dots (all but matrix products) or layers (all but layer inputs)"
    )
    head_chunk_tokens: int = setting(
        512, "positions whose logits are in memory at a time, in the log-probs of training"
    )
    init_std: float = setting(0.08, "standard deviation of the random initialisation")
    attention: AttentionConfig = branch(AttentionConfig)
    rope_scaling: RopeScalingConfig = branch(RopeScalingConfig)
    router: RouterConfig = branch(RouterConfig)

    def __post_init__(self) -> None:
        require(self.family in FAMILIES, "model.family", self.family, f"use one of {', '.join(FAMILIES)}")
        for name in _POSITIVE:
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        self._check_heads()
        self._check_mlps()
        choices = {
            "dispatch": ("blocked", "ragged", "dense"),
            "compute_dtype": ("float32", "bfloat16"),
            "remat": ("none", "dots", "layers"),
        }
        for name, known in choices.items():
            require(getattr(self, name) in known, f"model.{name}", getattr(self, name), f"use {' or '.join(known)}")

    def _check_heads(self) -> None:
        need = f"must divide num_heads = {self.num_heads}"
        require(self.num_heads % self.num_kv_heads == 0, "model.num_kv_heads", self.num_kv_heads, need)
        sliding = self.attention.sliding_kv_heads
        require(sliding == 0 or self.num_heads % sliding == 0, "model.attention.sliding_kv_heads", sliding, need)
        rotary_dim = int(self.head_dim * self.attention.rotary_share)
        need = f"{rotary_dim} dimensions would be rotated: an even number, since rotary embedding turns pairs"
        require(rotary_dim % 2 == 0 and rotary_dim > 0, "model.head_dim", self.head_dim, need)

    def _check_mlps(self) -> None:
        known = bool(self.mlp_pattern) and not set(self.mlp_pattern) - {"m", "d"}
        require(known, "model.mlp_pattern", self.mlp_pattern, "letters m and d, at least one")
        if self.num_dense_layers:
            require(self.mlp_dim >= 1, "model.mlp_dim", self.mlp_dim, "at least 1 where layers are dense")
        if self.num_moe_layers:
            for name in ("num_experts", "expert_dim"):
                require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
            require(
                1 <= self.experts_per_token <= self.num_experts,
                "model.experts_per_token",
                self.experts_per_token,
                f"between 1 and num_experts = {self.num_experts}",
            )

    def is_sliding(self, layer: int) -> bool:
        """Whether layer `layer` sees a sliding window only."""
        return self.attention.pattern[layer % len(self.attention.pattern)] == "s"

    def is_moe(self, layer: int) -> bool:
        """Whether layer `layer` has experts."""
        return self.mlp_pattern[layer % len(self.mlp_pattern)] == "m"

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts; the leading dimension of what routers report."""
        return sum(map(self.is_moe, range(self.num_layers)))

    @property
    def num_dense_layers(self) -> int:
        """Layers with a dense MLP."""
        return self.num_layers - self.num_moe_layers


# Of a run and not of the function that the weights compute; no checkpoint states them.
RUN_SETTINGS = (
    "checkpoint",
    "dispatch",
    "compute_dtype",
    "remat",
    "head_chunk_tokens",
    "router.noise",
    "router.capacity_factor",
)


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """The settings in which two models are not the same function, as "name: value and other value"."""
    first, second = _function(one), _function(other)
    return [f"{name}: {first[name]} and {second[name]}" for name in first if first[name] != second[name]]


def _function(config: ModelConfig) -> dict[str, Any]:
    """What the function depends on, each in one form only."""
    a, layers = config.attention, range(config.num_layers)
    slides, has_experts = any(map(config.is_sliding, layers)), config.num_moe_layers > 0
    settings = dataclasses.asdict(config)
    for name in (*RUN_SETTINGS, "init_std", "max_positions"):
        branch_name, _, leaf = name.rpartition(".")
        del (settings[branch_name] if branch_name else settings)[leaf]
    settings["mlp_pattern"] = "".join("m" if config.is_moe(layer) else "d" for layer in layers)
    settings["mlp_dim"] = config.mlp_dim if config.num_dense_layers else 0
    for name in ("num_experts", "experts_per_token", "expert_dim", "router"):
        settings[name] = settings[name] if has_experts else None
    settings["attention"] |= {
        "pattern": "".join("s" if config.is_sliding(layer) else "g" for layer in layers),
        "sliding_kv_heads": (a.sliding_kv_heads or config.num_kv_heads) if slides else 0,
        "sliding_rope_theta": (a.sliding_rope_theta or config.rope_theta) if slides else 0.0,
        "v_head_dim": a.v_head_dim or config.head_dim,
    }
    if config.rope_scaling.kind != "llama3":
        settings["rope_scaling"] = {"kind": config.rope_scaling.kind, "factor": config.rope_scaling.factor}
    return settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    data: int = setting(1, "devices along the data axis")
    fsdp: int = setting(1, "devices along the fsdp axis (parameters sharded)")
    expert: int = setting(1, "devices along the expert axis")
    tensor: int = setting(1, "devices along the tensor axis")
    expert_buffer: float = setting(
        1.5, "rows that one exchange between expert shards carries ÷ those of a balanced load; more take more exchanges"
    )

    def __post_init__(self) -> None:
        for name in ("data", "fsdp", "expert", "tensor"):
            require(getattr(self, name) >= 1, f"mesh.{name}", getattr(self, name), "at least 1")
        require(self.expert_buffer > 0, "mesh.expert_buffer", self.expert_buffer, "more than 0")

    @property
    def batch_shards(self) -> int:
        """Parts that the rows of a batch are cut into."""
        return self.data * self.fsdp * self.expert
