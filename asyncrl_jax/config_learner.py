"""Settings of the learner: batch, objective, optimizer, checkpoints."""

from __future__ import annotations

import dataclasses

from asyncrl_jax.config_leaf import require, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    num_updates: int = setting(160, "optimizer updates in the run")
    groups_per_update: int = setting(16, "groups in one update")
    group_size: int = setting(8, "trajectories in one group")
    replay_ratio: int = setting(1, "most updates that may train on one group")
    learning_rate: float = setting(6e-4, "AdamW learning rate; 0 trains nothing (a control experiment)")
    lr_warmup_updates: int = setting(5, "updates over which the learning rate rises linearly")
    lr_decay_updates: int = setting(160, "updates by which it has fallen linearly to a tenth; 0 keeps it constant")
    weight_decay: float = setting(0.0, "AdamW weight decay")
    max_grad_norm: float = setting(1.0, "global gradient norm above which the gradient is scaled down")
    clip_range: float = setting(0.2, "PPO clip: the ratio is held in [1 - clip, 1 + clip]")
    kl_coefficient: float = setting(0.01, "weight of the KL to the frozen reference, the weights of v0")
    balance_coefficient: float = setting(0.02, "weight of the Switch load-balance loss (alpha)")
    advantage_eps: float = setting(1e-6, "added to the group's reward deviation")
    pack_tokens: int = setting(128, "length of one packed row, in tokens; at least environment.max_tokens")
    microbatch_rows: int = setting(8, "packed rows in one microbatch")
    checkpoint_every_updates: int = setting(10, "optimizer updates between durable checkpoints (K)")
    keep_checkpoints: int = setting(2, "durable checkpoints kept")

    def __post_init__(self) -> None:
        for name in (
            "num_updates",
            "groups_per_update",
            "replay_ratio",
            "pack_tokens",
            "microbatch_rows",
            "checkpoint_every_updates",
        ):
            require(getattr(self, name) >= 1, f"learner.{name}", getattr(self, name), "at least 1")
        require(
            self.group_size >= 2, "learner.group_size", self.group_size, "at least 2: the advantage compares members"
        )
        require(self.learning_rate >= 0, "learner.learning_rate", self.learning_rate, "at least 0")
        require(self.lr_warmup_updates >= 0, "learner.lr_warmup_updates", self.lr_warmup_updates, "at least 0")
        require(
            self.lr_decay_updates == 0 or self.lr_decay_updates > self.lr_warmup_updates,
            "learner.lr_decay_updates",
            self.lr_decay_updates,
            f"0, or more than learner.lr_warmup_updates = {self.lr_warmup_updates}",
        )
        require(0 < self.clip_range < 1, "learner.clip_range", self.clip_range, "between 0 and 1")
        require(self.kl_coefficient >= 0, "learner.kl_coefficient", self.kl_coefficient, "at least 0")
        require(self.balance_coefficient >= 0, "learner.balance_coefficient", self.balance_coefficient, "at least 0")
        require(self.max_grad_norm > 0, "learner.max_grad_norm", self.max_grad_norm, "more than 0")
        require(self.keep_checkpoints >= 1, "learner.keep_checkpoints", self.keep_checkpoints, "at least 1")
