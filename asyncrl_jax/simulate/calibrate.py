"""A real run's times as the inputs of a simulation.

    input        measured from
    update_s     `step_s` of every update but the first ones, which compile
    episode_s    start and end of every archived trajectory, tools and waits for a slot's turn included
    tokens       sampled tokens of every archived trajectory
    publish_s    from an update's end to the first token that its version sampled, in the median over versions:
                 publishing, reading and swapping together, so swap_s is 0
    dispatch_s   from a ticket's issue to its first token, where a slot was free: the 10th percentile
    handover_s   from a group's last token to the learner's reading it, in the median

What is not in a run's files is not invented: swaps, faults and crashes are 0. Times of a machine that learner and
actors share hold for that share: another N shifts who waits for whom, and with it how fast each is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl_jax.config import Config
from asyncrl_jax.config_file import read_config
from asyncrl_jax.observe.metrics import read_rows
from asyncrl_jax.simulate.inputs import Inputs, measured
from asyncrl_jax.transport.archive import ArchivedGroup, read_groups

WARM_UP = 5  # first updates that are left out: they compile
_LEAST_UPDATES = 10


def calibrate(run_dir: Path) -> tuple[Config, Inputs]:
    """(settings, inputs) of a run that is over or under way.

    Raises:
      ValueError: if it is no run directory, or too little of it is there.
    """
    config = read_config(run_dir / "config.json")
    rows = read_rows(run_dir / "metrics" / "learner.jsonl")
    if len(rows) < _LEAST_UPDATES:
        raise ValueError(f"{run_dir}: {len(rows)} updates are too few to calibrate from; at least {_LEAST_UPDATES}")
    archived = [row for path in sorted((run_dir / "archive").glob("groups-*.avro")) for row in read_groups(path)]
    steady = [row for row in archived if min(row.updates) >= WARM_UP]
    if not steady:
        raise ValueError(f"{run_dir}/archive: holds no groups trained after update {WARM_UP}")
    levels = range(1, len(config.environment.level_weights) + 1)
    trajectories = {
        level: [t for row in steady if row.group.ticket.task.level == level for t in row.group.trajectories]
        for level in levels
    }
    everything = [t for row in steady for t in row.group.trajectories]
    seconds, tokens = [], []
    for level in levels:
        known = trajectories[level] or everything
        seconds.append(str(measured([t.sampling_ended_at - t.sampling_started_at for t in known])))
        tokens.append(str(measured([float(t.loss_mask.sum()) for t in known])))
    return config, Inputs(
        duration_s=0.0,
        episode_s=";".join(seconds),
        episode_tokens=";".join(tokens),
        update_s=str(measured([row["step_s"] for row in rows[WARM_UP:]])),
        publish_s=_publish_s(rows, steady),
        swap_s=0.0,
        swap_pause_s=0.0,
        dispatch_s=_dispatch_s(steady),
        handover_s=statistics.median(_handovers(steady)),
        zero_variance_share=statistics.fmean(row.get("zero_variance_share", 0.0) for row in rows),
    )


def _publish_s(rows: Sequence[dict[str, Any]], groups: Sequence[ArchivedGroup]) -> float:
    """Versions count as updates: exact on a run without rollbacks that publishes every update."""
    first_token: dict[int, float] = {}
    for row in groups:
        for trajectory in row.group.trajectories:
            version = int(trajectory.policy_versions[trajectory.loss_mask.astype(bool)].min(initial=2**31 - 1))
            start = trajectory.sampling_started_at
            first_token[version] = min(first_token.get(version, start), start)
    ends = {row["step"]: row["time"] for row in rows}
    delays = [max(start - ends[version], 0.0) for version, start in first_token.items() if version in ends]
    return statistics.median(delays) if delays else 0.0


def _dispatch_s(groups: Sequence[ArchivedGroup]) -> float:
    delays = [min(t.sampling_started_at for t in row.group.trajectories) - row.group.ticket.issued_at for row in groups]
    return max(float(np.quantile(delays, 0.1)), 0.0)


def _handovers(groups: Sequence[ArchivedGroup]) -> list[float]:
    """The learner reads between updates, so only groups that it was waiting for tell: the quicker half."""
    delays = sorted(
        max(row.dequeued_at - max(t.sampling_ended_at for t in row.group.trajectories), 0.0) for row in groups
    )
    return delays[: max(len(delays) // 2, 1)]
