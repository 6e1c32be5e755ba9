"""What a simulated run came to."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from asyncrl_jax.learner.progress import lag_statistics

if TYPE_CHECKING:
    from asyncrl_jax.simulate.simulation import Simulation


@dataclasses.dataclass
class Spent:
    """Running totals, in simulated seconds, tokens and counts."""

    busy_s: float = 0.0  # of the learner
    wait_s: float = 0.0  # of the learner, for groups
    starved_s: float = 0.0  # of that, with fewer pooled than an update takes
    straggler_s: float = 0.0  # of that, for running tickets that were due
    wasted_tokens: float = 0.0  # sampled, and never trained on
    partial_groups: int = 0
    crashes: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Times in s, shares in [0, 1], lags in updates. Busy shares mean what `summary.json` of a run means by them."""

    wall_s: float
    updates: int
    seconds_per_update: float | None  # None without an update
    learner_busy: float
    actor_busy: float  # slots with an episode ÷ slots
    actors_end: int
    actors_most: int
    lag_mean: float
    lag_p95: float
    lag_max: float
    over_lag_tokens: float  # trained past the bound of their ticket: 0 as long as tickets have deadlines
    tokens_trained: int
    tokens_per_s: float
    wasted_share: float  # sampled tokens that were never trained on ÷ all sampled tokens that have ended
    starved_s: float
    straggler_s: float
    partial_groups: int
    crashes: int
    token_updates: int  # N at the end
    ledger: dict[str, int]
    trained_share: dict[str, float]  # of the groups that have ended, by bucket
    lag_histogram: dict[int, int]  # trained tokens by lag
    decisions: dict[str, int]  # by policy and action
    events: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def summarise(run: Simulation) -> Outcome:
    """The figures of a run as it stands."""
    spent, trainer, now = run.spent, run.trainer, max(run.now, 1e-9)
    lags = lag_statistics(trainer.lags)
    trained = sum(trainer.lags.values())
    wasted = spent.wasted_tokens + trainer.masked_tokens
    running = sum(flight.occupied(run.now) for flight in run.fleet.running())
    issued = sum(run.controller.issued.values())
    ledger = {name: run.ledger[name] for name in ("trained", "expired", "filtered", "failed")}
    decided = collections.Counter(f"{one.policy}/{one.action}" for _, one in run.controller.decisions)
    return Outcome(
        wall_s=run.now,
        updates=run.update,
        seconds_per_update=run.now / run.update if run.update else None,
        learner_busy=spent.busy_s / max(spent.busy_s + spent.wait_s, 1e-9),
        actor_busy=(run.fleet.slot_seconds + running) / max(run.fleet.slot_seconds_there(now), 1e-9),
        actors_end=run.fleet.size,
        actors_most=run.most_actors,
        lag_mean=lags["mean"],
        lag_p95=lags["p95"],
        lag_max=lags["max"],
        over_lag_tokens=trainer.over_lag_tokens,
        tokens_trained=trained,
        tokens_per_s=trained / now,
        wasted_share=wasted / max(wasted + trained, 1e-9),
        starved_s=spent.starved_s,
        straggler_s=spent.straggler_s,
        partial_groups=spent.partial_groups,
        crashes=spent.crashes,
        token_updates=run.controller.token_updates,
        ledger={"issued": issued, **ledger, "pending": run.num_pending},
        trained_share={bucket: run.trained[bucket] / count for bucket, count in sorted(run.ended.items())},
        lag_histogram=dict(sorted(trainer.lags.items())),
        decisions=dict(sorted(decided.items())),
        events=run.num_events,
    )
