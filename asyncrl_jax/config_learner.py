"""Settings of the learner: batch, objective, optimizer, checkpoints.

What makes no sense together is refused here, by name, before anything starts.
"""

from __future__ import annotations

import dataclasses

from asyncrl_jax.config_distill import DistillConfig
from asyncrl_jax.config_leaf import branch, require, setting


def _one_of(value: str, name: str, choices: tuple[str, ...]) -> None:
    require(value in choices, name, value, f"use one of {', '.join(choices)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    estimator: str = setting(
        "grpo",
        "grpo (reward − group mean, ÷ deviation), rloo (− mean of the others), reinforce_pp (reward, whitened over the "
        "batch) or gae (with a critic, PPO)",
    )
    std: str = setting("population", "deviation that grpo divides by: population, sample or none (Dr. GRPO)")
    eps: float = setting(1e-6, "added to the group's reward deviation")
    whiten: bool = setting(False, "give the step's advantages mean 0 and variance 1 over its tokens")
    turn_discount: float = setting(1.0, "factor on the advantage for every turn between a turn and the last one")
    step_credit: float = setting(
        0.0, "factor on what each step's tokens get for the scores of a process reward model, beside the trajectory's"
    )
    discount: float = setting(1.0, "γ of gae, per sampled token")
    decay: float = setting(0.95, "λ of gae")
    normalise_rewards: bool = setting(False, "give the rewards of a batch mean 0 and deviation 1 first")
    overlong_buffer_tokens: int = setting(
        0, "tokens before environment.max_tokens over which a penalty of up to 1 sets in (DAPO); 0 is none"
    )
    truncated: str = setting(
        "train", "trajectories cut off by the token budget: train, or mask (out of loss, baseline and statistics)"
    )

    def __post_init__(self) -> None:
        _one_of(self.estimator, "learner.advantage.estimator", ("grpo", "rloo", "reinforce_pp", "gae"))
        _one_of(self.std, "learner.advantage.std", ("population", "sample", "none"))
        _one_of(self.truncated, "learner.advantage.truncated", ("train", "mask"))
        require(
            self.std == "population" or self.estimator == "grpo",
            "learner.advantage.std",
            self.std,
            f"only learner.advantage.estimator = grpo divides by it, not {self.estimator}",
        )
        require(self.eps >= 0, "learner.advantage.eps", self.eps, "at least 0")
        for name in ("turn_discount", "discount", "decay"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"learner.advantage.{name}", value, "between 0 and 1")
        require(
            self.turn_discount == 1 or self.estimator != "gae",
            "learner.advantage.turn_discount",
            self.turn_discount,
            "1 with learner.advantage.estimator = gae, whose critic gives credit within the trajectory",
        )
        require(self.step_credit >= 0, "learner.advantage.step_credit", self.step_credit, "at least 0")
        require(
            self.step_credit == 0 or self.estimator != "gae",
            "learner.advantage.step_credit",
            self.step_credit,
            "0 with learner.advantage.estimator = gae, whose critic gives credit within the trajectory",
        )
        require(
            self.overlong_buffer_tokens >= 0,
            "learner.advantage.overlong_buffer_tokens",
            self.overlong_buffer_tokens,
            "at least 0",
        )
        require(
            self.overlong_buffer_tokens == 0 or self.truncated == "train",
            "learner.advantage.overlong_buffer_tokens",
            self.overlong_buffer_tokens,
            "0 with learner.advantage.truncated = mask: what is left out is not punished too",
        )


LOSSES = ("ppo", "gspo", "cispo", "reinforce")
CORRECTIONS = ("ratio", "decoupled", "interpolated", "importance", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised besides the KL, and how tokens of older policies are corrected for."""

    loss: str = setting("ppo", "ppo (clipped), gspo (one ratio a sequence), cispo or reinforce")
    clip_range: float = setting(0.2, "the ratio is held above 1 - clip; 1 leaves small ratios alone")
    clip_range_high: float = setting(0.0, "and below 1 + clip_high; 0 is the same as clip_range")
    dual_clip: float = setting(0.0, "ppo: bound on the ratio of tokens with negative advantage, above 1; 0 is none")
    correction: str = setting(
        "ratio",
        "for tokens of older policies: ratio (the loss's own, to the behaviour policy), decoupled (ratio to an average "
        "of past weights × its importance weight), interpolated (the same to a guess without a forward pass), "
        "importance (reinforce: weight target ÷ behaviour) or none (N = 0 alone)",
    )
    behaviour_logprobs: str = setting("sampler", "sampler (sent with each token) or absent (correction none alone)")
    proximal_decay: float = setting(0.8, "decoupled: decay per update of the average of past weights")
    weight_level: str = setting(
        "token", "importance weights per token, per sequence, or its geometric mean (geometric)"
    )
    weight_bound: str = setting("none", "of importance weights: none, truncate (at the cap) or mask (0 outside)")
    weight_floor: float = setting(0.0, "smallest importance weight that mask keeps")
    weight_cap: float = setting(2.0, "largest importance weight that truncate and mask keep")
    coefficient: float = setting(1.0, "weight of the policy loss; 0 leaves learner.distill and the KL alone")
    aggregation: str = setting(
        "token_mean", "token_mean, sequence_mean, or constant (sum ÷ sequences ÷ environment.max_tokens)"
    )
    entropy_coefficient: float = setting(0.0, "weight of the entropy bonus")

    def __post_init__(self) -> None:
        _one_of(self.loss, "learner.objective.loss", LOSSES)
        _one_of(self.correction, "learner.objective.correction", CORRECTIONS)
        _one_of(self.behaviour_logprobs, "learner.objective.behaviour_logprobs", ("sampler", "absent"))
        _one_of(self.weight_level, "learner.objective.weight_level", ("token", "sequence", "geometric"))
        _one_of(self.weight_bound, "learner.objective.weight_bound", ("none", "truncate", "mask"))
        _one_of(self.aggregation, "learner.objective.aggregation", ("token_mean", "sequence_mean", "constant"))
        require(0 < self.clip_range <= 1, "learner.objective.clip_range", self.clip_range, "above 0 and at most 1")
        require(self.clip_range_high >= 0, "learner.objective.clip_range_high", self.clip_range_high, "at least 0")
        require(
            self.dual_clip == 0 or (self.dual_clip > 1 and self.loss == "ppo"),
            "learner.objective.dual_clip",
            self.dual_clip,
            "0, or above 1 with learner.objective.loss = ppo",
        )
        require(
            0 <= self.proximal_decay < 1, "learner.objective.proximal_decay", self.proximal_decay, "from 0 to below 1"
        )
        require(
            0 <= self.weight_floor < self.weight_cap,
            "learner.objective.weight_floor",
            self.weight_floor,
            f"at least 0 and below learner.objective.weight_cap = {self.weight_cap}",
        )
        require(self.coefficient >= 0, "learner.objective.coefficient", self.coefficient, "at least 0")
        require(
            self.entropy_coefficient >= 0,
            "learner.objective.entropy_coefficient",
            self.entropy_coefficient,
            "at least 0",
        )
        self._check_correction()

    def _check_correction(self) -> None:
        corrections = ("importance", "none") if self.loss == "reinforce" else tuple(set(CORRECTIONS) - {"importance"})
        require(
            self.correction in corrections,
            "learner.objective.correction",
            self.correction,
            f"learner.objective.loss = {self.loss} takes {', '.join(c for c in CORRECTIONS if c in corrections)}",
        )
        require(
            self.weight_bound == "none" or self.uses_weights,
            "learner.objective.weight_bound",
            self.weight_bound,
            f"learner.objective.correction = {self.correction} has no importance weights to bound",
        )
        require(
            self.weight_level == "token" or self.uses_weights,
            "learner.objective.weight_level",
            self.weight_level,
            f"learner.objective.correction = {self.correction} has no importance weights",
        )
        require(
            self.weight_floor == 0 or self.weight_bound == "mask",
            "learner.objective.weight_floor",
            self.weight_floor,
            "only learner.objective.weight_bound = mask has a floor",
        )
        require(
            self.behaviour_logprobs == "sampler" or self.correction == "none",
            "learner.objective.behaviour_logprobs",
            self.behaviour_logprobs,
            f"learner.objective.correction = {self.correction} needs those of the sampler",
        )

    @property
    def uses_weights(self) -> bool:
        """Whether the loss is multiplied by importance weights."""
        return self.correction in ("decoupled", "interpolated", "importance")

    @property
    def clip(self) -> tuple[float, float]:
        """(ε_low, ε_high)."""
        return self.clip_range, self.clip_range_high or self.clip_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The KL to a reference policy."""

    coefficient: float = setting(0.01, "weight of the KL to the reference; 0 computes no reference")
    estimator: str = setting("k3", "k1, k2 or k3, weighted so that the gradient is that of KL(policy ‖ reference)")
    placement: str = setting("loss", "loss, or reward (subtracted from the reward of each token, k1 alone)")
    target: float = setting(0.0, "KL per token, in nats, that the coefficient is adapted to; 0 leaves it fixed")
    adaptation_rate: float = setting(0.1, "change of the coefficient for an error of the target's size, as a share")
    reference: str = setting("fixed", "fixed (the weights of v0), periodic (copied every so often) or ema")
    reference_every_updates: int = setting(0, "periodic: optimizer updates between copies")
    reference_decay: float = setting(0.0, "ema: decay of the average of past weights, per update")
    lag_gain: float = setting(0.0, "the coefficient is multiplied by 1 + gain × mean lag of the batch, in updates")

    def __post_init__(self) -> None:
        _one_of(self.estimator, "learner.kl.estimator", ("k1", "k2", "k3"))
        _one_of(self.placement, "learner.kl.placement", ("loss", "reward"))
        _one_of(self.reference, "learner.kl.reference", ("fixed", "periodic", "ema"))
        for name in ("coefficient", "target", "adaptation_rate", "lag_gain"):
            require(getattr(self, name) >= 0, f"learner.kl.{name}", getattr(self, name), "at least 0")
        require(
            self.placement == "loss" or self.estimator == "k1",
            "learner.kl.estimator",
            self.estimator,
            "k1 with learner.kl.placement = reward: the others would have the gradient of something else",
        )
        for name, off in (("target", 0), ("reference", "fixed"), ("lag_gain", 0)):
            require(
                self.coefficient > 0 or getattr(self, name) == off,
                f"learner.kl.{name}",
                getattr(self, name),
                "needs learner.kl.coefficient above 0, or there is no KL",
            )
        require(
            (self.reference_every_updates > 0) == (self.reference == "periodic") and self.reference_every_updates >= 0,
            "learner.kl.reference_every_updates",
            self.reference_every_updates,
            f"above 0 with learner.kl.reference = periodic and 0 otherwise; it is {self.reference}",
        )
        require(
            (self.reference_decay > 0) == (self.reference == "ema") and 0 <= self.reference_decay < 1,
            "learner.kl.reference_decay",
            self.reference_decay,
            f"between 0 and 1 with learner.kl.reference = ema and 0 otherwise; it is {self.reference}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value head of `learner.advantage.estimator = gae`, on the policy's trunk."""

    coefficient: float = setting(0.5, "weight of the value loss")
    clip_range: float = setting(0.2, "a value may leave that of the slow critic by this much, in units of reward")
    slow_decay: float = setting(0.9, "decay per update of the slow critic, an average of past heads")

    def __post_init__(self) -> None:
        require(self.coefficient > 0, "learner.critic.coefficient", self.coefficient, "more than 0")
        require(self.clip_range > 0, "learner.critic.clip_range", self.clip_range, "more than 0")
        require(0 <= self.slow_decay < 1, "learner.critic.slow_decay", self.slow_decay, "from 0 to below 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    num_updates: int = setting(160, "optimizer updates in the run")
    groups_per_update: int = setting(16, "groups in one update")
    groups_per_update_max: int = setting(
        0, "groups in one update while there is a backlog; 0 is always groups_per_update"
    )
    group_size: int = setting(8, "trajectories in one group")
    replay_ratio: int = setting(1, "most updates that may train on one group")
    optimizer: str = setting("adamw", "adamw, adafactor or muon (matrices by Muon, the rest by Adam)")
    learning_rate: float = setting(6e-4, "learning rate; 0 trains nothing (a control experiment)")
    lr_warmup_updates: int = setting(5, "updates over which the learning rate rises linearly")
    lr_decay_updates: int = setting(160, "updates by which it has fallen linearly to a tenth; 0 keeps it constant")
    lr_lag_slowdown: float = setting(
        0.0, "the learning rate is divided by 1 + slowdown × mean lag of the batch, in updates"
    )
    weight_decay: float = setting(0.0, "decoupled weight decay of matrices")
    max_grad_norm: float = setting(1.0, "global gradient norm above which the gradient is scaled down")
    balance_coefficient: float = setting(0.02, "weight of the Switch load-balance loss (alpha)")
    pack_tokens: int = setting(128, "length of one packed row, in tokens; at least environment.max_tokens")
    microbatch_rows: int = setting(8, "packed rows in one microbatch")
    cpu_cores: int = setting(
        0, "cores of this machine that a local run keeps for the learner alone, all others for the rest; 0 shares all"
    )
    checkpoint_every_updates: int = setting(10, "optimizer updates between durable checkpoints (K)")
    keep_checkpoints: int = setting(2, "durable checkpoints kept")
    advantage: AdvantageConfig = branch(AdvantageConfig)
    objective: ObjectiveConfig = branch(ObjectiveConfig)
    kl: KLConfig = branch(KLConfig)
    critic: CriticConfig = branch(CriticConfig)
    distill: DistillConfig = branch(DistillConfig)

    def __post_init__(self) -> None:
        for name in (
            "num_updates",
            "groups_per_update",
            "group_size",
            "replay_ratio",
            "pack_tokens",
            "microbatch_rows",
            "checkpoint_every_updates",
            "keep_checkpoints",
        ):
            require(getattr(self, name) >= 1, f"learner.{name}", getattr(self, name), "at least 1")
        for name in (
            "learning_rate",
            "lr_warmup_updates",
            "lr_lag_slowdown",
            "weight_decay",
            "balance_coefficient",
            "cpu_cores",
        ):
            require(getattr(self, name) >= 0, f"learner.{name}", getattr(self, name), "at least 0")
        _one_of(self.optimizer, "learner.optimizer", ("adamw", "adafactor", "muon"))
        require(
            self.group_size >= 2 or self.advantage.estimator not in ("grpo", "rloo"),
            "learner.group_size",
            self.group_size,
            f"at least 2: learner.advantage.estimator = {self.advantage.estimator} compares members",
        )
        require(
            self.groups_per_update_max == 0 or self.groups_per_update_max >= self.groups_per_update,
            "learner.groups_per_update_max",
            self.groups_per_update_max,
            f"0, or at least learner.groups_per_update = {self.groups_per_update}",
        )
        require(
            self.lr_decay_updates == 0 or self.lr_decay_updates > self.lr_warmup_updates,
            "learner.lr_decay_updates",
            self.lr_decay_updates,
            f"0, or more than learner.lr_warmup_updates = {self.lr_warmup_updates}",
        )
        require(self.max_grad_norm > 0, "learner.max_grad_norm", self.max_grad_norm, "more than 0")
        require(
            self.objective.coefficient > 0 or bool(self.distill.teachers) or self.kl.coefficient > 0,
            "learner.objective.coefficient",
            self.objective.coefficient,
            "0 needs learner.distill.teachers, or there is nothing to learn",
        )

    @property
    def most_groups(self) -> int:
        """Most groups that one update may take."""
        return self.groups_per_update_max or self.groups_per_update
