"""Settings of the orchestrator's policies, one branch for each file in `orchestrator/policies/` that has any."""

from __future__ import annotations

import dataclasses

from asyncrl_jax.config_fleet import AutoscaleConfig, FleetConfig
from asyncrl_jax.config_leaf import branch, require, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatermarkConfig:
    """Back-pressure and speed-up, from what waits for the learner."""

    enabled: bool = setting(True, "scale what is in flight by the backlog; never past the lag bound")
    high_updates: float = setting(
        0.0,
        "backlog above which fewer tickets are issued while the learner is busy, in updates' worth of groups; 0: two "
        "thirds of what the bound on lag lets be outstanding, at least 2",
    )
    low_updates: float = setting(0.25, "backlog below which more are issued while the learner idles, in updates' worth")
    idle_share: float = setting(0.1, "share of its time that the learner idles, to count as starved")
    dwell_s: float = setting(5.0, "shortest time between two changes of the level, in s")
    dispatch_episodes_per_s: float = setting(
        0.0, "most episodes of one environment started in a second, as an outside service's quota; 0: no limit"
    )
    dispatch_burst_s: float = setting(2.0, "seconds' worth of that quota that may be used at once")

    def __post_init__(self) -> None:
        name = "orchestrator.watermark"
        require(self.high_updates >= 0, f"{name}.high_updates", self.high_updates, "at least 0")
        high = self.high_mark(1)  # the lowest that it may be
        require(
            0 <= self.low_updates < high,
            f"{name}.low_updates",
            self.low_updates,
            f"at least 0 and below {name}.high_updates, which is at least {high:g}",
        )
        require(0 <= self.idle_share <= 1, f"{name}.idle_share", self.idle_share, "between 0 and 1")
        require(self.dwell_s >= 0, f"{name}.dwell_s", self.dwell_s, "at least 0")
        require(
            self.dispatch_episodes_per_s >= 0,
            f"{name}.dispatch_episodes_per_s",
            self.dispatch_episodes_per_s,
            "at least 0; 0 for no limit",
        )
        require(self.dispatch_burst_s > 0, f"{name}.dispatch_burst_s", self.dispatch_burst_s, "more than 0")

    def high_mark(self, bound_updates: int) -> float:
        """The backlog that is too much where `bound_updates` updates' worth may be outstanding, in updates' worth."""
        return self.high_updates or max(2.0, 2 / 3 * bound_updates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """The lag bound N, tuned from what data of each lag is worth. Mode async only."""

    enabled: bool = setting(False, "let N move; off: N is lag.token_updates until `asyncrl set N=…` changes it")
    min_token_updates: int = setting(2, "least N; at least lag.actor_updates, in updates")
    max_token_updates: int = setting(8, "largest N ever in force, also by hand, in updates")
    window_updates: int = setting(5, "updates that one judgement looks back on")
    idle_high: float = setting(0.1, "share of its time the learner idles above which N may rise")
    ess_low: float = setting(0.7, "effective sample size ÷ tokens, at the oldest lags, below which N falls")
    ess_good: float = setting(0.85, "the same, above which N may rise; the gap to ess_low keeps N from swinging")
    kl_high: float = setting(0.05, "KL of trained to sampling policy at the oldest lags above which N falls, in nats")
    clip_high: float = setting(0.2, "share of clipped tokens above which N falls")
    runoff_kl: float = setting(0.15, "KL at any lag above which only fresh data is admitted until it is back, in nats")
    patience_windows: int = setting(4, "windows before an N that was bad is tried again; doubles each time")

    def __post_init__(self) -> None:
        name = "orchestrator.tuning"
        require(
            0 <= self.min_token_updates <= self.max_token_updates,
            f"{name}.min_token_updates",
            self.min_token_updates,
            f"between 0 and {name}.max_token_updates = {self.max_token_updates}",
        )
        require(self.window_updates >= 1, f"{name}.window_updates", self.window_updates, "at least 1")
        require(
            0 < self.ess_low < self.ess_good <= 1,
            f"{name}.ess_low",
            self.ess_low,
            f"above 0 and below {name}.ess_good = {self.ess_good}, at most 1",
        )
        require(0 < self.idle_high < 1, f"{name}.idle_high", self.idle_high, "between 0 and 1")
        require(
            0 < self.kl_high < self.runoff_kl,
            f"{name}.kl_high",
            self.kl_high,
            f"above 0 and below {name}.runoff_kl = {self.runoff_kl}",
        )
        require(0 < self.clip_high <= 1, f"{name}.clip_high", self.clip_high, "between 0 and 1")
        require(self.patience_windows >= 1, f"{name}.patience_windows", self.patience_windows, "at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Weights of the buckets (category × difficulty), from recent success."""

    adaptive: bool = setting(False, "weigh buckets by recent success; off: environment.level_weights alone")
    floor: float = setting(0.02, "least share of any open bucket")
    exploratory_share: float = setting(0.05, "share of tasks drawn evenly from all buckets, open or not")
    half_life_groups: float = setting(32.0, "groups after which an observation counts half")
    enter_success: float = setting(0.3, "success in a category's open levels at which the next harder one opens")
    stuck_success: float = setting(0.1, "success below which a bucket that taught nothing for a while is stuck")
    stuck_groups: int = setting(64, "groups without improvement before a bucket counts as stuck")
    stuck_boost: float = setting(2.0, "factor on the weight of a stuck bucket, for as many groups again")

    def __post_init__(self) -> None:
        name = "orchestrator.curriculum"
        require(0 <= self.floor < 0.5, f"{name}.floor", self.floor, "at least 0 and below 0.5")
        require(
            0 <= self.exploratory_share <= 0.5,
            f"{name}.exploratory_share",
            self.exploratory_share,
            "between 0 and 0.5",
        )
        require(self.half_life_groups > 0, f"{name}.half_life_groups", self.half_life_groups, "more than 0")
        require(0 <= self.enter_success < 1, f"{name}.enter_success", self.enter_success, "at least 0 and below 1")
        require(0 <= self.stuck_success < 1, f"{name}.stuck_success", self.stuck_success, "at least 0 and below 1")
        require(self.stuck_groups >= 1, f"{name}.stuck_groups", self.stuck_groups, "at least 1")
        require(self.stuck_boost >= 1, f"{name}.stuck_boost", self.stuck_boost, "at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BreakerConfig:
    """When an environment, tool, reward or actor is taken out, and how it comes back."""

    enabled: bool = setting(True, "open breakers; off: faults are counted and shown only")
    window_s: float = setting(60.0, "seconds that faults are counted over")
    same_signature: int = setting(8, "infrastructure faults of one signature in a window that open a breaker")
    fault_rate: float = setting(0.5, "share of faults in a window that opens a breaker")
    min_events: int = setting(8, "episodes in a window before the share counts")
    data_fault_rate: float = setting(0.9, "share of faults of the data (bad tasks, bad rewards) that opens a breaker")
    cooldown_s: float = setting(10.0, "seconds open before the first probe; doubles with every failed probe")
    max_cooldown_s: float = setting(300.0, "longest time between probes, in s")
    probes: int = setting(2, "probes that must succeed, without a fault between, before a breaker closes")
    slow_factor: float = setting(5.0, "times its usual time that an episode takes to count as slow")
    stall_s: float = setting(120.0, "seconds an actor with work may go without a token before it counts as dead")
    max_replacements: int = setting(3, "times one actor is replaced in an hour; then it is left out and an alarm stays")
    min_healthy_actors: int = setting(1, "actors that stay in service whatever their faults")

    def __post_init__(self) -> None:
        name = "orchestrator.breaker"
        for field in ("window_s", "cooldown_s", "stall_s"):
            require(getattr(self, field) > 0, f"{name}.{field}", getattr(self, field), "more than 0")
        for field in ("same_signature", "min_events", "probes"):
            require(getattr(self, field) >= 1, f"{name}.{field}", getattr(self, field), "at least 1")
        for field in ("fault_rate", "data_fault_rate"):
            require(0 < getattr(self, field) <= 1, f"{name}.{field}", getattr(self, field), "above 0, at most 1")
        require(
            self.max_cooldown_s >= self.cooldown_s,
            f"{name}.max_cooldown_s",
            self.max_cooldown_s,
            f"at least {name}.cooldown_s = {self.cooldown_s}",
        )
        require(self.slow_factor > 1, f"{name}.slow_factor", self.slow_factor, "more than 1")
        require(self.max_replacements >= 0, f"{name}.max_replacements", self.max_replacements, "at least 0")
        require(self.min_healthy_actors >= 0, f"{name}.min_healthy_actors", self.min_healthy_actors, "at least 0")


DRIFT_ACTIONS = ("alarm", "lower", "hold")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriftConfig:
    """When a bucket's rewards or episodes no longer look like themselves."""

    action: str = setting("alarm", "on drift: alarm, lower (its weight), or hold (for `asyncrl review`)")
    window_groups: int = setting(32, "groups of a bucket that make one observation")
    min_windows: int = setting(4, "observations that make a history")
    half_life_windows: float = setting(8.0, "observations after which the history has half forgotten one")
    z_score: float = setting(6.0, "deviations from the history that count as drift")
    min_change: float = setting(0.25, "least change that counts: of rewards and shares absolute, of lengths relative")
    lowered_weight: float = setting(0.25, "factor on the weight of a bucket that drifts, with action lower")
    collapse_entropy: float = setting(0.02, "nats a token below which a policy that still fails has collapsed")
    explore_temperature: float = setting(1.25, "factor on the temperature that answers a collapse")

    def __post_init__(self) -> None:
        name = "orchestrator.drift"
        require(self.action in DRIFT_ACTIONS, f"{name}.action", self.action, f"use one of {', '.join(DRIFT_ACTIONS)}")
        for field in ("window_groups", "min_windows"):
            require(getattr(self, field) >= 1, f"{name}.{field}", getattr(self, field), "at least 1")
        for field in ("half_life_windows", "z_score", "min_change"):
            require(getattr(self, field) > 0, f"{name}.{field}", getattr(self, field), "more than 0")
        require(0 <= self.lowered_weight <= 1, f"{name}.lowered_weight", self.lowered_weight, "between 0 and 1")
        require(self.collapse_entropy >= 0, f"{name}.collapse_entropy", self.collapse_entropy, "at least 0")
        require(self.explore_temperature >= 1, f"{name}.explore_temperature", self.explore_temperature, "at least 1")


AGREEMENT_ACTIONS = ("alarm", "hold_out", "hold")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgreementConfig:
    """When a process reward model disagrees with the final reward."""

    action: str = setting(
        "hold_out", "then: alarm, hold_out (its step part counts 0) or hold (the bucket, for `asyncrl review`)"
    )
    window_groups: int = setting(32, "groups with better and worse members before the first test")
    z_score: float = setting(4.0, "standard errors that a verdict takes")
    min_gap: float = setting(0.05, "least mean step part of better members above that of worse ones that is of use")

    def __post_init__(self) -> None:
        name, choices = "orchestrator.agreement", ", ".join(AGREEMENT_ACTIONS)
        require(self.action in AGREEMENT_ACTIONS, f"{name}.action", self.action, f"use one of {choices}")
        require(self.window_groups >= 8, f"{name}.window_groups", self.window_groups, "at least 8")
        require(self.z_score > 0, f"{name}.z_score", self.z_score, "more than 0")
        require(0 <= self.min_gap < 1, f"{name}.min_gap", self.min_gap, "at least 0 and below 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegressionConfig:
    """When held-out success falls beyond noise."""

    rollback: bool = setting(True, "roll back to the last good checkpoint; off: the fall is logged only")
    p_value: float = setting(0.001, "one-sided two-proportion z test; the fall and its confirmation must both be below")
    min_fall: float = setting(0.05, "least fall of held-out success that counts, whatever its significance")
    max_rollbacks: int = setting(3, "rollbacks without a new best in between; then the run is paused for a human")

    def __post_init__(self) -> None:
        name = "orchestrator.regression"
        require(0 < self.p_value < 0.5, f"{name}.p_value", self.p_value, "between 0 and 0.5")
        require(0 <= self.min_fall < 1, f"{name}.min_fall", self.min_fall, "at least 0 and below 1")
        require(self.max_rollbacks >= 1, f"{name}.max_rollbacks", self.max_rollbacks, "at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrchestratorConfig:
    num_instances: int = setting(1, "orchestrators that the local launcher starts; one leads, the others stand by")
    lease_s: float = setting(2.0, "seconds a leader may be silent before a standby takes over")
    policy_interval_s: float = setting(1.0, "seconds between looks at everything but admission")
    decisions_kept: int = setting(1000, "newest decisions kept in Redis; older ones are in <run_dir>/decisions/")
    watermark: WatermarkConfig = branch(WatermarkConfig)
    tuning: TuningConfig = branch(TuningConfig)
    curriculum: CurriculumConfig = branch(CurriculumConfig)
    breaker: BreakerConfig = branch(BreakerConfig)
    drift: DriftConfig = branch(DriftConfig)
    agreement: AgreementConfig = branch(AgreementConfig)
    regression: RegressionConfig = branch(RegressionConfig)
    autoscale: AutoscaleConfig = branch(AutoscaleConfig)
    fleet: FleetConfig = branch(FleetConfig)

    def __post_init__(self) -> None:
        require(self.num_instances >= 1, "orchestrator.num_instances", self.num_instances, "at least 1")
        require(self.lease_s > 0, "orchestrator.lease_s", self.lease_s, "more than 0")
        require(self.policy_interval_s > 0, "orchestrator.policy_interval_s", self.policy_interval_s, "more than 0")
        require(self.decisions_kept >= 1, "orchestrator.decisions_kept", self.decisions_kept, "at least 1")
