"""Rejection sampling: the best of what a run sampled becomes demonstrations for the next stage.

generate (any run) ──▶ archive ──▶ filter (quality.py) ──▶ demonstrations ──▶ train (warm_start.py) ──▶ RL
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl_jax.config_file import read_config
from asyncrl_jax.learner.quality import Band, Kept, Sample, quality_filter
from asyncrl_jax.transport.archive import read_groups
from asyncrl_jax.transport.demonstrations import Demonstration, DemonstrationSet, save_demonstrations
from asyncrl_jax.types import Exploration


def archived_samples(archive: Path, from_update: int = 0) -> list[Sample]:
    """Every trajectory of the groups that an archive holds, in the order of their tickets, each group once.

    But for those of a uniform policy: its words are nobody's, neither to be imitated nor to be unlearnt.

    Args:
      archive: directory of `groups-*.avro` and `held-*.avro`.
      from_update: groups first trained on by an earlier update are left out.
    """
    groups = {}
    for pattern in ("held-*.avro", "groups-*.avro"):
        for path in sorted(archive.glob(pattern)):
            for row in read_groups(path):
                if min(row.updates, default=0) >= from_update:
                    groups[row.group.ticket.ticket_id] = row.group
    return [
        Sample(group.ticket.task, trajectory)
        for ticket_id, group in sorted(groups.items(), key=lambda item: tuple(map(int, item[0].split("-"))))
        for trajectory in group.trajectories
        if trajectory.exploration != Exploration.UNIFORM
    ]


def demonstrations_of(kept: Kept, negative_weight: float) -> tuple[Demonstration, ...]:
    """What the filter kept, to be imitated with weight 1 (high) or its reward (middle), or avoided (low).

    Args:
      kept: of `quality_filter`.
      negative_weight: weight of the low ones, at least 0; 0 leaves them out.
    """
    rows = []
    for sample, band in zip(kept.samples, kept.bands, strict=True):
        trajectory = sample.trajectory
        weight = {Band.HIGH: 1.0, Band.MIDDLE: trajectory.reward, Band.LOW: -negative_weight}[band]
        if weight == 0 or not trajectory.loss_mask.any():
            continue
        rows.append(
            Demonstration(
                level=sample.task.level,
                tokens=tuple(trajectory.tokens.tolist()),
                loss_mask=tuple(trajectory.loss_mask.tolist()),
                success=trajectory.success,
                weight=weight,
            )
        )
    return tuple(rows)


def filter_run(
    run_dir: Path,
    output: Path,
    num: int,
    *,
    identity: str,
    from_update: int = 0,
    negative_weight: float = 0.1,
    **quality: Any,
) -> dict[str, Any]:
    """Writes the best of a run's archive as a file of demonstrations.

    Args:
      run_dir: of a run: its config and archive.
      output: file to write.
      num: most trajectories kept.
      identity: of the run's tasks, as its record states it.
      from_update: see `archived_samples`.
      negative_weight: see `demonstrations_of`.
      **quality: of `quality_filter`.

    Returns:
      What was offered and kept, by band; how many of how many tasks; and how unlike each other they are.

    Raises:
      ValueError: for a directory that is not that of a run, settings without sense, or nothing left to imitate.
    """
    config = read_config(run_dir / "config.json")
    if negative_weight < 0:
        raise ValueError(f"negative_weight={negative_weight}: at least 0; 0 leaves low rewards out")
    samples = archived_samples(run_dir / "archive", from_update)
    kept = quality_filter(samples, num, **quality)
    rows = demonstrations_of(kept, negative_weight)
    if not any(row.weight > 0 for row in rows):
        raise ValueError(f"{run_dir / 'archive'}: {len(samples)} trajectories, none with a reward to imitate")
    facts = {"environment": config.environment.name, "identity": identity}
    save_demonstrations(output, DemonstrationSet(**facts, vocab_size=config.model.vocab_size, rows=rows))
    return {
        "sampled": len(samples),
        "offered": {band.value: count for band, count in kept.offered.items()},
        "kept": _by_band(kept.bands),
        "written": len(rows),
        "duplicates": kept.duplicates,
        "tasks": kept.num_tasks,
        "distinct_share": round(kept.distinct_share, 4),
    }


def _by_band(bands: Sequence[Band]) -> dict[str, int]:
    counts = collections.Counter(bands)
    return {band.value: counts[band] for band in Band}
