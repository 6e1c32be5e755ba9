"""Settings of what lies between the stream and the step: the pool, the archive, and where metrics go."""

from __future__ import annotations

import dataclasses

from asyncrl_jax.config_leaf import require, setting

WRITERS = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """Which pooled groups an update trains on."""

    draw: str = setting("fifo", "fifo (earliest deadline first) or strata (by bucket, outcome, length and priority)")
    size_updates: int = setting(
        0, "updates' worth of uses that the pool is to hold, at most N - A + 1; 0: what just-in-time admission brings"
    )
    random_share: float = setting(0.25, "strata: share of a draw that is uniform; the rest follows priority")
    freshness_half_life_updates: float = setting(
        8.0, "strata: lag at which a group's priority has halved, in updates; 0: age does not matter"
    )
    max_draw_weight: float = setting(2.0, "strata: cap of the weight that corrects for the probability of a draw")
    refill_groups_per_update: int = setting(
        0, "zero-variance groups left out and replaced before one update, at most; 0 trains on them as they come"
    )

    def __post_init__(self) -> None:
        require(self.draw in ("fifo", "strata"), "pool.draw", self.draw, "use fifo or strata")
        require(self.size_updates >= 0, "pool.size_updates", self.size_updates, "at least 0")
        require(0 < self.random_share <= 1, "pool.random_share", self.random_share, "above 0, at most 1")
        require(
            self.freshness_half_life_updates >= 0,
            "pool.freshness_half_life_updates",
            self.freshness_half_life_updates,
            "at least 0",
        )
        require(self.max_draw_weight >= 1, "pool.max_draw_weight", self.max_draw_weight, "at least 1")
        require(
            self.refill_groups_per_update >= 0,
            "pool.refill_groups_per_update",
            self.refill_groups_per_update,
            "at least 0",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchiveConfig:
    """How much of the trained groups is kept. What a checkpoint may need again is kept in any case."""

    keep_updates: int = setting(0, "newest updates whose groups stay in the archive; 0 keeps all")
    keep_bytes: int = setting(0, "size of archived groups above which the oldest go, in bytes; 0 keeps all")

    def __post_init__(self) -> None:
        require(self.keep_updates >= 0, "archive.keep_updates", self.keep_updates, "at least 0")
        require(self.keep_bytes >= 0, "archive.keep_bytes", self.keep_bytes, "at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """Where metrics go besides `metrics/<role>.jsonl`."""

    writers: tuple[str, ...] = setting(("tensorboard",), "any of tensorboard, wandb, mlflow, trackio")
    project: str = setting("asyncrl", "name under which wandb, mlflow and trackio file the run")

    def __post_init__(self) -> None:
        for name in self.writers:
            require(name in WRITERS, "observe.writers", name, f"use {', '.join(WRITERS)}")
        require(len(set(self.writers)) == len(self.writers), "observe.writers", self.writers, "name each one once")
        require(self.project != "", "observe.project", self.project, "a name")
