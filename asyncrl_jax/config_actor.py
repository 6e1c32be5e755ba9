"""Settings of actor hosts, and of vLLM where it samples."""

from __future__ import annotations

import dataclasses

from asyncrl_jax.config_leaf import require, setting

ENGINES = ("jax", "vllm")
SWAP_BOUNDARIES = ("token", "turn", "episode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorConfig:
    num_hosts: int = setting(2, "actor hosts that the local launcher starts")
    engine: str = setting("jax", "what samples: jax (built in) or vllm")
    slots: int = setting(64, "sequences one engine decodes together")
    swap_at: str = setting("token", "where new weights may come in: between two tokens, turns or episodes")
    temperature: float = setting(1.0, "of sampling in training and evaluation")
    max_attempts: int = setting(3, "attempts at a ticket before it is reported as failed")
    heartbeat_s: float = setting(1.0, "seconds between heartbeats, of every role")
    heartbeat_timeout_s: float = setting(15.0, "seconds without a heartbeat before a process counts as dead")

    def __post_init__(self) -> None:
        require(self.num_hosts >= 1, "actor.num_hosts", self.num_hosts, "at least 1")
        require(self.engine in ENGINES, "actor.engine", self.engine, f"use one of {', '.join(ENGINES)}")
        require(self.slots >= 1, "actor.slots", self.slots, "at least 1")
        require(
            self.swap_at in SWAP_BOUNDARIES, "actor.swap_at", self.swap_at, f"use one of {', '.join(SWAP_BOUNDARIES)}"
        )
        require(self.temperature > 0, "actor.temperature", self.temperature, "more than 0")
        need = "between 0.01 and 2 with vLLM, which refuses or changes others"
        require(self.engine == "jax" or 0.01 <= self.temperature <= 2, "actor.temperature", self.temperature, need)
        require(self.max_attempts >= 1, "actor.max_attempts", self.max_attempts, "at least 1")
        require(
            0 < self.heartbeat_s < self.heartbeat_timeout_s, "actor.heartbeat_s", self.heartbeat_s, "below the timeout"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VllmConfig:
    dtype: str = setting("float32", "of weights and activations in vLLM: float32 or bfloat16")
    canary_tolerance_bf16: float = setting(
        0.1, "largest mean log-prob difference between canary and engine, in nats, at bfloat16"
    )
    kv_cache_gib: int = setting(1, "memory of the key-value cache on a CPU, in GiB")
    gpu_memory_share: float = setting(0.9, "share of an accelerator's memory that vLLM takes")
    block_size: int = setting(
        32, "tokens in a block of the key-value cache, which shares prefixes by whole blocks; on a CPU a multiple of 32"
    )
    prefix_reuse: bool = setting(True, "prefixes that were computed are shared among turns and sessions")
    max_batched_tokens: int = setting(2048, "tokens in one step, prefill included; on a CPU prompts are never split")
    routed_experts: bool = setting(False, "completions can say which experts served each token")
    start_timeout_s: float = setting(300.0, "longest wait for vLLM to start, in s")

    def __post_init__(self) -> None:
        require(self.dtype in ("float32", "bfloat16"), "vllm.dtype", self.dtype, "use float32 or bfloat16")
        require(self.canary_tolerance_bf16 > 0, "vllm.canary_tolerance_bf16", self.canary_tolerance_bf16, "more than 0")
        require(self.kv_cache_gib >= 1, "vllm.kv_cache_gib", self.kv_cache_gib, "at least 1")
        require(0 < self.gpu_memory_share <= 1, "vllm.gpu_memory_share", self.gpu_memory_share, "in (0, 1]")
        require(self.block_size >= 1, "vllm.block_size", self.block_size, "at least 1")
        require(self.max_batched_tokens >= 1, "vllm.max_batched_tokens", self.max_batched_tokens, "at least 1")
        require(self.start_timeout_s > 0, "vllm.start_timeout_s", self.start_timeout_s, "more than 0")
