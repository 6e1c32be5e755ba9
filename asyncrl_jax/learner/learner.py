"""The parts of one learner, and the state they share: what an update, a version and a checkpoint do to it."""

from __future__ import annotations

import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl_jax.config import Config
from asyncrl_jax.observe.metrics import Metrics
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.transport.archive import TrainedBatch
from asyncrl_jax.transport.codec import Limits
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.groups import GroupReader
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.orders import Orders
from asyncrl_jax.transport.payloads import PayloadStore
from asyncrl_jax.transport.steering import Directives, Steering
from asyncrl_jax.types import LearnerState, Line, WeightVersion

from .advantages import group_advantages
from .checkpoint import Checkpoints
from .intake import Intake
from .lag_worth import LagWorth
from .packing import groups_for_update
from .pool import Drawn, Moment, Pool, PooledGroup, bucket_of
from .progress import Pace, lag_statistics
from .publisher import Publisher
from .settlement import Settlement, TrainedGroup
from .staleness import Staleness
from .trainer import Trainer
from .vitals import Vitals

log = logging.getLogger(__name__)


class Learner:
    """The parts of one learner and the state they share. `start_or_resume` fills it; `train` runs it."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        redis_password: str | None,
        stop: threading.Event,
        orders: Orders | None = None,
    ):
        """Args: orders: to the other processes of this learner, if it has any (`distributed.py`)."""
        self.config = config
        self.lag = config.effective_lag
        self.stop = stop
        redis = connect(config.redis, redis_password)
        keys = Keys(config.redis.namespace)
        self.control = Control(redis, keys)
        self.ledger = Ledger(redis, keys)
        payloads = PayloadStore(config.redis.payload_directory or run_dir / "payloads")
        self.reader = GroupReader(redis, keys, "learner-0", config.redis, payloads)
        self.weights_dir = config.weights.directory or str(run_dir / "weights")
        self.run_dir = run_dir
        self.publisher = Publisher(self.weights_dir, config.weights, self.control)
        self.checkpoints = Checkpoints(run_dir / "checkpoints", config.learner.keep_checkpoints)
        self.settlement = Settlement(run_dir / "archive", self.reader, self.ledger, self.control, config.archive)
        self.metrics = Metrics(run_dir, "learner", config.observe)
        self.trainer = Trainer(config, orders)
        self.pool = Pool(config.learner.replay_ratio, config.pool)
        self.staleness = Staleness(
            {}, {0: Line(0)}, config.most_token_updates, mask_over_age=self.lag.straggler_policy == "mask"
        )
        self.intake = Intake(
            self.reader,
            Limits.from_config(config),
            self.pool,
            self.knows_version,
            refill_groups=config.pool.refill_groups_per_update,
            advantage_eps=config.learner.advantage.eps,
            explores=config.actor.exploration.share > 0,
        )
        self.progress = self.intake.progress
        self.line = 0
        self.update = 0
        self.phase = "warm_start"
        self.epoch = 0
        self.version: WeightVersion | None = None  # newest announced
        self.uses: dict[str, list[int]] = {}  # updates that trained each ticket that is not settled
        self.batches: list[TrainedBatch] = []  # of the updates that no durable checkpoint holds
        self.finished: list[TrainedGroup] = []  # no use left, not in a started checkpoint
        self.saving: tuple[int, list[TrainedGroup]] | None = None  # a checkpoint being written, and what it finishes
        self.forgotten: set[str] = set()  # tickets that the learner will settle and Redis lost with its data
        self.undone: set[str] = set()  # tickets trained on an abandoned line and not on this one
        self.settled: set[str] = set()  # tickets settled by a checkpoint that is no more, trained on once again
        self.cut: set[str] = set()  # tickets whose late members were given up
        self.starved_s = 0.0  # the last update's wait for a pool with enough groups
        self.publish_wait_s = 0.0  # of this update, for the version before
        self.lag_worth = LagWorth()
        self.pace = Pace()
        self.steering = Steering(redis, keys)
        self.directives = Directives()  # as of the last look
        self.directives_at = -math.inf  # when that was
        self.imbalanced = False  # whether some layer's expert load was above the alarm at the last update
        self.vitals = Vitals(self.control, config.actor, self._heartbeat)

    def close(self) -> None:
        self.vitals.close()
        self.publisher.close()
        self.checkpoints.close()
        self.metrics.close()

    # -- update ------------------------------------------------------------------------------------------------------

    def draw(self) -> list[Drawn]:
        """Takes the groups of the next update from the pool, which holds enough of them."""
        moment = Moment(
            bucket_weights=self._bucket_weights,
            lag=lambda p: max(self.staleness.version_lag(number, self.line, self.update) for number in p.versions),
            last_chance=lambda p: self.staleness.is_unusable(
                p.versions, self.line, self.update + 1, self.staleness.bound(p.group.ticket)
            ),
            seed=derive_seed(self.config.seed, "draw", self.line, self.update),
        )
        return self.pool.draw(groups_for_update(len(self.pool), self.config.learner), moment)

    def _bucket_weights(self) -> dict[str, float]:
        """What the orchestrator asks for, by bucket; the config's weights until it has asked."""
        asked = self.control.heartbeat("orchestrator", "0").get("weights")
        environment = self.config.environment
        return (
            asked
            if isinstance(asked, dict) and asked
            else {
                bucket_of(environment.name, level): weight for level, weight in enumerate(environment.level_weights, 1)
            }
        )

    def log_redo(self, batch: list[Drawn], seed: int) -> None:
        groups = [[d.pooled.ticket_id, d.pooled.entry.partition, d.pooled.entry.entry_id] for d in batch]
        weights = [drawn.weight for drawn in batch]
        payload = {"line": self.line, "seed": seed, "groups": groups, "weights": weights}
        payload["lr_scale"] = self.directives.learning_rate_scale
        self.control.append_redo(self.update + 1, payload)

    def apply(self, drawn: list[Drawn], seed: int, lr_scale: float = 1.0) -> dict[str, float]:
        """One optimizer update; a function of the weights and the arguments alone.

        Args:
          drawn: the groups in order, each with its weight.
          seed: of everything random in the update.
          lr_scale: factor on the learning rate.
        """
        batch, weights = [d.pooled for d in drawn], [d.weight for d in drawn]
        lags = [
            [self.staleness.token_lags(t, self.line, self.update) for t in pooled.group.trajectories]
            for pooled in batch
        ]
        masks = [
            [
                self.staleness.trainable_mask(t, lag, self.staleness.bound(pooled.group.ticket))
                for t, lag in zip(pooled.group.trajectories, of_group, strict=True)
            ]
            for pooled, of_group in zip(batch, lags, strict=True)
        ]
        self.trainer.lr_scale = lr_scale
        values = self.trainer.update([pooled.group for pooled in batch], lags, masks, seed, self.update, weights)
        self.lag_worth.add(values)
        values |= self._count(batch, lags, masks, values) | {"draw_weight_max": max(weights)}
        tickets = tuple(pooled.ticket_id for pooled in batch)
        self.batches.append(TrainedBatch(self.line, self.update, seed, tickets, tuple(weights), lr_scale))
        for pooled in batch:
            if pooled.ticket_id in self.settled:
                continue
            self.uses.setdefault(pooled.ticket_id, []).append(self.update)
            self.undone.discard(pooled.ticket_id)
            if pooled.ticket_id not in self.pool:
                self.finish_group(pooled)
        self.update += 1
        return values

    def finish_group(self, pooled: PooledGroup) -> None:
        """The next checkpoint settles it."""
        self.finished.append(TrainedGroup(pooled, tuple(self.uses[pooled.ticket_id]), time.time()))

    def _count(self, batch: list[PooledGroup], lags: Any, masks: Any, values: dict[str, float]) -> dict[str, float]:
        """Adds the update to the exact totals; returns its own lag and reward statistics."""
        progress = self.progress
        by_group = []
        for pooled, of_group, masks_of_group in zip(batch, lags, masks, strict=True):
            own = [np.zeros(0, np.int32)]
            for t, lag, mask in zip(pooled.group.trajectories, of_group, masks_of_group, strict=True):
                if t.exploration is None:
                    own.append(lag[mask.astype(bool)])
                else:
                    progress.count_explored(int(mask.sum()))
            by_group.append(np.concatenate(own))
        for pooled, lags_T in zip(batch, by_group, strict=True):
            ticket = pooled.group.ticket
            progress.count_lags(lags_T, self.staleness.bound(ticket))
            progress.groups_by_bucket[f"{ticket.task.environment}/{ticket.task.level}"] += 1
        trained_lags = np.concatenate(by_group)
        trajectories = [t for pooled in batch for t in pooled.group.trajectories if t.exploration is None]
        progress.groups_trained += len(batch)
        progress.skipped_updates += int(values["skipped"])
        progress.mixed_version_trajectories += sum(
            np.unique(t.policy_versions[t.loss_mask.astype(bool)]).size > 1 for t in trajectories
        )
        progress.zero_variance_groups += sum(pooled.traits.zero_variance for pooled in batch)
        progress.tokens_effective += sum(self._effective_tokens(p, m) for p, m in zip(batch, masks, strict=True))
        return {
            "expert_load_ratio": max(
                (value for name, value in values.items() if "load_max_over_min" in name), default=1.0
            ),
            "lag_mean": float(trained_lags.mean()) if trained_lags.size else 0.0,
            "lag_p95": float(np.percentile(trained_lags, 95)) if trained_lags.size else 0.0,
            "lag_max": float(trained_lags.max()) if trained_lags.size else 0.0,
            "tokens": float(sum(int(mask.sum()) for of_group in masks for mask in of_group)),
            "reward": float(np.mean([t.reward for t in trajectories])) if trajectories else 0.0,
            "success_train": float(np.mean([t.success for t in trajectories])) if trajectories else 0.0,
            "zero_variance_share": float(np.mean([pooled.traits.zero_variance for pooled in batch])),
        }

    def _effective_tokens(self, pooled: PooledGroup, masks: list[np.ndarray]) -> int:
        """Tokens trained on whose advantage is not 0."""
        rewards = np.asarray([t.reward for t in pooled.group.trajectories], np.float32)
        advantages = group_advantages(rewards, self.config.learner.advantage.eps)
        return sum(int(mask.sum()) for mask, advantage in zip(masks, advantages, strict=True) if advantage != 0)

    # -- publish -----------------------------------------------------------------------------------------------------

    def publish_if_due(self) -> None:
        if self.update % self.config.weights.publish_every_updates == 0:
            self.publish()

    def publish(self, wait: bool = False) -> None:
        """Publishes the current weights unless they already are the newest version of this line."""
        started = time.monotonic()
        self.hear_publisher(wait=True)
        self.publish_wait_s = time.monotonic() - started
        newest = self.version
        if newest is None or (newest.line, newest.update) != (self.line, self.update):
            self.publisher.start(
                self.trainer.host_weights(),
                number=max(self.staleness.versions, default=-1) + 1,
                parent=newest.number if newest else None,
                line=self.line,
                update=self.update,
                canary=self.trainer.canary(),
            )
        if wait:
            self.hear_publisher(wait=True)

    def hear_publisher(self, wait: bool = False) -> None:
        """Takes up a finished publication, or raises what ended it: nobody samples for versions that never come."""
        if wait or self.publisher.done():
            self._heard(self.publisher.wait())

    def _heard(self, version: WeightVersion | None) -> None:
        if version is not None:
            self.staleness.versions[version.number] = version
            self.version = version

    def knows_version(self, number: int) -> bool:
        """Whether `number` was announced. The publisher's thread announces, so a miss asks Redis once more."""
        if number not in self.staleness.versions:
            self.staleness.versions.update(self.control.versions())
        return number in self.staleness.versions

    def announce_state(self) -> None:
        """Tells the others where the learner is; called after every change of update, line, phase or uses left."""
        # Forgotten tickets are in no count of this Redis, so they must not be subtracted from one.
        finished = [*self.finished, *(self.saving[1] if self.saving else [])]
        unsettled = [t for t in finished if t.pooled.ticket_id not in self.forgotten]
        made = sum(len(updates) for ticket_id, updates in self.uses.items() if ticket_id not in self.forgotten)
        forfeited = sum(self.config.learner.replay_ratio - len(trained.updates) for trained in unsettled)
        self.control.set_learner(
            LearnerState(
                line=self.line,
                update=self.update,
                version=self.version.number if self.version else -1,
                phase=self.phase,
                unsettled_tickets=len(unsettled),
                unsettled_uses=made + forfeited,
            )
        )

    # -- checkpoint --------------------------------------------------------------------------------------------------

    def checkpoint_if_due(self) -> None:
        if self.update % self.config.learner.checkpoint_every_updates == 0:
            self.save_checkpoint()

    def save_checkpoint(self) -> None:
        """Starts a checkpoint of the current state; first waits for the one before and settles it."""
        self.wait_durable()
        if self.checkpoints.latest() == self.update:
            return
        vouched = {request.update for request in self.control.pending_evaluations()}
        if self.directives.keep_update is not None:
            vouched.add(self.directives.keep_update)
        self.checkpoints.protected = frozenset(vouched)
        finished, self.finished = self.finished, []
        self.checkpoints.save(self.update, self.trainer.host_state(), self._checkpoint_meta(finished))
        self.saving = (self.update, finished)

    def _checkpoint_meta(self, finished: list[TrainedGroup]) -> dict[str, Any]:
        return {
            "line": self.line,
            "update": self.update,
            "epoch": self.epoch,
            "lines": [[line.line, line.parent, line.fork_update] for line in self.staleness.lines.values()],
            "versions": [
                [v.number, v.parent, v.line, v.update, v.manifest_digest, v.announced_at]
                for _, v in sorted(self.staleness.versions.items())
            ],
            "uses": self.uses,
            "finished": [trained.pooled.ticket_id for trained in finished],
            "counted": sorted({pooled.ticket_id for pooled in self.pool.all()} | self.uses.keys()),
            "saved_at": time.time(),
            "undone": sorted(self.undone),
            "progress": self.progress.to_json(),
        }

    def settle_if_durable(self) -> None:
        durable = self.checkpoints.durable()
        if self.saving is None or durable is None or durable < self.saving[0]:
            return
        (update, finished), self.saving = self.saving, None
        for trained in finished:
            self.uses.pop(trained.pooled.ticket_id, None)
        self.intake.forget([trained.pooled.ticket_id for trained in finished])
        self.announce_state()  # first, so that what is outstanding is never taken for less than it is
        batches = [batch for batch in self.batches if batch.update < update]
        self.batches = self.batches[len(batches) :]
        self.settlement.settle(line=self.line, update=update, groups=finished, batches=batches)
        self.settlement.retain(update=update, oldest_checkpoint=min(self.checkpoints.steps()))

    def archive_held(self) -> None:
        """Puts beside the archive what was trained on and keeps uses that no update will make: a replay needs it."""
        used = [TrainedGroup(p, tuple(self.uses[p.ticket_id]), time.time()) for p in self.pool.all() if p.uses]
        self.settlement.hold(line=self.line, update=self.update, groups=used)

    def wait_durable(self) -> None:
        if self.saving is not None:
            self.checkpoints.wait()
            self.settle_if_durable()

    # -- what others see ---------------------------------------------------------------------------------------------

    def _watch_balance(self, values: dict[str, Any]) -> None:
        """Says so when the load of experts begins to be uneven, and when it is even again."""
        imbalanced, alarm = values["imbalanced_layers"] > 0, self.config.experts.load_alarm
        if imbalanced and not self.imbalanced:
            ratio = values["expert_load_ratio"]
            log.warning(
                "update %d: an expert has %.1f times the load of another; the alarm is %g", self.update, ratio, alarm
            )
        elif self.imbalanced and not imbalanced:
            log.info("update %d: expert load is within %g again", self.update, alarm)
        self.imbalanced = imbalanced

    def write_metrics(self, values: dict[str, float], *, wait_s: float, step_s: float) -> None:
        row = values | {
            "version": float(self.version.number if self.version else -1),
            "busy": self.progress.busy_share,
            "over_bound_tokens": float(self.progress.over_bound_tokens),
            "num_tokens_trained_total": float(self.progress.tokens_trained),
            "num_tokens_explored_total": float(self.progress.tokens_explored),
            "tokens_per_s": values["tokens"] / (wait_s + step_s),
            "queue_depth": float(len(self.pool)),
            "pool_updates": self.pool.uses_left / self.config.learner.groups_per_update,
            "effective_token_share": self.progress.effective_token_share,
            "num_tokens_generated_total": float(self.progress.tokens_generated),
            "filtered_groups": float(self.progress.groups_filtered),
            "overfilled_groups": float(self.progress.groups_overfilled),
            "starved_s": self.starved_s,
            **self.intake.next_update().means(),
            "wait_s": wait_s,
            "step_s": step_s,
            "publish_s": self.publisher.seconds,
            "publish_wait_s": self.publish_wait_s,
        }
        self.publish_wait_s = 0.0
        self._watch_balance(row)
        self.vitals.show(row)
        self.metrics.write(self.update, row)
        log.info(
            "update %d: reward %.3f, success %.2f, lag mean %.2f max %.0f, %.0f tokens, waited %.2f s, trained %.2f s",
            self.update,
            row["reward"],
            row["success_train"],
            row["lag_mean"],
            row["lag_max"],
            row["tokens"],
            wait_s,
            step_s,
        )

    def _heartbeat(self) -> dict[str, Any]:
        progress = self.progress
        lags = lag_statistics(dict(progress.lag_histogram))
        return {
            "update": self.update,
            "version": self.version.number if self.version else -1,
            "phase": self.phase,
            "warm_start_step": self.trainer.warm_start_step,
            "warm_start_accuracy": self.trainer.warm_start_accuracy,
            **self.pace.told(),
            "clip_fraction": self.lag_worth.clip_fraction,
            "by_lag": self.lag_worth.by_lag(),
            "groups_by_bucket": dict(progress.groups_by_bucket),
            "service_s": self.intake.service_s,
            "queue_depth": len(self.pool),
            "checkpoint_update": self.checkpoints.last_durable,
            "tokens_trained": progress.tokens_trained,
            "busy": progress.busy_share,
            "lag_mean": lags["mean"],
            "lag_p95": lags["p95"],
            "lag_max": lags["max"],
            "lag_histogram": {str(lag): count for lag, count in sorted(dict(progress.lag_histogram).items())},
            "over_bound_tokens": progress.over_bound_tokens,
            "mixed_version_trajectories": progress.mixed_version_trajectories,
            "zero_variance_groups": progress.zero_variance_groups,
            "effective_token_share": progress.effective_token_share,
            "filtered_groups": progress.groups_filtered,
            "overfilled_groups": progress.groups_overfilled,
            "starved_s": progress.starved_s,
            "skipped_updates": progress.skipped_updates,
        }
