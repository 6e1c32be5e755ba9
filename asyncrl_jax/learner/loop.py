"""The learner's loop.

    stage       waits for                                         unblocked by
    collect     groups for one update; running tickets whose      actors; `straggler_wait_s`
                deadline the update would pass
    update      nothing
    publish     the version before to be announced                the publisher thread
    checkpoint  the checkpoint before to be durable               Orbax's background save

Invariants:
  * No token enters a gradient when more than N updates separate its weights from the weights being updated.
  * Before an update its ordered tickets and its seed are in the redo log; a learner that resumes replays them.
  * A stream entry is acknowledged only after a durable checkpoint holds its training and the archive its bytes.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from pathlib import Path

import jax

from asyncrl_jax import exit_codes
from asyncrl_jax.config import Config
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.transport.codec import Limits
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.fetch import fetch_groups
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.orders import Orders
from asyncrl_jax.transport.payloads import PayloadStore
from asyncrl_jax.types import Outcome

from .directives import obey
from .distributed import agreed_name, follow, join
from .learner import Learner
from .pool import Drawn, PooledGroup
from .resume import reopen_after_reset, start_or_resume
from .trainer import StopRequested, Trainer

log = logging.getLogger(__name__)

READ_BLOCK_MS = 50
PARTIAL_BEATS = 3  # heartbeats that actors have to send what is there of a late group
NAMED_WAIT_S = 5.0  # a wait longer than this says what it waits for


def run_learner(config: Config, run_dir: Path, redis_password: str | None, stop: threading.Event) -> int:
    """Trains until `learner.num_updates` are done and the run is finished, or until `stop` is set.

    Returns:
      The process's exit status.

    Raises:
      RedisUnavailable: if Redis stays away longer than `redis.outage_s`.
    """
    if not join(config.distributed):
        return _lead(Learner(config, run_dir, redis_password, stop))
    redis, keys = connect(config.redis, redis_password), Keys(config.redis.namespace)
    orders = Orders(redis, keys, agreed_name())
    if jax.process_index() == 0:
        return _lead(Learner(config, run_dir, redis_password, stop, orders))
    payloads = PayloadStore(config.redis.payload_directory or run_dir / "payloads")
    limits = Limits.from_config(config)
    fetch = functools.partial(fetch_groups, redis, keys, limits=limits, payloads=payloads)
    return follow(Trainer(config), orders, fetch, config)


def _lead(learner: Learner) -> int:
    """The whole run of a learner's first or only process."""
    learner.vitals.start()
    status = exit_codes.FAILED
    try:
        start_or_resume(learner)
        train(learner)
        while finish(learner):
            train(learner)
        status = exit_codes.FINISHED
    except StopRequested:
        log.info("stopped during the warm start")
        status = exit_codes.FINISHED
    finally:
        learner.trainer.close(status)
        learner.close()
    return status


def train(learner: Learner) -> None:
    """Updates until `num_updates` are done or the run stops."""
    learner.phase = "training"
    learner.announce_state()
    log.info("training from update %d of %d, line %d", learner.update, learner.config.learner.num_updates, learner.line)
    finished_at = time.monotonic()
    while learner.update < learner.config.learner.num_updates:
        collected_from = time.monotonic()
        batch = _collect(learner)
        if batch is None:
            return
        started = time.monotonic()
        seed = derive_seed(learner.config.seed, "update", learner.update)
        learner.log_redo(batch, seed)
        if learner.lag.straggler_lead_updates:
            _give_up(learner, _running(learner, due=learner.update + learner.lag.straggler_lead_updates))
        values = learner.apply(batch, seed, learner.directives.learning_rate_scale)
        learner.publish_if_due()
        learner.announce_state()
        learner.checkpoint_if_due()
        now = time.monotonic()
        learner.progress.busy_s += now - started
        learner.progress.wait_s += started - collected_from
        learner.pace.updated(now - finished_at, now - started, started - collected_from, learner.starved_s)
        finished_at = now
        learner.write_metrics(values, wait_s=started - collected_from, step_s=now - started)


def finish(learner: Learner) -> bool:
    """Makes everything durable, then keeps beating until the orchestrator ends the run.

    Returns:
      Whether to train on instead: the last evaluation may send the learner back.
    """
    if learner.update >= learner.config.learner.num_updates:
        learner.publish(wait=True)
        learner.save_checkpoint()
    learner.wait_durable()
    if learner.update < learner.config.learner.num_updates:
        return False  # stopped early: resumable from here
    learner.archive_held()
    learner.phase = "done"
    learner.announce_state()
    log.info("all %d updates are done and durable; waiting for the last evaluation", learner.update)
    while learner.control.phase() not in ("finished", "stopping") and not learner.stop.wait(0.1):
        learner.vitals.check()
        _follow_epoch(learner)
        obey(learner)
        if learner.update < learner.config.learner.num_updates:
            return True
    return False


def _collect(learner: Learner) -> list[Drawn] | None:
    """The next update's groups, in a fixed order; None when the run stops."""
    since = told_at = time.monotonic()
    starved_until = since
    waited_for_stragglers_since: float | None = None
    block_ms = 0  # what is pooled may be enough
    while not _stopping(learner):
        learner.vitals.check()
        learner.hear_publisher()
        learner.settle_if_durable()
        _follow_epoch(learner)
        obey(learner)
        learner.intake.pool_new(block_ms)
        block_ms = READ_BLOCK_MS
        expire(learner)
        now = time.monotonic()
        if len(learner.pool) >= learner.config.learner.groups_per_update:
            late = _running(learner, due=learner.update, arriving=True)
            if waited_for_stragglers_since is None:
                waited_for_stragglers_since = now
            waited_s = now - waited_for_stragglers_since
            if not late or waited_s >= _patience_s(learner, late, waited_s):
                if told_at != since:
                    log.warning("update %d goes on after %.1f s", learner.update, now - since)
                learner.starved_s = starved_until - since
                learner.progress.starved_s += learner.starved_s
                return learner.draw()
            waiting_for = f"tickets {sorted(late)[:8]}, due by this update"
        else:
            starved_until = now
            missing = learner.config.learner.groups_per_update - len(learner.pool)
            waiting_for = f"{missing} more groups"
        if now - told_at >= NAMED_WAIT_S:
            running = sorted(name for name, live in learner.ledger.live().items() if live.state == "issued")
            told = f"{waiting_for}; tickets with actors: {running[:8]}"
            log.warning("update %d waits for %s; since %.0f s", learner.update, told, now - since)
            told_at = now
            _fail_lost(learner)
    return None


def _patience_s(learner: Learner, late: set[str], waited_s: float) -> float:
    """How long running tickets are waited for. Policy "partial": once that is over, their late members are given up,
    and the others have a moment to arrive."""
    wait_s = learner.lag.straggler_wait_s
    if learner.lag.straggler_policy != "partial":
        return wait_s
    if waited_s >= wait_s:
        _give_up(learner, late)
    return wait_s + PARTIAL_BEATS * learner.config.actor.heartbeat_s


def _give_up(learner: Learner, late: set[str]) -> None:
    """Tells actors to send running tickets without the members that are not done, once for each ticket."""
    if new := late - learner.cut:
        log.info("tickets %s wait no longer for late members", sorted(new)[:8])
        learner.cut = (learner.cut & learner.ledger.live().keys()) | new  # the others have ended
        learner.steering.cut(new)


def _running(learner: Learner, due: int, *, arriving: bool = False) -> set[str]:
    """Running tickets that could not be trained on after update `due`.

    Args:
      arriving: with those whose group is in a stream and not pooled yet: it came after the last look.
    """
    held = {pooled.ticket_id for pooled in learner.pool.all()} | learner.uses.keys()
    return {
        ticket_id
        for ticket_id, live in learner.ledger.live().items()
        if live.ticket.line == learner.line
        and live.ticket.deadline <= due
        and (live.state == "issued" or (arriving and ticket_id not in held))
    }


def expire(learner: Learner) -> None:
    """Ends pooled groups that are past the bound. Trained before: they are finished; never trained: expired."""
    staleness = learner.staleness

    def past_the_bound(pooled: PooledGroup) -> bool:
        bound = staleness.bound(pooled.group.ticket)
        return staleness.is_unusable(pooled.versions, learner.line, learner.update, bound)

    taken = learner.pool.take_if(past_the_bound)
    for pooled in taken:
        if pooled.uses:
            learner.finish_group(pooled)
            continue
        outcome = Outcome.UNDONE if pooled.ticket_id in learner.undone else Outcome.EXPIRED
        learner.reader.complete([(pooled.entry, pooled.ticket_id)], outcome, learner.update, reason="lag_bound")
        learner.intake.forget([pooled.ticket_id])
        learner.progress.groups_overfilled += 1
        log.info("ticket %s %s: past its bound at update %d", pooled.ticket_id, outcome, learner.update)
    if any(pooled.uses for pooled in taken):
        learner.announce_state()  # or their last uses would be waited for, and nothing issued in their place


def _fail_lost(learner: Learner) -> None:
    """Ends tickets whose stream entry someone deleted, so that they are counted and replaced, not waited for."""
    held = {pooled.ticket_id for pooled in learner.pool.all()} | learner.uses.keys()
    lost = [ticket_id for ticket_id in learner.ledger.missing() if ticket_id not in held]
    if lost:
        log.error("%d tickets have lost their stream entry: %s", len(lost), lost[:8])
        learner.ledger.settle_many(lost, Outcome.FAILED, update=learner.update, reason="entry_lost")


def _stopping(learner: Learner) -> bool:
    return learner.stop.is_set() or learner.control.phase() in ("finished", "stopping")


def _follow_epoch(learner: Learner) -> None:
    if learner.control.epoch() != learner.epoch:
        reopen_after_reset(learner)
