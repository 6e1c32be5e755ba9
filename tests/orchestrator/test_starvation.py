"""ORCH-02: long episodes are trained in the share that was asked for, on a virtual clock."""

from __future__ import annotations

import dataclasses

from asyncrl_jax.config import LagConfig
from asyncrl_jax.orchestrator.policies import admission

GROUPS, SHORT, LONG = 8, 1, 5  # an update takes 8 groups; episodes take 1 or 5 steps of the clock, an update 1


@dataclasses.dataclass
class Episode:
    min_update: int
    deadline: int
    ends_at: int
    long: bool


def trained_share_of_long(wait_steps, bound=2, steps=600):
    """(trained share of long tasks, share of groups that were wasted, updates a step) with half of each asked for.

    Args:
      wait_steps: longest wait of the learner for running tickets that are due.
    """
    lag = LagConfig(actor_updates=0, token_updates=bound, slack_groups=2)
    running, pooled, count, update, waited = [], [], 0, 0, 0
    trained, expired = [0, 0], 0
    for now in range(steps):
        decision = admission.decide(
            admission.Observed(update, len(running) + len(pooled), len(running) + len(pooled), 1.0, 3.0),
            lag,
            mode="async",
            groups_per_update=GROUPS,
            replay_ratio=1,
            num_updates=10**6,
        )
        for _ in range(decision.num_tickets):
            long = count % 2 == 1
            count += 1
            running.append(Episode(decision.min_update, decision.deadline, now + (LONG if long else SHORT), long))
        pooled += [episode for episode in running if episode.ends_at <= now]
        running = [episode for episode in running if episode.ends_at > now]
        late = [episode for episode in running if episode.deadline <= update]
        if len(pooled) < GROUPS or (late and waited < wait_steps):
            waited += bool(late)
            continue
        waited = 0
        pooled.sort(key=lambda episode: episode.deadline)
        for episode in pooled[:GROUPS]:
            assert update - episode.min_update <= bound
            trained[episode.long] += 1
        pooled = pooled[GROUPS:]
        update += 1
        gone = [e for e in [*running, *pooled] if e.deadline < update]
        expired += len(gone)
        running = [e for e in running if e.deadline >= update]
        pooled = [e for e in pooled if e.deadline >= update]
    return trained[1] / sum(trained), expired / count, update / steps


def test_orch_02_with_a_wait_for_what_is_due_half_of_what_is_trained_is_long():
    share, wasted, _ = trained_share_of_long(wait_steps=LONG)
    assert abs(share - 0.5) < 0.02
    assert wasted < 0.01


def test_orch_02_without_that_wait_long_tasks_starve_and_the_waste_shows_it():
    """What the wait is for; its price is the learner's time, which the report states as its idle share."""
    share, wasted, rate = trained_share_of_long(wait_steps=0)
    assert share < 0.4
    assert wasted > 0.15
    _, _, rate_with_wait = trained_share_of_long(wait_steps=LONG)
    assert rate_with_wait < rate


def test_orch_02_a_bound_that_long_tasks_fit_into_costs_nothing():
    share, wasted, _ = trained_share_of_long(wait_steps=0, bound=8)
    assert abs(share - 0.5) < 0.02
    assert wasted < 0.01
