"""Settings of what an episode meets: the environment, its reward, and tools."""

from __future__ import annotations

import dataclasses
import urllib.parse

from asyncrl_jax.config_leaf import branch, require, setting
from asyncrl_jax.laws import parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    name: str = setting(
        "arithmetic",
        "what makes and scores tasks: arithmetic, code, math:<file>, reasoning_gym:<data set>, "
        "function:<module>:<name>, text:<module>:<name>, agent:<module>:<name>, gymnasium:<id>, verifiers:<id> or "
        "openenv:<url>",
    )
    arguments: str = setting("", "JSON object of arguments for gymnasium:<id> or verifiers:<id>")
    tokenizer: str = setting("byte", "of environments that speak text: byte, or a directory with an instruct model's")
    opening: str = setting(
        "", "JSON file of messages (role, content) that every conversation of text starts with, as solved examples"
    )
    prompt_variants: str = setting(
        "", "JSON file of texts with {prompt} in each: ways to put a training task's question, drawn by task"
    )
    level_weights: tuple[float, ...] = setting((1.0, 1.0, 1.0), "share of training tasks of each level, level 1 first")
    demonstrated_levels: tuple[int, ...] = setting((1, 2), "levels that warm-start demonstrations show")
    max_turns: int = setting(5, "times the policy may speak in one episode")
    turn_tokens: int = setting(0, "most tokens of one turn of the policy, in environments of text; 0 for no limit")
    max_tokens: int = setting(64, "longest trajectory, prompt and tool results included, in tokens")
    episode_timeout_s: float = setting(
        600.0, "a policy gets no further turn in an episode that has taken longer than this, in seconds"
    )
    call_timeout_s: float = setting(30.0, "longest one call of an environment may take before its episode fails, in s")
    turn_delay_s: str = setting(
        "",
        "law of a wait added to the environment's answer to every turn, in s, to rehearse slow tools: constant:2, "
        "exponential:1, lognormal:<median>:<sigma>, pareto:<least>:<alpha>; empty: none",
    )
    processes: int = setting(
        1,
        "processes of an actor for function:, text:, gymnasium: and verifiers: environments; 0: they live in the actor "
        "itself",
    )
    start_timeout_s: float = setting(60.0, "longest start of such a process, reading its data included, in seconds")
    process_leak_bytes: int = setting(
        2**30, "memory that such a process may take beyond its first episodes' before it is replaced, in bytes"
    )
    endpoint_host: str = setting("127.0.0.1", "where agent:<module>:<name> finds the policy; other hosts need another")
    endpoint_port: int = setting(0, "its port; 0 picks a free one")
    score_processes: int = setting(1, "processes of an actor that score answers, where the environment uses them")
    score_timeout_s: float = setting(10.0, "longest scoring of one answer there, waiting left out, in seconds")

    def __post_init__(self) -> None:
        require(
            len(self.level_weights) > 0 and min(self.level_weights) >= 0 and sum(self.level_weights) > 0,
            "environment.level_weights",
            self.level_weights,
            "non-negative, and not all zero",
        )
        for level in self.demonstrated_levels:
            require(
                1 <= level <= len(self.level_weights),
                "environment.demonstrated_levels",
                self.demonstrated_levels,
                f"levels are 1 to {len(self.level_weights)}",
            )
        require(self.max_turns >= 1, "environment.max_turns", self.max_turns, "at least 1")
        require(self.turn_tokens >= 0, "environment.turn_tokens", self.turn_tokens, "at least 0")
        require(self.max_tokens >= 2, "environment.max_tokens", self.max_tokens, "at least 2")
        require(self.episode_timeout_s > 0, "environment.episode_timeout_s", self.episode_timeout_s, "more than 0")
        require(
            0 <= self.endpoint_port < 65536, "environment.endpoint_port", self.endpoint_port, "a port is 0 to 65535"
        )
        require(self.score_processes >= 1, "environment.score_processes", self.score_processes, "at least 1")
        require(self.score_timeout_s > 0, "environment.score_timeout_s", self.score_timeout_s, "more than 0")
        require(self.processes >= 0, "environment.processes", self.processes, "at least 0")
        require(self.process_leak_bytes > 0, "environment.process_leak_bytes", self.process_leak_bytes, "more than 0")
        require(self.call_timeout_s > 0, "environment.call_timeout_s", self.call_timeout_s, "more than 0")
        require(self.start_timeout_s > 0, "environment.start_timeout_s", self.start_timeout_s, "more than 0")
        takes = self.name.startswith(("gymnasium:", "verifiers:"))
        need = f"{self.name} takes none; gymnasium:<id> and verifiers:<id> do"
        require(takes or not self.arguments, "environment.arguments", self.arguments, need)
        need = "at least 1: verifiers environments take over the signals of their process"
        own = not self.name.startswith("verifiers:") or self.processes >= 1
        require(own, "environment.processes", self.processes, need)
        asked = self.name != "arithmetic" and not self.name.startswith(("agent:", "verifiers:"))
        need = f"empty: {self.name} puts its questions itself, and would not see it"
        for field in ("opening", "prompt_variants"):
            require(asked or not getattr(self, field), f"environment.{field}", getattr(self, field), need)
        if self.turn_delay_s:
            try:
                parse(self.turn_delay_s)
            except ValueError as error:
                raise ValueError(f"--config.environment.turn_delay_s={error}") from None


AGGREGATES = ("min", "mean", "last")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessRewardConfig:
    """A model that scores the steps of an episode; what it says takes the place of the environment's step part."""

    url: str = setting("", "endpoint that scores steps; empty: none. Needs the extra process")
    model: str = setting("", "Hugging Face directory of a model that scores them on the actor host; empty: none")
    step_end: str = setting("", "text that ends a step within a turn of the policy, as a line break; empty: none does")
    aggregate: str = setting("min", "an episode's step part from the scores of its steps: min, mean or last")
    all_fail: bool = setting(False, "count the step part also in groups without any success")
    key_variable: str = setting("", "environment variable that holds the endpoint's key; empty: none is sent")
    timeout_s: float = setting(10.0, "longest one request to the endpoint, waiting for a connection left out, in s")
    max_attempts: int = setting(3, "requests for one episode, while the endpoint fails or does not answer")
    max_connections: int = setting(32, "connections of an actor to the endpoint")
    tokenizer: str = setting("", "of the model on the host: byte, or a directory; empty: the model's own")
    good: str = setting("+", "its token for a step that is right")
    bad: str = setting("-", "its token for a step that is wrong")
    step_tag: str = setting("", "text that the model expects behind each step; empty: none")
    max_tokens: int = setting(2048, "longest episode that it scores, in its tokens; longer ones fail")
    batch_tokens: int = setting(4096, "tokens that it scores at a time, about")

    def __post_init__(self) -> None:
        name = "reward.process"
        require(not (self.url and self.model), f"{name}.url", self.url, f"or {name}.model, not both")
        require(self.aggregate in AGGREGATES, f"{name}.aggregate", self.aggregate, f"use {', '.join(AGGREGATES)}")
        require(self.timeout_s > 0, f"{name}.timeout_s", self.timeout_s, "more than 0")
        for field in ("max_attempts", "max_connections", "max_tokens", "batch_tokens"):
            require(getattr(self, field) >= 1, f"{name}.{field}", getattr(self, field), "at least 1")
        require(self.good != self.bad, f"{name}.good", self.good, f"another token than {name}.bad")
        if self.url:
            self._check_url()

    def _check_url(self) -> None:
        name, url = "reward.process.url", urllib.parse.urlsplit(self.url)
        require(url.scheme in ("http", "https") and bool(url.hostname), name, self.url, "use http://… or https://…")
        require("@" not in url.netloc, name, "…@…", "name the key's variable in reward.process.key_variable")
        near = url.scheme == "https" or url.hostname in ("localhost", "127.0.0.1", "::1")
        require(near or not self.key_variable, name, self.url, "https, or the key could be read on the way")

    @property
    def enabled(self) -> bool:
        """Whether there is a process reward model."""
        return bool(self.url or self.model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Weights of the reward parts; each part is in [0, 1] per episode."""

    final: float = setting(1.0, "weight of the right final answer")
    step: float = setting(0.4, "weight of right intermediate steps, as the environment or a process reward model says")
    format: float = setting(0.1, "weight of a well-formed episode")
    tool: float = setting(0.1, "weight of well-formed tool calls")
    shuffle: bool = setting(False, "control experiment: permute rewards within each batch; nothing should be learnt")
    process: ProcessRewardConfig = branch(ProcessRewardConfig)

    def __post_init__(self) -> None:
        require(self.final >= 0.6, "reward.final", self.final, "at least 0.6, or the parts outweigh the answer")
        for name in ("step", "format", "tool"):
            require(getattr(self, name) >= 0, f"reward.{name}", getattr(self, name), "at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolsConfig:
    """Tools that a policy may call in environments that speak text, and what they may take."""

    names: tuple[str, ...] = setting((), "tools offered: calculator, python; empty for none")
    mcp: tuple[str, ...] = setting(
        (), "MCP servers whose tools are offered too: URLs, or command lines that start one; needs the extra mcp"
    )
    timeout_s: float = setting(10.0, "longest one call may take, in seconds")
    max_calls: int = setting(16, "calls of one turn that are made; further ones are answered by an error")
    max_malformed: int = setting(3, "malformed calls that are answered; the next one ends the episode")
    max_result_characters: int = setting(4000, "longest answer of a call; the middle of a longer one is left out")
    sandbox: str = setting(
        "bubblewrap", "where model-written code runs: bubblewrap, or process, which shares the host's files and network"
    )
    sandbox_wall_s: float = setting(5.0, "longest run of one piece of code, in seconds")
    sandbox_memory_bytes: int = setting(256 * 2**20, "address space of each process of it, in bytes")
    sandbox_processes: int = setting(8, "processes of it at one time")

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, "tools.timeout_s", self.timeout_s, "more than 0")
        require(self.max_calls >= 1, "tools.max_calls", self.max_calls, "at least 1")
        require(self.max_malformed >= 0, "tools.max_malformed", self.max_malformed, "at least 0")
        require(
            self.max_result_characters >= 2, "tools.max_result_characters", self.max_result_characters, "at least 2"
        )
        require(self.sandbox in ("bubblewrap", "process"), "tools.sandbox", self.sandbox, "use bubblewrap or process")
        require(self.sandbox_wall_s > 0, "tools.sandbox_wall_s", self.sandbox_wall_s, "more than 0")
        require(
            self.sandbox_memory_bytes >= 64 * 2**20,
            "tools.sandbox_memory_bytes",
            self.sandbox_memory_bytes,
            f"at least {64 * 2**20}, which Python itself needs",
        )
        require(self.sandbox_processes >= 1, "tools.sandbox_processes", self.sandbox_processes, "at least 1")
