"""The ledger recomputed from what a run left, by unique ticket: archive files, Redis and the newest checkpoint.

No counter is asked. The files say what ended how; Redis says what is live; the checkpoint says what the surviving line
of weights was trained on. The three must agree:

    issued = trained + expired + filtered + quarantined + failed + undone + pending
    every trained ticket is in the archive once, with 1 to `replay_ratio` uses
    every update of the surviving line used exactly the groups that the archive and the checkpoint name
    every archived token is within the lag bound

    python -m asyncrl_jax.observe.audit RUN_DIR
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import redis as redis_client

from asyncrl_jax.config import Config
from asyncrl_jax.config_file import read_config
from asyncrl_jax.transport.archive import ArchivedGroup, RetiredGroup, read_groups, read_ledger_events, read_retired
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger, LedgerCounts, LedgerEvent, final_outcomes, recompute
from asyncrl_jax.types import Line, Outcome, WeightVersion, on_line, update_distance

_SHOWN = 5  # tickets named in a problem
_STEP = re.compile(r"\d{8,}")


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What was recomputed, and every disagreement in words; `problems` is empty for a sound run."""

    ledger: dict[str, int]  # issued, every outcome, pending
    line: int  # the surviving one
    update: int  # of the newest durable checkpoint
    num_groups: int  # in the archive
    num_trajectories: int  # in the archive
    mixed_version_trajectories: int  # of those, with tokens of more than one version
    lag_histogram: dict[int, int]  # trained tokens by lag in updates, as the checkpoint counts them
    archived_lag_histogram: dict[int, int]  # the same, recomputed from the archive
    problems: tuple[str, ...]
    bound: int = 0  # the largest N that was ever in force, in updates

    @property
    def sound(self) -> bool:
        return not self.problems


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything that an audit looks at."""

    events: list[LedgerEvent]
    groups: list[ArchivedGroup]
    checkpoint: Mapping[str, Any]  # `meta`; empty without a checkpoint
    live: frozenset[str] | None  # live tickets; None without Redis
    seen: frozenset[str]  # tickets that had been issued before `live` was read
    versions: Mapping[int, WeightVersion]
    lines: Mapping[int, Line]
    retired: tuple[RetiredGroup, ...] = ()  # archived groups whose tokens were dropped

    @property
    def trained(self) -> list[RetiredGroup]:
        """Ticket, line and updates of every group that the archive has or had."""
        kept = [RetiredGroup(row.group.ticket.ticket_id, row.line, row.updates) for row in self.groups]
        return [*kept, *self.retired]


def audit(run_dir: Path, client: redis_client.Redis | None = None) -> AuditReport:
    """Audits a run directory; the run may be in motion.

    Args:
      client: the run's Redis; without it, what is live and events not yet archived are not known.

    Raises:
      ValueError: if the directory is not a run's, or a file in it is damaged.
    """
    config = read_config(run_dir / "config.json")
    return examine(config, collect(run_dir, config, client))


def collect(run_dir: Path, config: Config, client: redis_client.Redis | None) -> Evidence:
    """Reads the evidence, in an order that makes a run in motion no contradiction.

    The checkpoint comes before the archive, which then holds at least what the checkpoint had settled. Events are read
    before and after the live tickets: issued before and not ended after, a ticket must have been live in between.
    """
    checkpoint = read_checkpoint_meta(run_dir)
    archive = run_dir / "archive"
    live: frozenset[str] | None = None
    seen: frozenset[str] = frozenset()
    versions: Mapping[int, WeightVersion] = {}
    lines: Mapping[int, Line] = {0: Line(0)}
    ledger: Ledger | None = None
    if client is not None:
        keys = Keys(config.redis.namespace)
        ledger, control = Ledger(client, keys), Control(client, keys)
        seen = frozenset(event.ticket_id for event in _events(archive, ledger) if event.outcome is None)
        live = frozenset(ledger.live())
        versions, lines = control.versions(), control.lines()
    events = _events(archive, ledger)
    groups = [group for path in sorted(archive.glob("groups-*.avro")) for group in read_groups(path)]
    retired = {row for path in sorted(archive.glob("retired-*.avro")) for row in read_retired(path)}
    archived = {group.group.ticket.ticket_id for group in groups}  # a kill may leave a file beside what is left of it
    dropped = tuple(row for row in retired if row.ticket_id not in archived)
    return Evidence(events, groups, checkpoint, live, seen, versions, lines, dropped)


def _events(archive: Path, ledger: Ledger | None) -> list[LedgerEvent]:
    """Every event; those that move from Redis to the files meanwhile are read twice, never missed."""
    events: list[LedgerEvent] = []
    while ledger is not None and (batch := ledger.events(events[-1].event_id if events else "0-0", 10_000)):
        events += batch
    for path in sorted(archive.glob("ledger-*.avro")):
        events += read_ledger_events(path)
    return events


def read_checkpoint_meta(run_dir: Path) -> dict[str, Any]:
    """`meta` of the newest complete checkpoint, read without JAX; empty if there is none."""
    steps = [path for path in (run_dir / "checkpoints").glob("*/checkpoint.json") if _STEP.fullmatch(path.parent.name)]
    if not steps:
        return {}
    meta: dict[str, Any] = json.loads(max(steps, key=lambda path: int(path.parent.name)).read_text())["meta"]
    return meta


def examine(config: Config, evidence: Evidence) -> AuditReport:
    """Judges the evidence; a pure function."""
    evidence = dataclasses.replace(evidence, events=[*evidence.events, *_restored_events(evidence)])
    counts = recompute(evidence.events)
    meta = evidence.checkpoint
    archived_lags = lag_histogram(evidence)
    problems = [
        *_ledger_problems(counts, evidence),
        *_archive_problems(config, evidence),
        *_update_problems(config, evidence),
        *_lag_problems(config, evidence),
    ]
    trajectories = [trajectory for row in evidence.groups for trajectory in row.group.trajectories]
    sampled = [t.policy_versions[t.loss_mask.astype(bool)] for t in trajectories]
    return AuditReport(
        ledger={
            "issued": counts.issued,
            **{outcome.value: counts.outcomes[outcome] for outcome in Outcome},
            "pending": counts.pending,
        },
        line=int(meta.get("line", 0)),
        update=int(meta.get("update", 0)),
        num_groups=len(evidence.groups),
        num_trajectories=len(trajectories),
        mixed_version_trajectories=sum(np.unique(versions).size > 1 for versions in sampled),
        lag_histogram={int(lag): n for lag, n in meta.get("progress", {}).get("lag_histogram", {}).items()},
        archived_lag_histogram=archived_lags,
        problems=tuple(problems),
        bound=_largest_bound(config, evidence),
    )


def lag_histogram(evidence: Evidence) -> dict[int, int]:
    """Archived tokens by lag at each use; those of versions that are no longer known are left out."""
    histogram: collections.Counter[int] = collections.Counter()
    for row in evidence.groups:
        for trajectory in row.group.trajectories:
            if trajectory.exploration is not None:  # another policy's on purpose; the learner counts it apart
                continue
            numbers, counts = np.unique(
                trajectory.policy_versions[trajectory.loss_mask.astype(bool)], return_counts=True
            )
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                version = evidence.versions.get(number)
                if version is None:
                    continue
                for update in row.updates:
                    histogram[update_distance(version, row.line, update, dict(evidence.lines))] += count
    return dict(sorted(histogram.items()))


def _restored_events(evidence: Evidence) -> list[LedgerEvent]:
    """Events that were lost with an earlier epoch of Redis, as far as the archived groups prove them."""
    epoch = int(evidence.checkpoint.get("epoch", 1))
    issued = {event.ticket_id for event in evidence.events if event.outcome is None}
    ended = {event.ticket_id for event in evidence.events if event.outcome is not None}
    restored: list[LedgerEvent] = []
    for row in evidence.groups:
        name = row.group.ticket.ticket_id
        if int(name.split("-")[0]) >= epoch:
            continue
        if name not in issued:
            restored.append(LedgerEvent(f"0-{len(restored)}", "issued", name, row.group.ticket))
        if name not in ended:
            restored.append(LedgerEvent(f"0-{len(restored)}", "outcome", name, outcome=Outcome.TRAINED))
    return restored


def _ledger_problems(counts: LedgerCounts, evidence: Evidence) -> list[str]:
    problems = []
    if counts.unissued:
        problems.append(f"ended but never issued: {_names(counts.unissued)}")
    if counts.settled_twice:
        problems.append(f"ended more than once: {_names(counts.settled_twice)}")
    if evidence.live is not None:
        issued = {event.ticket_id for event in evidence.events if event.outcome is None}
        ended = {event.ticket_id for event in evidence.events if event.outcome is not None}
        if lost := evidence.seen - ended - evidence.live:
            problems.append(f"issued, not ended and not live: {_names(lost)}")
        if strange := evidence.live - issued:
            problems.append(f"live but never issued: {_names(strange)}")
    return problems


def _archive_problems(config: Config, evidence: Evidence) -> list[str]:
    problems = []
    names = collections.Counter(row.ticket_id for row in evidence.trained)
    if twice := [name for name, count in names.items() if count > 1]:
        problems.append(f"archived more than once: {_names(twice)}")
    most = config.learner.replay_ratio
    for row in evidence.trained:
        if not 1 <= len(row.updates) <= most or len(set(row.updates)) != len(row.updates):
            problems.append(f"ticket {row.ticket_id} was used by updates {list(row.updates)}, allowed {most}")
    issued = {event.ticket_id for event in evidence.events if event.outcome is None}
    if unknown := names.keys() - issued:
        problems.append(f"archived but never issued: {_names(unknown)}")
    _, outcomes, _ = final_outcomes(evidence.events)
    trained = {name for name, outcome in outcomes.items() if outcome is Outcome.TRAINED}
    if missing := trained - names.keys():
        problems.append(f"trained but not archived: {_names(missing)}")
    others = outcomes.keys() - trained
    if contradicted := others & names.keys():
        problems.append(f"archived as trained but ended otherwise: {_names(contradicted)}")
    return problems


def _update_problems(config: Config, evidence: Evidence) -> list[str]:
    """Every update up to the checkpoint used `groups_per_update` groups, and no ticket more often than allowed."""
    if not evidence.checkpoint:
        return []
    uses: dict[str, set[int]] = collections.defaultdict(set)
    lines = dict(evidence.lines) | {
        n: Line(n, parent, fork) for n, parent, fork in evidence.checkpoint.get("lines", [])
    }
    surviving = int(evidence.checkpoint["line"])
    for row in evidence.trained:
        uses[row.ticket_id].update(u for u in row.updates if on_line(row.line, u, surviving, lines))
    for name, updates in evidence.checkpoint["uses"].items():
        uses[name].update(updates)
    problems = []
    if often := [name for name, updates in uses.items() if len(updates) > config.learner.replay_ratio]:
        problems.append(f"trained more than {config.learner.replay_ratio} times: {_names(often)}")
    durable = int(evidence.checkpoint["update"])
    groups_of = collections.Counter(update for updates in uses.values() for update in updates if update < durable)
    expected = config.learner.groups_per_update
    # With Redis, groups may have been lost that a checkpoint had trained on and that no archive file held yet.
    least = expected if int(evidence.checkpoint["epoch"]) == 1 else 0
    if wrong := {n: groups_of[n] for n in range(durable) if not least <= groups_of[n] <= expected}:
        shown = ", ".join(f"update {update} used {count}" for update, count in list(wrong.items())[:_SHOWN])
        problems.append(f"{len(wrong)} updates did not use {expected} groups: {shown}")
    return problems


def _lag_problems(config: Config, evidence: Evidence) -> list[str]:
    bound = _largest_bound(config, evidence)
    problems = []
    counted = {int(lag): n for lag, n in evidence.checkpoint.get("progress", {}).get("lag_histogram", {}).items()}
    if over := sum(count for lag, count in counted.items() if lag > bound):
        problems.append(f"{over} trained tokens were older than {bound} updates, by the learner's count")
    # Under policy "mask" over-age tokens stay in the archive and out of the loss.
    if config.lag.straggler_policy != "mask" and (over := _over_age(evidence, bound)):
        problems.append(f"{over} archived tokens were older than their tickets allow when they were trained on")
    return problems


def _largest_bound(config: Config, evidence: Evidence) -> int:
    """N as the run began or, tuned, as it was when a ticket was issued."""
    issued = [event.ticket for event in evidence.events if event.ticket is not None]
    return max([config.effective_lag.token_updates, *(ticket.deadline - ticket.min_update for ticket in issued)])


def _over_age(evidence: Evidence, most: int) -> int:
    """Archived tokens that were older than the N of their ticket when they were trained on."""
    over = 0
    for row in evidence.groups:
        bound = min(row.group.ticket.deadline - row.group.ticket.min_update, most)
        lags = lag_histogram(dataclasses.replace(evidence, groups=[row]))
        over += sum(count for lag, count in lags.items() if lag > bound)
    return over


def _names(tickets: Iterable[str]) -> str:
    names = sorted(tickets)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tickets, {', '.join(names[:_SHOWN])}{more}"


def main(arguments: list[str]) -> int:
    """Audits the run directory named on the command line from its files alone; exit code 1 if something disagrees."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m asyncrl_jax.observe.audit RUN_DIR", file=sys.stderr)
        return 2
    try:
        report = audit(Path(arguments[0]))
    except ValueError as error:
        print(f"PROBLEM: {error}")
        return 1
    for name, count in report.ledger.items():
        print(f"{name:>12} {count}")
    for problem in report.problems:
        print(f"PROBLEM: {problem}")
    print(f"{'sound' if report.sound else 'NOT sound'}, as of update {report.update} of line {report.line}")
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
