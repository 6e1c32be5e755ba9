"""Trains again from what a run left: the same first weights, the same batches in the same order, the same bits.

The archive states what every update of the surviving line trained on (`updates-*.avro`) and holds the groups
(`groups-*.avro`; those with uses left, that no checkpoint had settled yet, in `held-*.avro`). Bit-equality is claimed
for the same packages, mesh, machine and number of threads.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from asyncrl_jax.config import Config
from asyncrl_jax.transport.archive import TrainedBatch, read_batches, read_groups
from asyncrl_jax.types import Group, Line, WeightVersion, on_line
from asyncrl_jax.weights.manifest import VersionGone, content_digest
from asyncrl_jax.weights.publish import committed
from asyncrl_jax.weights.read import describe, read_manifest

from .checkpoint import Checkpoints
from .staleness import Staleness
from .trainer import Trainer

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What a replay came to."""

    line: int  # the surviving one
    updates: int  # made again
    weights_digest: str  # of the last weights
    compared: tuple[int, ...]  # published versions that were still there, and equal
    differing: tuple[int, ...]  # and those that were not equal


def surviving_batches(archive: Path, line: int, lines: dict[int, Line]) -> list[TrainedBatch]:
    """What every update of the line trained on, in order, as far as the archive knows it.

    Raises:
      ValueError: for a damaged file, or two different batches of one update.
    """
    found: dict[int, TrainedBatch] = {}
    for path in sorted(archive.glob("updates-*.avro")):
        for batch in read_batches(path):
            if not on_line(batch.line, batch.update, line, lines):
                continue
            known = found.setdefault(batch.update, batch)
            if (known.tickets, known.weights) != (batch.tickets, batch.weights):
                raise ValueError(f"{path}: update {batch.update} trained on something else in another file")
    return [found[update] for update in sorted(found)]


def archived_groups(archive: Path, wanted: Iterable[str] | None = None) -> dict[str, Group]:
    """Groups by ticket, those that a run's end left with uses included; all, or those wanted."""
    names = None if wanted is None else set(wanted)
    return {
        row.group.ticket.ticket_id: row.group
        for pattern in ("held-*.avro", "groups-*.avro")
        for path in sorted(archive.glob(pattern))
        for row in read_groups(path)
        if names is None or row.group.ticket.ticket_id in names
    }


def replay(
    config: Config,
    run_dir: Path,
    num_updates: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Replayed:
    """Makes the updates of a run's surviving line again, from v0 on.

    Args:
      config: of the run.
      run_dir: with `archive/`, `reference/` (the weights of v0), `checkpoints/` and, to compare with, `weights/`.
      num_updates: to make at most; None for all that the newest checkpoint holds.
      progress: called with (updates made, updates to make) after each.

    Raises:
      ValueError: if the archive does not hold an update or one of its groups.
      FileNotFoundError: without a checkpoint.
    """
    meta = Checkpoints(run_dir / "checkpoints", keep=1).meta()
    lines = {number: Line(number, parent, fork) for number, parent, fork in meta["lines"]}
    weights_dir = config.weights.directory or str(run_dir / "weights")
    recorded = {number: WeightVersion(number, *rest) for number, *rest in meta.get("versions", [])}
    on_disk = {number: describe(weights_dir, number) for number in committed(weights_dir)}
    staleness = Staleness(
        recorded | on_disk,
        lines,
        config.most_token_updates,
        mask_over_age=config.lag.straggler_policy == "mask",
    )
    last = min(meta["update"], num_updates if num_updates is not None else meta["update"])
    batches = {batch.update: batch for batch in surviving_batches(run_dir / "archive", meta["line"], lines)}
    groups = archived_groups(run_dir / "archive")
    trainer = Trainer(config)
    trainer.start_from_reference(run_dir / "reference")
    equal: list[int] = []
    differing: list[int] = []

    def compare(done: int) -> None:
        for number, version in on_disk.items():
            if version.update == done and on_line(version.line, done - 1, meta["line"], lines):
                try:
                    published = content_digest(read_manifest(weights_dir, number))
                except VersionGone:
                    continue
                (equal if published == trainer.weights_digest() else differing).append(number)

    compare(0)
    for update in range(last):
        batch = batches.get(update)
        missing = [name for name in batch.tickets if name not in groups] if batch else []
        if batch is None or missing:
            what = f"the group of ticket {missing[0]}" if missing else "what it trained on"
            raise ValueError(f"{run_dir / 'archive'}: update {update} cannot be made again, {what} is not there")
        trained = [groups[name] for name in batch.tickets]
        lags = [[staleness.token_lags(t, batch.line, update) for t in group.trajectories] for group in trained]
        masks = [
            [
                staleness.trainable_mask(t, lag, staleness.bound(group.ticket))
                for t, lag in zip(group.trajectories, of_group, strict=True)
            ]
            for group, of_group in zip(trained, lags, strict=True)
        ]
        trainer.lr_scale = batch.lr_scale
        trainer.update(trained, lags, masks, batch.seed, update, batch.weights)
        if progress is not None:
            progress(update + 1, last)
        compare(update + 1)
    return Replayed(meta["line"], last, trainer.weights_digest(), tuple(equal), tuple(differing))
