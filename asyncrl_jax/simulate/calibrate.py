"""A real run's times as the inputs of a simulation.

    input        measured from
    update_s     `step_s` of every update but the first ones, which compile, without waiting for the version before;
                 two laws, for an actor on the learner's machine: of the fifth of the updates with the fewest episodes
                 beside them, and of the rest
    episode_s    start and end of every archived trajectory, tools and waits for a slot's turn included, without what
                 environment.turn_delay_s added, which is drawn anew
    turns        of every archived trajectory
    tokens       sampled tokens of every archived trajectory
    publish_s    from an update's end until its version sampled, in the median over versions: where an episode went
                 over to it, at the share of its time that the older version's tokens are of all, as the simulation
                 lays them. Where none did, the first token of an episode that began with it, in the 10th percentile.
                 Of that, `publish_s` of the learner's metrics until it was announced, and the rest is swap_s
    dispatch_s   from an update's end until the next ticket's issue, in the lower quartile, and from there to its first
                 token, where a slot was free: the 10th percentile
    handover_s   from a group's last token to the learner's reading it, in the median

What is not in a run's files is not invented: faults and crashes are 0. Episodes' times on a machine that learner and
actors share hold for that share: another N shifts who waits for whom, and with it how fast they are.
"""

from __future__ import annotations

import bisect
import collections
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncrl_jax.config import Config
from asyncrl_jax.config_file import read_config
from asyncrl_jax.laws import Delays, measured
from asyncrl_jax.observe.metrics import read_rows
from asyncrl_jax.seeds import member_seed
from asyncrl_jax.simulate.inputs import Inputs
from asyncrl_jax.transport.archive import ArchivedGroup, read_groups

WARM_UP = 5  # first updates that are left out: they compile
_LEAST_UPDATES = 10
_QUIET = 0.2  # share of the updates that count as having few episodes beside them


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
    episodes = [one for row in steady for one in _episodes(row, config.environment.turn_delay_s)]
    seconds, turns, tokens = [], [], []
    for level in levels:
        known = [one for one in episodes if one.level == level] or episodes
        seconds.append(str(measured([one.seconds for one in known])))
        turns.append(str(measured([one.turns for one in known])))
        tokens.append(str(measured([one.tokens for one in known])))
    load, update_s = _update_s(rows[WARM_UP:], archived)
    arrival_s = _arrival_s(rows, steady, config.weights.publish_every_updates)
    publish_s = min(statistics.median(row.get("publish_s", arrival_s) for row in rows[WARM_UP:]), arrival_s)
    return config, Inputs(
        duration_s=0.0,
        episode_s=";".join(seconds),
        turns=";".join(turns),
        episode_tokens=";".join(tokens),
        update_s=update_s,
        update_load=load,
        publish_s=publish_s,
        swap_s=arrival_s - publish_s,
        swap_pause_s=0.0,
        dispatch_s=_dispatch_s(rows[WARM_UP:], steady),
        handover_s=statistics.median(_handovers(steady)),
        zero_variance_share=statistics.fmean(row.get("zero_variance_share", 0.0) for row in rows),
    )


class _Episode(NamedTuple):
    level: int
    seconds: float  # of its own
    turns: float
    tokens: float


def _episodes(row: ArchivedGroup, turn_delay_s: str) -> Iterator[_Episode]:
    """Those of a group. An episode that took a second attempt waited as that one did, which is not known here; nor is
    it which members of a partial group are missing, so none of it counts where a delay has to be taken out."""
    ticket = row.group.ticket
    if row.group.partial and turn_delay_s:
        return
    for member, trajectory in enumerate(row.group.trajectories):
        delays = Delays(turn_delay_s, member_seed(ticket.seed, member, 1))
        added_s = sum(delays.next_s() for _ in range(trajectory.num_turns))
        seconds = trajectory.sampling_ended_at - trajectory.sampling_started_at - added_s
        yield _Episode(
            ticket.task.level, max(seconds, 0.0), float(trajectory.num_turns), float(trajectory.loss_mask.sum())
        )


def _update_s(rows: Sequence[dict[str, Any]], groups: Sequence[ArchivedGroup]) -> tuple[str, str]:
    """(loads, laws), see `Inputs.update_load`. One law where all updates had the same beside them."""
    spans = np.asarray([(t.sampling_started_at, t.sampling_ended_at) for row in groups for t in row.group.trajectories])
    origin = spans.min()  # small numbers, or the sums would lose the fractions
    seconds = np.asarray([row["step_s"] - row.get("publish_wait_s", 0.0) for row in rows])
    ends = np.asarray([row["time"] for row in rows]) - origin
    begins = ends - np.asarray([row["step_s"] for row in rows])
    before_begin, before_end = (
        _seconds_since(spans[:, 0] - origin, times) - _seconds_since(spans[:, 1] - origin, times)
        for times in (begins, ends)
    )
    loads = np.round((before_end - before_begin) / (ends - begins), 6)
    above = loads[loads > np.quantile(loads, _QUIET, method="lower")]
    if not above.size:
        return "0", str(measured(seconds.tolist()))
    edge = float(above.min())
    quiet, rest = (str(measured(seconds[chosen].tolist())) for chosen in (loads < edge, loads >= edge))
    return f"0;{edge!r}", f"{quiet};{rest}"


def _seconds_since(moments: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Of each time, the sum of how long ago the moments before it are. Cost: O((moments + times) log moments)."""
    ordered = np.sort(moments)
    number = np.searchsorted(ordered, times)
    return number * times - np.concatenate([[0.0], np.cumsum(ordered)])[number]


def _arrival_s(rows: Sequence[dict[str, Any]], groups: Sequence[ArchivedGroup], every_updates: int) -> float:
    """Takes a version to be of `every_updates` updates more than the one before: exact on a run without rollbacks."""
    began: dict[int, float] = {}  # first episode of each version
    went_over: dict[int, list[float]] = collections.defaultdict(list)  # episodes under way, to each version
    for row in groups:
        for trajectory in row.group.trajectories:
            versions = trajectory.policy_versions[trajectory.loss_mask.astype(bool)]
            start = trajectory.sampling_started_at
            seconds = trajectory.sampling_ended_at - start
            for version in np.unique(versions)[:1].tolist():
                began[version] = min(began.get(version, start), start)
            for version in np.unique(versions)[1:].tolist():
                went_over[version].append(start + float(np.mean(versions < version)) * seconds)
    ends = {row["step"] // every_updates: row["time"] for row in rows if row["step"] % every_updates == 0}
    known = [statistics.median(times) - ends[version] for version, times in went_over.items() if version in ends]
    if known:
        return max(statistics.median(known), 0.0)
    delays = [max(start - ends[version], 0.0) for version, start in began.items() if version in ends]
    return float(np.quantile(delays, 0.1)) if delays else 0.0


def _dispatch_s(rows: Sequence[dict[str, Any]], groups: Sequence[ArchivedGroup]) -> float:
    issued = sorted(row.group.ticket.issued_at for row in groups)
    looks = [
        issued[after] - row["time"] for row in rows if (after := bisect.bisect_left(issued, row["time"])) < len(issued)
    ]
    starts = [min(t.sampling_started_at for t in row.group.trajectories) - row.group.ticket.issued_at for row in groups]
    return float(np.quantile(looks, 0.25) if looks else 0.0) + max(float(np.quantile(starts, 0.1)), 0.0)


def _handovers(groups: Sequence[ArchivedGroup]) -> list[float]:
    """The learner reads between updates, so only groups that it was waiting for tell: the quicker half."""
    delays = sorted(
        max(row.dequeued_at - max(t.sampling_ended_at for t in row.group.trajectories), 0.0) for row in groups
    )
    return delays[: max(len(delays) // 2, 1)]
