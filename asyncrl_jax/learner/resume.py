"""How a learner comes to its first update: from nothing, from a checkpoint and the redo log, or after a Redis reset."""

from __future__ import annotations

import logging
from typing import Any

from asyncrl_jax.transport.archive import TrainedBatch
from asyncrl_jax.types import Line, Outcome, WeightVersion
from asyncrl_jax.weights.manifest import VersionGone, WeightsMismatch, content_digest
from asyncrl_jax.weights.publish import committed, sweep
from asyncrl_jax.weights.read import describe, read_manifest

from .learner import Learner
from .pool import Drawn, PooledGroup
from .progress import Progress
from .replay import archived_groups, surviving_batches
from .settlement import TrainedGroup

log = logging.getLogger(__name__)


def start_or_resume(learner: Learner) -> None:
    """Leaves the learner at the newest update it can prove, with its weights announced.

    A first start trains on the demonstrations and publishes v0. A resume restores the newest durable checkpoint and
    replays the redo log; the replay must reproduce every version published since, or a new line of weights is opened.
    Of a damaged checkpoint the one before takes the place, said aloud; the archive then holds the updates in between.
    """
    if learner.checkpoints.latest() is None:
        _start(learner)
    else:
        _resume(learner, _newest_whole(learner))


def _newest_whole(learner: Learner) -> int:
    """Restores the newest checkpoint that can be read, and discards those after it.

    Raises:
      ValueError: if none can be read; or the newest is of another model.
    """
    steps = sorted(learner.checkpoints.steps(), reverse=True)
    for step in steps:
        try:
            _restore(learner, step)
        except (ValueError, OSError) as error:
            if isinstance(error, WeightsMismatch) and error.reason == "leaves":
                raise  # whole, and of another model: going back would not help
            log.error("checkpoint %d is damaged and left out: %s", step, error)
            continue
        if discarded := learner.checkpoints.discard_newer(step):
            log.error("going back to checkpoint %d; %s are damaged and deleted", step, discarded)
        return step
    raise ValueError(f"none of the checkpoints {steps} can be read; the errors above say why")


def _start(learner: Learner) -> None:
    sweep(learner.weights_dir)
    learner.epoch, _ = learner.control.ensure_epoch()
    learner.control.set_phase("running")
    learner.control.add_line(learner.staleness.lines[0])
    learner.announce_state()
    learner.trainer.warm_start(str(learner.run_dir / "demonstrations.avro"), learner.stop)
    if learner.stop.is_set():
        return
    learner.trainer.freeze_reference()
    learner.trainer.save_reference(learner.run_dir / "reference")
    learner.publish(wait=True)
    learner.save_checkpoint()


def _resume(learner: Learner, step: int) -> None:
    meta = _restore(learner, step)
    learner.epoch = meta["epoch"]
    learner.trainer.load_reference(learner.run_dir / "reference")
    _forget_if_gone_back(learner)
    if learner.control.epoch() is None:
        learner.staleness.versions.update(_versions_on_disk(learner.weights_dir))
        reopen_after_reset(learner)
    learner.epoch, _ = learner.control.ensure_epoch(at_least=learner.epoch)
    learner.staleness.versions.update(learner.control.versions())
    learner.staleness.lines |= learner.control.lines()  # one that was never checkpointed keeps its number
    sweep(learner.weights_dir, announced=learner.staleness.versions)
    if learner.update < learner.config.learner.num_updates:  # else the run may have been ended already, and stays so
        learner.control.reopen()
    held = _read_pending(learner, meta)
    if learner.epoch > meta["epoch"]:  # Redis lost its data after this checkpoint, and the killed learner what it held
        learner.settlement.record_lost(learner.epoch, learner.update, held=learner.ledger.live())
    _fill_pool(learner, held)
    if not (_reproduced(learner) and _redo_archived(learner) and _redo(learner)):
        _restore(learner, step)
        _keep_uses(learner, held)
        _open_line(learner, held)
    log.info("resumed at update %d of line %d from checkpoint %d", learner.update, learner.line, step)
    learner.publish(wait=True)


def _forget_if_gone_back(learner: Learner) -> None:
    """A Redis behind the checkpoint lost its last writes, and may hold as live what was settled and archived."""
    state = learner.control.learner()
    if state is not None and (state.line, state.update) < (learner.line, learner.update):
        log.error(
            "Redis is at update %d of line %d, the checkpoint at %d of %d: it lost writes, and is emptied",
            state.update,
            state.line,
            learner.update,
            learner.line,
        )
        learner.control.forget_everything()


def _restore(learner: Learner, step: int) -> dict[str, Any]:
    """Loads checkpoint `step` into the learner; returns its meta."""
    meta = learner.trainer.restore(learner.checkpoints, step)
    learner.line, learner.update = meta["line"], meta["update"]
    for number, parent, fork_update in meta["lines"]:
        learner.staleness.lines[number] = Line(number, parent, fork_update)
    learner.uses = {ticket_id: list(updates) for ticket_id, updates in meta["uses"].items()}
    learner.undone = set(meta["undone"])
    learner.progress = Progress.from_json(meta["progress"])
    learner.intake.resume(learner.progress, meta.get("counted", learner.uses))
    learner.finished, learner.batches, learner.settled = [], [], set()
    return meta


def _versions_on_disk(weights_dir: str) -> dict[int, WeightVersion]:
    """Committed versions by number: what can be announced again when Redis has forgotten."""
    return {number: describe(weights_dir, number) for number in committed(weights_dir)}


def _read_pending(learner: Learner, meta: dict[str, Any]) -> list[PooledGroup]:
    """What the killed learner held and did not finish. What its checkpoint had fully trained is settled here."""
    ended = set(meta["finished"])
    settled: list[TrainedGroup] = []
    held: dict[str, PooledGroup] = {}
    for pooled in learner.intake.drain():
        if pooled.ticket_id in ended:
            settled.append(TrainedGroup(pooled, tuple(learner.uses[pooled.ticket_id]), meta["saved_at"]))
        else:
            held.setdefault(pooled.ticket_id, pooled)
    _keep_uses(learner, list(held.values()))
    learner.announce_state()
    batches = [batch for batch in map(_batch, learner.control.redo(0)) if batch.update < learner.update]
    learner.settlement.settle(line=learner.line, update=learner.update, groups=settled, batches=batches)
    return list(held.values())


def _batch(entry: dict[str, Any]) -> TrainedBatch:
    """What an entry of the redo log states; one of an earlier release has no weights, which were 1."""
    tickets = tuple(ticket_id for ticket_id, _, _ in entry["groups"])
    weights = tuple(entry.get("weights", [1.0] * len(tickets)))
    lr_scale = entry.get("lr_scale", 1.0)
    return TrainedBatch(entry["line"], entry["update"] - 1, entry["seed"], tickets, weights, lr_scale)


def _keep_uses(learner: Learner, held: list[PooledGroup]) -> None:
    """Forgets the uses of tickets that were settled, now or before the kill."""
    tickets = {pooled.ticket_id for pooled in held}
    learner.uses = {ticket_id: updates for ticket_id, updates in learner.uses.items() if ticket_id in tickets}


def _fill_pool(learner: Learner, held: list[PooledGroup]) -> None:
    """Pools the held groups with the uses that the restored checkpoint counts."""
    learner.pool.clear()
    for pooled in held:
        pooled.uses = len(learner.uses.get(pooled.ticket_id, ()))
        learner.intake.count(pooled)
        learner.pool.add(pooled)


def _redo_archived(learner: Learner) -> bool:
    """Makes updates again that a later checkpoint had settled, and which that checkpoint no longer holds.

    False when something they trained on is gone.
    """
    archive = learner.run_dir / "archive"
    batches = surviving_batches(archive, learner.line, learner.staleness.lines)
    batches = [batch for batch in batches if batch.update >= learner.update]
    if not batches:
        return True
    groups = archived_groups(archive, {name for batch in batches for name in batch.tickets})
    learner.settled = set(groups)
    for batch in batches:
        gone = [name for name in batch.tickets if name not in learner.pool and name not in groups]
        if batch.update != learner.update or gone:
            log.error("update %d cannot be made again from the archive", learner.update)
            return False
        drawn = [
            Drawn(learner.pool.use(name) if name in learner.pool else learner.intake.revived(groups[name]), weight)
            for name, weight in zip(batch.tickets, batch.weights, strict=True)
        ]
        learner.apply(drawn, batch.seed, batch.lr_scale)
        if not _reproduced(learner):
            return False
    log.info("updates up to %d made again from the archive", learner.update)
    return True


def _redo(learner: Learner) -> bool:
    """Replays the redo log. False when it cannot reproduce what was published."""
    for entry in learner.control.redo(learner.update):
        if entry["line"] != learner.line or entry["update"] != learner.update + 1:
            continue  # of a line abandoned before
        logged = _batch(entry)
        if gone := [ticket_id for ticket_id in logged.tickets if ticket_id not in learner.pool]:
            log.error("update %d cannot be replayed: the group of ticket %s is gone", learner.update, gone[0])
            return False
        pairs = zip(logged.tickets, logged.weights, strict=True)
        drawn = [Drawn(learner.pool.use(ticket_id), weight) for ticket_id, weight in pairs]
        learner.apply(drawn, logged.seed, logged.lr_scale)
        if not _reproduced(learner):
            return False
    newest = [v.update for v in learner.staleness.versions.values() if v.line == learner.line]
    if max(newest, default=0) > learner.update:
        log.error("the redo log ends at update %d, version of update %d is published", learner.update, max(newest))
        return False
    return True


def _reproduced(learner: Learner) -> bool:
    """Whether the weights equal the version announced at this update, if there is one."""
    for version in learner.staleness.versions.values():
        if (version.line, version.update) == (learner.line, learner.update):
            try:
                published = content_digest(read_manifest(learner.weights_dir, version.number))
            except VersionGone:
                return True  # retired since: nothing to compare with
            if published != learner.trainer.weights_digest():
                log.error("update %d replayed differs from published v%d", learner.update, version.number)
                return False
            learner.version = version
            log.info("update %d replayed, equal to published v%d", learner.update, version.number)
    return True


def _open_line(learner: Learner, held: list[PooledGroup]) -> None:
    """Goes on from the checkpoint on a new line that names its parent; what was sampled beyond counts its distance."""
    if learner.settled:
        log.error("%d groups that the ledger counts as trained were trained by undone updates", len(learner.settled))
    abandoned = [entry for entry in learner.control.redo(learner.update) if entry["line"] == learner.line]
    learner.undone |= {ticket_id for entry in abandoned for ticket_id, _, _ in entry["groups"]}
    line = Line(max(learner.staleness.lines) + 1, parent=learner.line, fork_update=learner.update)
    log.error(
        "line %d leaves line %d at update %d; its later updates are undone", line.line, learner.line, line.fork_update
    )
    at_fork = [
        version
        for version in learner.staleness.versions.values()
        if version.line == learner.line and version.update <= learner.update
    ]
    learner.version = max(at_fork, key=lambda version: version.update, default=None)  # the parent of the next one
    learner.staleness.lines[line.line] = line
    learner.line = line.line
    learner.control.add_line(line)
    _fill_pool(learner, held)
    for ticket_id, live in learner.ledger.live().items():
        if live.state == "issued":
            outcome = Outcome.UNDONE if ticket_id in learner.undone else Outcome.EXPIRED
            learner.ledger.settle(ticket_id, outcome, update=learner.update, reason="line_abandoned")


def go_back(learner: Learner, update: int) -> None:
    """Leaves this line of weights for its newest checkpoint at or before `update`, and publishes from there.

    Work of the updates in between is undone: what was archived of it goes to `archive/undone/`, its tickets end as
    undone, and what is still pooled counts its true distance. Killed on the way, the next learner finds the order again
    as long as it is on the abandoned line, and each step may be repeated.
    """
    learner.hear_publisher(wait=True)
    learner.wait_durable()
    step = max((step for step in learner.checkpoints.steps() if step <= update), default=None)
    if step is None:
        raise RuntimeError(f"told to go back to update {update}; there is no checkpoint before {learner.update}")
    log.error("going back from update %d of line %d to checkpoint %d", learner.update, learner.line, step)
    held = [*learner.pool.all(), *(trained.pooled for trained in learner.finished)]  # in the stream still
    touched = {ticket_id for ticket_id, updates in learner.uses.items() if max(updates) >= step}
    learner.settlement.undo(step)
    learner.checkpoints.discard_newer(step)
    _restore(learner, step)
    _keep_uses(learner, held)
    _open_line(learner, held)
    learner.undone |= {pooled.ticket_id for pooled in held if pooled.ticket_id in touched and not pooled.uses}
    learner.announce_state()
    learner.publish(wait=True)
    learner.announce_state()


def reopen_after_reset(learner: Learner) -> None:
    """Redis came back without its data: tell it again what is true, and let new tickets replace what was lost."""
    learner.hear_publisher(wait=True)  # a version announced to the Redis that forgot is announced again below
    before = learner.epoch
    learner.epoch = before + 1
    for pooled in learner.pool.all():
        if pooled.uses:
            learner.finish_group(pooled)  # whatever uses are left: Redis would not hold it for a resume
    learner.pool.clear()
    lost = learner.settlement.record_lost(learner.epoch, learner.update, held=learner.uses)
    log.error("Redis lost its data: epoch %d becomes %d, %d known tickets lost with it", before, learner.epoch, lost)
    learner.forgotten |= learner.uses.keys()
    for line in learner.staleness.lines.values():
        learner.control.add_line(line)
    for _, version in sorted(learner.staleness.versions.items()):
        learner.control.announce(version)
    # Last: a learner that is killed before this line finds no epoch and does all of it again.
    learner.epoch, _ = learner.control.ensure_epoch(at_least=learner.epoch)
    learner.control.set_phase("running")
    learner.announce_state()
