"""An orchestrator's place among others: it leads while it holds the lease, and stands by otherwise.

The lease only decides who *tries*; what keeps a stale leader harmless is the token that Redis checks on every write
(see `transport/fencing.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from asyncrl_jax.transport.fencing import Fence, Leadership

log = logging.getLogger(__name__)

RENEWALS = 4  # a lease, so that one slow reply does not cost the lead


class Lease:
    """Keeps asking for the lease, and keeps it.

    Invariant: a standby leads at most one lease and one renewal interval after the leader's last renewal, so within
    three lease periods of its death even if a round of its own is slow.
    """

    def __init__(self, leadership: Leadership, lease_s: float, clock: Callable[[], float] = time.monotonic):
        self._leadership = leadership
        self._lease_s = lease_s
        self._clock = clock
        self._fence: Fence | None = None
        self._asked_at = -float("inf")

    def keep(self) -> Fence | None:
        """The fence of this leadership; None while another leads. Asks Redis only when a renewal is due."""
        now = self._clock()
        if now - self._asked_at >= self._lease_s / RENEWALS:
            self._asked_at = now
            fence = self._leadership.acquire(self._lease_s)
            if fence is not None and fence != self._fence:
                log.warning("this orchestrator leads now, as %s", fence.token)
            if fence is None and self._fence is not None:
                log.warning("another orchestrator leads now")
            self._fence = fence
        return self._fence

    def lost(self) -> None:
        """Redis refused a write: another leads."""
        self._fence = None

    def release(self) -> None:
        """Lets a standby take over at once."""
        if self._fence is not None:
            self._leadership.release()
            self._fence = None
