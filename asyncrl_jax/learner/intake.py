"""From the stream to the pool: decode, judge, pool; everything refused is named, counted and out of the way."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np

from asyncrl_jax.transport.codec import InvalidGroup, Limits
from asyncrl_jax.transport.groups import Entry, GroupReader
from asyncrl_jax.types import Exploration, Group, Outcome, Trajectory

from .advantages import group_advantages, has_zero_variance
from .pool import Pool, PooledGroup, Traits
from .progress import Progress

log = logging.getLogger(__name__)

READ_COUNT = 64


@dataclasses.dataclass
class Arrivals:
    """What came since the last update: all of it, whatever becomes of it. Sums over trajectories."""

    trajectories: int = 0
    rewards: float = 0.0
    successes: float = 0.0

    def add(self, pooled: PooledGroup) -> None:
        """Counts a group; what another policy sampled says nothing of this one."""
        own = [t for t in pooled.group.trajectories if t.exploration is None]
        self.trajectories += len(own)
        self.rewards += sum(t.reward for t in own)
        self.successes += sum(t.success for t in own)

    def means(self) -> dict[str, float]:
        """`reward_all` and `success_all`; nothing when nothing came."""
        if not self.trajectories:
            return {}
        return {
            "reward_all": self.rewards / self.trajectories,
            "success_all": self.successes / self.trajectories,
            "trajectories_all": float(self.trajectories),
        }


class Intake:
    """Reads groups into the pool.

    * A group's advantages are taken before anything is left out.
    * A group without variance is left out only while the update may still replace one (`refill_groups`); after that it
      is trained on like any other, so that a run of hopeless tasks does not sample for ever.

    Args:
      known_version: whether a version number was ever announced; a token of any other version is refused.
      refill_groups: zero-variance groups that may be left out before one update.
      advantage_eps: as in the loss.
      explores: whether samples of another policy were asked for; without, one is refused, since nothing would weigh it.
    """

    def __init__(
        self,
        reader: GroupReader,
        limits: Limits,
        pool: Pool,
        known_version: Callable[[int], bool],
        *,
        refill_groups: int = 0,
        advantage_eps: float = 1e-6,
        explores: bool = False,
    ):
        self._reader = reader
        self._limits = limits
        self._pool = pool
        self._known_version = known_version
        self._refill_groups = refill_groups
        self._advantage_eps = advantage_eps
        self._explores = explores
        self._refilled = 0  # zero-variance groups left out since the last update
        self._counted: set[str] = set()  # tickets whose arrival an earlier process has counted
        self.progress = Progress()
        self.arrivals = Arrivals()
        self.service_s = 0.0  # seconds from the start of a group's sampling to its arrival, smoothed

    def resume(self, progress: Progress, counted: Collection[str]) -> None:
        """Goes on counting into `progress`, which holds the arrival of the tickets `counted` already."""
        self.progress = progress
        self._counted = set(counted)

    def next_update(self) -> Arrivals:
        """What arrived since the last call; the next update may leave out zero-variance groups anew."""
        arrived, self.arrivals = self.arrivals, Arrivals()
        self._refilled = 0
        return arrived

    def drain(self) -> list[PooledGroup]:
        """Everything that can be read without waiting, entries held by an earlier process first."""
        groups = []
        while entries := self._reader.read(READ_COUNT, 0):
            groups += [group for entry in entries if (group := self._decode(entry)) is not None]
        return groups

    def pool_new(self, block_ms: int) -> None:
        """Pools what has arrived, waiting at most `block_ms` for the first."""
        for entry in self._reader.read(READ_COUNT, block_ms):
            pooled = self._decode(entry)
            if pooled is None or pooled.ticket_id in self._pool:  # delivered again: already here
                continue
            self.count(pooled)
            if pooled.traits.zero_variance and self._refilled < self._refill_groups:
                self._leave_out(pooled)
            else:
                self._pool.add(pooled)

    def revived(self, group: Group) -> PooledGroup:
        """A group out of the archive, which no stream holds any more."""
        nowhere = Entry(partition=-1, entry_id="", data=b"", deliveries=0, ticket=group.ticket)
        traits = traits_of(group, self._advantage_eps)
        pooled = PooledGroup(group, nowhere, _versions(group), time.time(), traits)
        self.count(pooled)
        self.forget([pooled.ticket_id])
        return pooled

    def count(self, pooled: PooledGroup) -> None:
        """Counts a group that arrived, whatever becomes of it; once a ticket."""
        if pooled.ticket_id in self._counted:
            return
        self._counted.add(pooled.ticket_id)
        self.arrivals.add(pooled)
        self.progress.tokens_generated += pooled.traits.sampled_tokens
        self.progress.groups_arrived += 1

    def forget(self, ticket_ids: Collection[str]) -> None:
        """These tickets are settled and never come again."""
        self._counted.difference_update(ticket_ids)

    def _leave_out(self, pooled: PooledGroup) -> None:
        self._refilled += 1
        self.progress.groups_filtered += 1
        self._reader.complete([(pooled.entry, pooled.ticket_id)], Outcome.FILTERED, None, reason="zero_variance")
        self.forget([pooled.ticket_id])

    def _decode(self, entry: Entry) -> PooledGroup | None:
        try:
            group = entry.decode(self._limits)
            if not self._explores and any(t.exploration is not None for t in group.trajectories):
                detail = "samples of another policy, and actor.exploration.share is 0"
                raise InvalidGroup("bad_exploration", detail, group.ticket.ticket_id)
            versions = _versions(group)
            unknown = [v for v in all_versions(group.trajectories) if not self._known_version(v)]
            if unknown:
                raise InvalidGroup(
                    "unknown_version", f"versions {unknown} were never announced", group.ticket.ticket_id
                )
        except InvalidGroup as error:
            log.warning("entry %s of partition %d refused: %s", entry.entry_id, entry.partition, error)
            self._reader.dead_letter(entry, error.reason, error.detail, error.ticket_id)
            return None
        started = min(t.sampling_started_at for t in group.trajectories)
        self._observe_service(max(group.enqueued_at - started, 0.0))
        return PooledGroup(group, entry, versions, time.time(), traits_of(group, self._advantage_eps))

    def _observe_service(self, seconds: float) -> None:
        self.service_s = seconds if self.service_s == 0 else 0.9 * self.service_s + 0.1 * seconds


def traits_of(group: Group, advantage_eps: float) -> Traits:
    """What the pool needs to know of a group of at least one trajectory."""
    rewards = np.asarray([t.reward for t in group.trajectories], np.float32)
    return Traits(
        signal=float(np.abs(group_advantages(rewards, advantage_eps)).mean()),
        reward=float(rewards.mean()),
        success=float(np.mean([t.success for t in group.trajectories])),
        length=group.num_tokens / len(group.trajectories),
        sampled_tokens=sum(int(t.loss_mask.sum()) for t in group.trajectories),
        zero_variance=has_zero_variance(rewards),
    )


def _versions(group: Group) -> tuple[int, ...]:
    """Those that the lag bound holds for: not an older policy's, which was to explore beside the newest one.

    Where nothing is beside it, as in a partial group, the bound holds for it too: or the group would never be too old.
    """
    own = [t for t in group.trajectories if t.exploration != Exploration.OLDER]
    return all_versions(own or group.trajectories)


def all_versions(trajectories: Sequence[Trajectory]) -> tuple[int, ...]:
    """Of the tokens that were sampled, rising."""
    sampled = [t.policy_versions[t.loss_mask.astype(bool)] for t in trajectories]
    return tuple(int(v) for v in np.unique(np.concatenate(sampled))) if sampled else ()
