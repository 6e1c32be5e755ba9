"""Settings of actor hosts, and of vLLM where it samples."""

from __future__ import annotations

import dataclasses

from asyncrl_jax.config_leaf import COLDEST_HOTTEST, branch, require, setting

ENGINES = ("jax", "vllm")
MOST_EXPLORED = 0.05
POLICIES = ("older", "uniform")
SWAP_BOUNDARIES = ("token", "turn", "episode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplorationConfig:
    temperature_jitter: float = setting(
        0.0, "each sample's temperature is the ticket's times e^u, u uniform between -jitter and +jitter"
    )
    share: float = setting(0.0, f"share of samples that another policy makes; at most {MOST_EXPLORED}")
    policy: str = setting("older", "which: older (the version evaluated last) or uniform (over the vocabulary)")

    def __post_init__(self) -> None:
        name = "actor.exploration"
        require(0 <= self.temperature_jitter <= 1, f"{name}.temperature_jitter", self.temperature_jitter, "from 0 to 1")
        require(0 <= self.share <= MOST_EXPLORED, f"{name}.share", self.share, f"from 0 to {MOST_EXPLORED}")
        require(self.policy in POLICIES, f"{name}.policy", self.policy, f"use one of {', '.join(POLICIES)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorConfig:
    num_hosts: int = setting(2, "actor hosts that the local launcher starts")
    engine: str = setting("jax", "what samples: jax (built in) or vllm")
    slots: int = setting(64, "sequences one engine decodes together")
    episodes: int = setting(
        0, "most episodes of a host at once; above slots, those whose environment thinks lend their slot. 0: slots"
    )
    queue_share: float = setting(
        0.25,
        "with more episodes than slots: another starts while fewer sessions wait for a slot than this share of them",
    )
    kv_tokens: int = setting(
        0, "no episode starts while the sequences that wait for tokens hold so many already; 0 for no limit"
    )
    block_steps: int = setting(16, "decode steps of the JAX engine before it looks at its requests again, at most")
    prefill_tokens: int = setting(
        256, "tokens of prompts that the JAX engine computes between two blocks of decode steps"
    )
    prefix_reuse: bool = setting(True, "the JAX engine shares prefixes that were computed among turns and sessions")
    swap_at: str = setting("token", "where new weights may come in: between two tokens, turns or episodes")
    temperature: float = setting(1.0, "of sampling in training and evaluation")
    max_attempts: int = setting(3, "attempts at a ticket before it is reported as failed")
    heartbeat_s: float = setting(1.0, "seconds between heartbeats, of every role")
    heartbeat_timeout_s: float = setting(15.0, "seconds without a heartbeat before a process counts as dead")
    exploration: ExplorationConfig = branch(ExplorationConfig)

    def __post_init__(self) -> None:
        require(self.num_hosts >= 1, "actor.num_hosts", self.num_hosts, "at least 1")
        require(self.engine in ENGINES, "actor.engine", self.engine, f"use one of {', '.join(ENGINES)}")
        for name in ("slots", "block_steps", "prefill_tokens"):
            require(getattr(self, name) >= 1, f"actor.{name}", getattr(self, name), "at least 1")
        require(
            self.swap_at in SWAP_BOUNDARIES, "actor.swap_at", self.swap_at, f"use one of {', '.join(SWAP_BOUNDARIES)}"
        )
        low, high = COLDEST_HOTTEST
        require(low <= self.temperature <= high, "actor.temperature", self.temperature, f"from {low:g} to {high:g}")
        need = "between 0.01 and 2 with vLLM, which refuses or changes others"
        require(self.engine == "jax" or 0.01 <= self.temperature <= 2, "actor.temperature", self.temperature, need)
        require(
            self.episodes == 0 or self.episodes >= self.slots,
            "actor.episodes",
            self.episodes,
            f"0, or at least actor.slots = {self.slots}",
        )
        require(
            self.episodes <= self.slots or self.swap_at != "episode",
            "actor.episodes",
            self.episodes,
            "with actor.swap_at=episode at most actor.slots: an episode holds its slot until it ends",
        )
        require(self.queue_share >= 0, "actor.queue_share", self.queue_share, "at least 0")
        require(self.kv_tokens >= 0, "actor.kv_tokens", self.kv_tokens, "at least 0")
        require(self.max_attempts >= 1, "actor.max_attempts", self.max_attempts, "at least 1")
        require(
            0 < self.heartbeat_s < self.heartbeat_timeout_s, "actor.heartbeat_s", self.heartbeat_s, "below the timeout"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VllmConfig:
    servers: tuple[str, ...] = setting(
        (),
        "URLs of an actor's own vLLM servers, as asyncrl-vllm-server starts them: the first one samples, the second "
        "evaluates; one that is not there is a child of the actor",
    )
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
        need = "at most two, whose URLs begin with http:// or https://, and without vllm.routed_experts"
        urls = all(url.startswith(("http://", "https://")) for url in self.servers)
        right = not self.servers or (len(self.servers) <= 2 and urls and not self.routed_experts)
        require(right, "vllm.servers", self.servers, need)
        require(self.dtype in ("float32", "bfloat16"), "vllm.dtype", self.dtype, "use float32 or bfloat16")
        require(self.canary_tolerance_bf16 > 0, "vllm.canary_tolerance_bf16", self.canary_tolerance_bf16, "more than 0")
        require(self.kv_cache_gib >= 1, "vllm.kv_cache_gib", self.kv_cache_gib, "at least 1")
        require(0 < self.gpu_memory_share <= 1, "vllm.gpu_memory_share", self.gpu_memory_share, "in (0, 1]")
        require(self.block_size >= 1, "vllm.block_size", self.block_size, "at least 1")
        require(self.max_batched_tokens >= 1, "vllm.max_batched_tokens", self.max_batched_tokens, "at least 1")
        require(self.start_timeout_s > 0, "vllm.start_timeout_s", self.start_timeout_s, "more than 0")
