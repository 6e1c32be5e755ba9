"""From the stream to the pool: decode, judge, pool; everything refused is named, counted and out of the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from asyncrl_jax.transport.codec import InvalidGroup, Limits
from asyncrl_jax.transport.groups import Entry, GroupReader
from asyncrl_jax.types import Group

from .pool import Pool, PooledGroup

log = logging.getLogger(__name__)

READ_COUNT = 64


class Intake:
    """Reads groups into the pool.

    Args:
      known_version: whether a version number was ever announced; a token of any other version is refused.
    """

    def __init__(self, reader: GroupReader, limits: Limits, pool: Pool, known_version: Callable[[int], bool]):
        self._reader = reader
        self._limits = limits
        self._pool = pool
        self._known_version = known_version
        self.service_s = 0.0  # seconds from the start of a group's sampling to its arrival, smoothed

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
            if pooled is not None and pooled.ticket_id not in self._pool:  # delivered again: already here
                self._pool.add(pooled)

    def _decode(self, entry: Entry) -> PooledGroup | None:
        try:
            group = entry.decode(self._limits)
            versions = _versions(group)
            unknown = [v for v in versions if not self._known_version(v)]
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
        return PooledGroup(group, entry, versions, dequeued_at=time.time())

    def _observe_service(self, seconds: float) -> None:
        self.service_s = seconds if self.service_s == 0 else 0.9 * self.service_s + 0.1 * seconds


def _versions(group: Group) -> tuple[int, ...]:
    sampled = [t.policy_versions[t.loss_mask.astype(bool)] for t in group.trajectories]
    return tuple(int(v) for v in np.unique(np.concatenate(sampled)))
