"""A run that never ran: plausible figures from a seed, for the picture and the page."""

from __future__ import annotations

import random

from asyncrl_jax.config import Config
from asyncrl_jax.observe.audit import AuditReport
from asyncrl_jax.observe.summary import RunData
from asyncrl_jax.types import EvaluationResult, Outcome

STARTED_AT = 1_000_000.0
WARM_START_S = 45.0


def evaluation(update: int, shares: dict[int, float], num_tasks: int, finished_at: float) -> EvaluationResult:
    return EvaluationResult(
        evaluation_id=f"update-{update}",
        version=update,
        update=update,
        num_tasks=dict.fromkeys(shares, num_tasks),
        num_successes={level: round(share * num_tasks) for level, share in shares.items()},
        mean_reward=1.0,
        finished_at=finished_at,
    )


def run_data(seed: int = 0, num_updates: int = 120, config: Config | None = None) -> RunData:
    rng = random.Random(seed)
    now = STARTED_AT + WARM_START_S
    rows, evaluations, histogram = [], [], dict.fromkeys(range(5), 0)
    for update in range(num_updates + 1):
        skill = 1 - 0.7 * 0.96**update
        if update % 20 == 0:
            shares = {1: min(skill + 0.03, 1.0), 2: skill - 0.05, 3: max(0.02, skill - 0.35)}
            evaluations.append(evaluation(update, shares, 800 if update in (0, num_updates) else 200, now + 3))
        if update == num_updates:
            break
        wait_s, step_s = rng.uniform(0.02, 0.3), rng.uniform(0.25, 0.35)
        now += wait_s + step_s
        tokens = rng.randint(2200, 2800)
        lag_max = min(update, rng.choice([2, 3, 3, 4]))
        histogram[lag_max] += tokens // 10
        histogram[min(1, lag_max)] += tokens - tokens // 10
        rows.append(
            {
                "time": now,
                "step": update + 1,
                "tokens": tokens,
                "lag_mean": min(update, rng.uniform(0.9, 1.5)),
                "lag_p95": min(update, 2),
                "lag_max": lag_max,
                "success_train": min(1.0, max(0.0, skill - 0.1 + rng.gauss(0, 0.04))),
                "reward": skill,
                "wait_s": wait_s,
                "step_s": step_s,
            }
        )
    issued = num_updates * 16 + 12
    audit = AuditReport(
        ledger={
            "issued": issued,
            **{outcome.value: 0 for outcome in Outcome},
            "trained": num_updates * 16,
            "expired": 4,
            "pending": 8,
        },
        line=0,
        update=num_updates,
        num_groups=num_updates * 16,
        num_trajectories=num_updates * 128,
        mixed_version_trajectories=731,
        lag_histogram=histogram,
        archived_lag_histogram=histogram,
        problems=(),
    )
    return RunData(
        config=config or Config(),
        rows=rows,
        evaluations=evaluations,
        sessions=[(STARTED_AT, now + 10)],
        audit=audit,
        num_versions=num_updates + 1,
        restarts={"actor-1": 1},
    )
