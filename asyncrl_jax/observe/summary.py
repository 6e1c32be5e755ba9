"""The figures of a run, computed from what it left: time series, evaluations, archive and checkpoint.

Nothing here asks a counter for what can be recomputed; see `audit.py` for the ledger.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import redis as redis_client

from asyncrl_jax.config import Config
from asyncrl_jax.learner.progress import lag_statistics
from asyncrl_jax.observe.audit import AuditReport, audit
from asyncrl_jax.observe.metrics import read_rows
from asyncrl_jax.observe.record import read_record
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.types import EvaluationResult

EVALUATIONS_FILE = "evaluations.json"


@dataclasses.dataclass(frozen=True)
class RunData:
    """What the figures and the picture of a run are made from."""

    config: Config
    rows: list[dict[str, Any]]  # of the learner, one an update, by rising update
    evaluations: list[EvaluationResult]  # by rising update
    sessions: list[tuple[float, float]]  # start and end in unix seconds
    audit: AuditReport
    num_versions: int  # published, v0 included
    restarts: Mapping[str, int]  # by part, over all sessions

    @property
    def demonstrated(self) -> tuple[int, ...]:
        return tuple(sorted(self.config.environment.demonstrated_levels))

    @property
    def undemonstrated(self) -> tuple[int, ...]:
        """Levels that training has and demonstrations never show."""
        levels = range(1, len(self.config.environment.level_weights) + 1)
        return tuple(level for level in levels if level not in self.demonstrated)

    @property
    def before(self) -> EvaluationResult | None:
        """Evaluation of the lowest update; of several, that with most tasks."""
        return min(self.evaluations, key=lambda e: (e.update, -sum(e.num_tasks.values())), default=None)

    @property
    def after(self) -> EvaluationResult | None:
        """Evaluation of the highest update; of several, that with most tasks."""
        return max(self.evaluations, key=lambda e: (e.update, sum(e.num_tasks.values())), default=None)

    @property
    def wall_s(self) -> float:
        """Seconds that the sessions of the run took together."""
        return sum(end - start for start, end in self.sessions)

    def active_s(self, moment: float) -> float:
        """Seconds of running before a moment; the pauses between sessions are left out."""
        return sum(max(0.0, min(moment, end) - start) for start, end in self.sessions)


def collect_run(run_dir: Path, config: Config, client: redis_client.Redis, restarts: Mapping[str, int]) -> RunData:
    """Gathers what a run left, and keeps the evaluations beside it, since Redis may be gone when somebody looks."""
    control = Control(client, Keys(config.redis.namespace))
    evaluations = sorted(control.evaluations(), key=lambda result: (result.update, result.finished_at))
    save_evaluations(run_dir, evaluations)
    rows = read_rows(run_dir / "metrics" / "learner.jsonl")
    return RunData(
        config=config,
        rows=rows,
        evaluations=evaluations,
        sessions=read_sessions(run_dir, rows, ended_at=time.time()),
        audit=audit(run_dir, client),
        num_versions=1 + max(control.versions(), default=-1),
        restarts=restarts,
    )


def read_sessions(run_dir: Path, rows: Sequence[Mapping[str, Any]], ended_at: float) -> list[tuple[float, float]]:
    """Start and end of every session. One that was killed ends with the last row that it wrote."""
    starts = [session["started_at"] for session in read_record(run_dir)]
    sessions = []
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        if following is None:
            sessions.append((start, max(start, ended_at)))
        else:
            times = [row["time"] for row in rows if start <= row["time"] < following]
            sessions.append((start, max(times, default=start)))
    return sessions


def save_evaluations(run_dir: Path, evaluations: Sequence[EvaluationResult]) -> None:
    """Writes the results into the run directory."""
    draft = run_dir / f"{EVALUATIONS_FILE}.tmp"
    draft.write_text(json.dumps([dataclasses.asdict(result) for result in evaluations], indent=1) + "\n")
    os.replace(draft, run_dir / EVALUATIONS_FILE)


def summarise(data: RunData) -> dict[str, Any]:
    """`summary.json`: success, freshness, throughput and ledger of a run. Shares are in [0, 1]; None is not known."""
    rows, before, after = data.rows, data.before, data.after
    last = rows[-1] if rows else {}
    bound = data.config.effective_lag.token_updates
    histogram = data.audit.lag_histogram
    num_tokens = sum(histogram.values())
    lag = lag_statistics(histogram) if num_tokens else {"mean": None, "p95": None, "max": None}
    return {
        "mode": data.config.mode,
        "seed": data.config.seed,
        "updates": data.audit.update,
        "versions": data.num_versions,
        "wall_s": round(data.wall_s, 1),
        "success_before": _success(before, data.demonstrated),
        "success_after": _success(after, data.demonstrated),
        "success_levels": list(data.demonstrated),
        "success_undemonstrated_before": _success(before, data.undemonstrated),
        "success_undemonstrated_after": _success(after, data.undemonstrated),
        "undemonstrated_levels": list(data.undemonstrated),
        "success_by_level_before": _by_level(before),
        "success_by_level_after": _by_level(after),
        "evaluation_tasks_before": _tasks(before),
        "evaluation_tasks_after": _tasks(after),
        "reward_before": None if before is None else round(before.mean_reward, 4),
        "reward_after": None if after is None else round(after.mean_reward, 4),
        "evaluations": len(data.evaluations),
        "learner_busy": _busy(rows),
        "tokens_trained": num_tokens,
        "tokens_per_s": _ratio(num_tokens, data.wall_s),
        "tokens_generated": int(last.get("num_tokens_generated_total", 0)),
        "effective_token_share": last.get("effective_token_share"),
        "filtered_groups": int(last.get("filtered_groups", 0)),
        "overfilled_groups": int(last.get("overfilled_groups", 0)),
        "starved_s": round(sum(row.get("starved_s", 0.0) for row in rows), 1),
        "reward_last": last.get("reward"),
        "lag": {
            "bound": bound,
            **lag,
            "over_bound_tokens": sum(count for age, count in histogram.items() if age > max(bound, data.audit.bound)),
        },
        "ledger": data.audit.ledger,
        "ledger_problems": list(data.audit.problems),
        "mixed_version_trajectories": data.audit.mixed_version_trajectories,
        "restarts": dict(data.restarts),
        "sessions": len(data.sessions),
    }


def wilson_interval(successes: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """95 % confidence interval of a share (Wilson 1927); it stays inside [0, 1] and is honest at both ends.

    Raises:
      ValueError: if `total` is 0.
    """
    if total == 0:
        raise ValueError("no trials, so there is no interval")
    share = successes / total
    centre = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def _success(result: EvaluationResult | None, levels: tuple[int, ...]) -> float | None:
    if result is None or not any(result.num_tasks.get(level) for level in levels):
        return None
    return round(result.success(levels), 4)


def _by_level(result: EvaluationResult | None) -> dict[str, float]:
    if result is None:
        return {}
    levels = sorted(level for level, count in result.num_tasks.items() if count)
    return {str(level): round(result.success((level,)), 4) for level in levels}


def _tasks(result: EvaluationResult | None) -> dict[str, int]:
    return {str(level): count for level, count in sorted(result.num_tasks.items())} if result else {}


def _busy(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of the time between the first and last group that the learner computed rather than waited."""
    computed = sum(row["step_s"] for row in rows)
    return _ratio(computed, computed + sum(row["wait_s"] for row in rows))


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole > 0 else None
