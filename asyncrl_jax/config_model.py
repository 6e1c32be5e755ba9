"""Settings of the model and of the mesh it lies on."""

from __future__ import annotations

import dataclasses

from asyncrl_jax.config_leaf import require, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Qwen3-MoE architecture."""

    num_layers: int = setting(2, "decoder layers")
    hidden_dim: int = setting(64, "width of the residual stream")
    num_heads: int = setting(4, "query heads")
    num_kv_heads: int = setting(2, "key and value heads")
    head_dim: int = setting(16, "width of one head")
    num_experts: int = setting(8, "experts of a MoE layer")
    experts_per_token: int = setting(2, "experts that serve a token (top-k)")
    expert_dim: int = setting(64, "hidden width of one expert")
    vocab_size: int = setting(32, "tokens in the vocabulary, at least the environment's")
    rope_theta: float = setting(100.0, "base of the rotary position embedding")
    norm_eps: float = setting(1e-6, "epsilon of RMSNorm")
    max_positions: int = setting(64, "longest trajectory, in tokens")
    dispatch: str = setting(
        "blocked", "MoE dispatch in training: blocked (dropless, runs everywhere) or dense (reference)"
    )
    init_std: float = setting(0.08, "standard deviation of the random initialisation")

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_dim",
            "num_heads",
            "num_kv_heads",
            "num_experts",
            "expert_dim",
            "vocab_size",
        ):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.num_kv_heads",
            self.num_kv_heads,
            f"must divide num_heads = {self.num_heads}",
        )
        require(self.head_dim % 2 == 0, "model.head_dim", self.head_dim, "must be even: rotary embedding turns pairs")
        require(
            1 <= self.experts_per_token <= self.num_experts,
            "model.experts_per_token",
            self.experts_per_token,
            f"between 1 and num_experts = {self.num_experts}",
        )
        require(self.dispatch in ("blocked", "dense"), "model.dispatch", self.dispatch, "use blocked or dense")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    data: int = setting(1, "devices along the data axis")
    fsdp: int = setting(1, "devices along the fsdp axis (parameters sharded)")
    expert: int = setting(1, "devices along the expert axis")
    tensor: int = setting(1, "devices along the tensor axis")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            require(getattr(self, field.name) >= 1, f"mesh.{field.name}", getattr(self, field.name), "at least 1")
