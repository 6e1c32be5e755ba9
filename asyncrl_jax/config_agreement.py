"""What settings of different parts must agree on.

Each check raises ValueError with the setting, its value and a way out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asyncrl_jax.config_leaf import COLDEST_HOTTEST, require

if TYPE_CHECKING:
    from asyncrl_jax.config import Config


def check_lag(config: Config) -> None:
    """The bound on lag, and whatever would break it."""
    lag = config.effective_lag
    require(
        config.weights.keep_versions > lag.token_updates // config.weights.publish_every_updates + 1,
        "weights.keep_versions",
        config.weights.keep_versions,
        f"must exceed the lag bound of {lag.token_updates} updates",
    )
    require(
        config.weights.publish_every_updates <= lag.actor_updates + 1,
        "weights.publish_every_updates",
        config.weights.publish_every_updates,
        f"at most A + 1 = {lag.actor_updates + 1} in mode {config.mode}, or actors could never be fresh enough",
    )
    require(
        config.mode == "async" or lag.semi_async_batches % config.weights.publish_every_updates == 0,
        "weights.publish_every_updates",
        config.weights.publish_every_updates,
        f"must divide the {lag.semi_async_batches} batches that mode {config.mode} releases together",
    )
    require(
        config.learner.replay_ratio <= lag.token_updates - lag.actor_updates + 1,
        "learner.replay_ratio",
        config.learner.replay_ratio,
        f"at most N - A + 1 = {lag.token_updates - lag.actor_updates + 1}: later uses would break the lag bound",
    )
    tuning = config.orchestrator.tuning
    least = tuning.min_token_updates if tuning.enabled else lag.token_updates
    require(
        lag.straggler_lead_updates == 0 or lag.straggler_lead_updates < least - lag.actor_updates,
        "lag.straggler_lead_updates",
        lag.straggler_lead_updates,
        f"less than N - A = {least - lag.actor_updates}, or groups would be cut short as soon as they start",
    )
    require(
        not tuning.enabled or config.mode == "async",
        "orchestrator.tuning.enabled",
        tuning.enabled,
        f"N belongs to the mode in mode {config.mode}; use --config.mode=async",
    )
    require(
        not tuning.enabled or tuning.min_token_updates >= lag.actor_updates + config.learner.replay_ratio - 1,
        "orchestrator.tuning.min_token_updates",
        tuning.min_token_updates,
        f"at least lag.actor_updates + replay_ratio - 1 = {lag.actor_updates + config.learner.replay_ratio - 1}",
    )
    require(
        config.learner.objective.correction != "none" or lag.token_updates == 0,
        "learner.objective.correction",
        "none",
        f"lag.token_updates = {lag.token_updates} in mode {config.mode} lets in tokens of older policies; state how "
        "they are corrected for",
    )
    require(
        config.learner.groups_per_update_max == 0 or config.pool.size_updates == 0,
        "learner.groups_per_update_max",
        config.learner.groups_per_update_max,
        f"0 with pool.size_updates = {config.pool.size_updates}: a pool that is kept full is no backlog",
    )
    require(
        config.pool.size_updates <= lag.token_updates - lag.actor_updates + 1,
        "pool.size_updates",
        config.pool.size_updates,
        f"at most N - A + 1 = {lag.token_updates - lag.actor_updates + 1}: what waits longer breaks the lag bound",
    )


def check_deterministic(config: Config) -> None:
    """Nothing that time or another machine decides, where a run is to be the same again."""
    require(
        not config.deterministic or config.mode == "sync",
        "deterministic",
        True,
        f"needs --config.mode=sync, not {config.mode}: elsewhere the order of arrival decides",
    )
    require(
        not config.deterministic or config.actor.num_hosts == 1,
        "deterministic",
        True,
        f"needs --config.actor.num_hosts=1, not {config.actor.num_hosts}: which host samples what is not fixed",
    )
    require(
        not config.deterministic or config.pool.refill_groups_per_update == 0,
        "deterministic",
        True,
        "needs --config.pool.refill_groups_per_update=0: which groups are replaced depends on who comes first",
    )
    require(
        not (config.deterministic and config.actor.exploration.share and config.actor.exploration.policy == "older"),
        "deterministic",
        True,
        "needs --config.actor.exploration.policy=uniform: which version was evaluated last depends on time",
    )
    require(
        not (config.deterministic and config.reward.process.url),
        "deterministic",
        True,
        "needs --config.reward.process.url=: what a server answers is not fixed by the seed",
    )
    require(
        not (config.deterministic and config.reward.process.model) or config.orchestrator.agreement.action == "alarm",
        "deterministic",
        True,
        "needs --config.orchestrator.agreement.action=alarm: when an actor hears of the others is not fixed",
    )


def check_exploration(config: Config) -> None:
    """Samples of other policies are weighed, and temperatures are what the engine takes."""
    exploration, objective = config.actor.exploration, config.learner.objective
    require(
        exploration.share == 0 or (objective.uses_weights and objective.weight_bound == "truncate"),
        "actor.exploration.share",
        exploration.share,
        "0, or state how samples of another policy are weighed: --config.learner.objective.correction=interpolated "
        "--config.learner.objective.weight_bound=truncate",
    )
    factor = math.exp(exploration.temperature_jitter)
    lowest, highest = config.actor.temperature / factor, config.actor.temperature * factor
    coldest, hottest = COLDEST_HOTTEST if config.actor.engine == "jax" else (0.01, 2)
    require(
        exploration.temperature_jitter == 0 or (coldest < lowest and highest < hottest),
        "actor.exploration.temperature_jitter",
        exploration.temperature_jitter,
        f"less: temperatures reach {lowest:.2g} and {highest:.2f}; engine {config.actor.engine} takes those from "
        f"{coldest:g} to {hottest:g}",
    )


def check_sizes(config: Config) -> None:
    """Trajectories fit into rows, and rows into the mesh."""
    require(
        config.learner.advantage.overlong_buffer_tokens <= config.environment.max_tokens,
        "learner.advantage.overlong_buffer_tokens",
        config.learner.advantage.overlong_buffer_tokens,
        f"at most environment.max_tokens = {config.environment.max_tokens}",
    )
    require(
        config.environment.max_tokens <= config.model.max_positions,
        "environment.max_tokens",
        config.environment.max_tokens,
        f"at most model.max_positions = {config.model.max_positions}",
    )
    require(
        config.learner.pack_tokens >= config.environment.max_tokens,
        "learner.pack_tokens",
        config.learner.pack_tokens,
        f"at least environment.max_tokens = {config.environment.max_tokens}, or a trajectory fits no row",
    )
    require(
        config.model.num_experts % config.mesh.expert == 0,
        "mesh.expert",
        config.mesh.expert,
        f"must divide model.num_experts = {config.model.num_experts}",
    )
    for name, rows in (
        ("learner.microbatch_rows", config.learner.microbatch_rows),
        ("warm_start.batch_rows", config.warm_start.batch_rows),
    ):
        shards = config.mesh.batch_shards
        require(rows % shards == 0, name, rows, f"must be a multiple of mesh.data × mesh.fsdp × mesh.expert = {shards}")
