"""What the orchestrator directs the learner to do, and how the learner obeys."""

from __future__ import annotations

import logging
import time

from asyncrl_jax.types import Outcome

from .learner import Learner
from .pool import PooledGroup
from .resume import go_back

log = logging.getLogger(__name__)

LOOK_S = 0.2  # between looks at the directives


def obey(learner: Learner) -> None:
    """Takes up the newest directives, read at most every `LOOK_S`; those that ask for an act are carried out once."""
    now = time.monotonic()
    if now - learner.directives_at < LOOK_S:
        return
    learner.directives_at = now
    heeded = learner.directives.expire_before
    learner.directives = learner.steering.directives()
    rollback, before = learner.directives.rollback, learner.directives.expire_before
    # The line is the proof of obedience: after going back the learner is on another one.
    if rollback is not None and rollback.line == learner.line and rollback.update < learner.update:
        go_back(learner, rollback.update)
    if before is not None and before != heeded:
        _expire_before(learner, *before)


def _expire_before(learner: Learner, line: int, update: int) -> None:
    """Ends pooled groups that were never trained on and whose weights may be older than `update` of `line`."""

    def old(pooled: PooledGroup) -> bool:
        ticket = pooled.group.ticket
        return not pooled.uses and ticket.line == line and ticket.min_update < update

    taken = learner.pool.take_if(old)
    entries = [(pooled.entry, pooled.ticket_id) for pooled in taken]
    if entries:
        learner.reader.complete(entries, Outcome.EXPIRED, learner.update, reason="archive_reset")
        log.warning("archive reset: %d groups older than update %d of line %d expired", len(taken), update, line)
