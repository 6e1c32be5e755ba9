"""Admission: the lag bound follows from what is issued, in every mode, whatever the actors do."""

import collections
import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_jax.config import Config, LagConfig, WeightsConfig
from asyncrl_jax.orchestrator.policies import admission
from asyncrl_jax.orchestrator.policies.admission import Observed

ASYNC = LagConfig(actor_updates=2, token_updates=4, slack_groups=4)


def decide(observed: Observed, mode: str = "async", lag: LagConfig = ASYNC, **kwargs):
    options = {"groups_per_update": 16, "replay_ratio": 1, "num_updates": 100} | kwargs
    return admission.decide(observed, lag, mode=mode, **options)


def test_deadline_is_the_bound_from_the_oldest_weights_allowed():
    decision = decide(Observed(update=10, outstanding_tickets=0, outstanding_uses=0, step_s=0, service_s=0))
    assert (decision.min_update, decision.deadline) == (8, 12)


def test_target_follows_littles_law_and_stays_below_the_bound():
    # 16 groups every 0.4 s is 40 groups a second; 0.1 s of service is 4 groups, plus the update under way, plus slack
    decision = decide(Observed(10, 0, 0, step_s=0.4, service_s=0.1))
    assert decision.target_uses == 16 + 4 + 4
    assert decide(Observed(10, 0, 0, step_s=0.4, service_s=60.0)).target_uses == (4 - 2 + 1) * 16


def test_nothing_is_issued_beyond_the_last_update():
    assert decide(Observed(99, 0, 0, 0.4, 0.1)).num_tickets == 16
    assert decide(Observed(100, 0, 0, 0.4, 0.1)).num_tickets == 0


def test_sync_issues_one_update_at_lag_zero():
    lag = dataclasses.replace(Config(mode="sync")).effective_lag
    decision = decide(Observed(7, 0, 0, 0.4, 0.1), mode="sync", lag=lag)
    assert (decision.num_tickets, decision.min_update, decision.deadline) == (16, 7, 7)
    assert decide(Observed(7, 16, 16, 0.4, 0.1), mode="sync", lag=lag).num_tickets == 0
    assert decide(Observed(7, 15, 15, 0.4, 0.1), mode="sync", lag=lag).num_tickets == 1  # one failed: replaced


def test_semi_async_releases_a_period_together():
    lag = Config(mode="semi_async").effective_lag
    first = decide(Observed(8, 0, 0, 0.4, 0.1), mode="semi_async", lag=lag)
    assert (first.num_tickets, first.min_update, first.deadline) == (4 * 16, 8, 11)
    assert decide(Observed(9, 3 * 16, 3 * 16, 0.4, 0.1), mode="semi_async", lag=lag).num_tickets == 0


@settings(deadline=None, max_examples=150)
@given(
    mode=st.sampled_from(["sync", "semi_async", "async"]),
    bounds=st.tuples(st.integers(0, 3), st.integers(0, 4)),
    groups=st.integers(1, 4),
    replay=st.integers(1, 3),
    period=st.integers(1, 4),
    heavy_tail=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_orch_03_lag_is_bounded_and_the_run_never_deadlocks(mode, bounds, groups, replay, period, heavy_tail, seed):
    """ORCH-03. Actors of any speed, tickets that fail, weights as old as allowed: no lag above N, all updates done."""
    actor_updates, extra = bounds
    replay = min(replay, extra + 1) if mode == "async" else 1
    lag = Config(
        mode=mode,
        lag=LagConfig(actor_updates=actor_updates, token_updates=actor_updates + extra, semi_async_batches=period),
        weights=WeightsConfig(keep_versions=16),
    ).effective_lag
    rng = random.Random(seed)
    num_updates, update, clock = 12, 0, 0
    running: list[tuple[int, admission.Admission]] = []  # (finishes at, its ticket)
    pooled: list[list] = []  # [ticket, uses]
    lags: collections.Counter[int] = collections.Counter()
    while update < num_updates:
        clock += 1
        assert clock < 50_000, "deadlock"
        done_uses = sum(uses for _, uses in pooled)
        decision = decide(
            Observed(update, len(running) + len(pooled), (len(running) + len(pooled)) * replay - done_uses, 1.0, 2.0),
            mode=mode,
            lag=lag,
            groups_per_update=groups,
            replay_ratio=replay,
            num_updates=num_updates,
        )
        outstanding = (len(running) + len(pooled)) * replay - done_uses
        if decision.num_tickets:
            assert outstanding + decision.num_tickets * replay <= max(
                (lag.token_updates - lag.actor_updates + 1) * groups if mode == "async" else period * groups,
                groups * replay,
            )
        running += [
            (clock + (int(rng.paretovariate(0.7)) % 200 if heavy_tail else rng.randrange(3)), decision)
            for _ in range(decision.num_tickets)
        ]
        arrived = [ticket for at, ticket in running if at <= clock]
        running = [(at, ticket) for at, ticket in running if at > clock]
        pooled += [[ticket, 0] for ticket in arrived if rng.random() > 0.1]  # the others failed
        pooled = [p for p in pooled if p[0].deadline >= update]
        running = [(at, ticket) for at, ticket in running if ticket.deadline >= update]
        pooled.sort(key=lambda p: p[0].deadline)
        if len(pooled) >= groups:
            for p in pooled[:groups]:
                p[1] += 1
                lags[update - p[0].min_update] += 1  # sampled with the oldest weights allowed
            pooled = [p for p in pooled if p[1] < replay]
            update += 1
    assert max(lags) <= lag.token_updates
    if mode == "sync":
        assert set(lags) == {0}


def test_fresh_data_of_a_run_that_publishes_seldom_is_asked_of_weights_that_there_are():
    """Weights of the updates in between are never published: a ticket that asked for them would wait for ever."""
    for update in range(7):
        decision = decide(Observed(update, 0, 0, 1.0, 1.0, fresh=True), publish_every_updates=3)
        assert (decision.min_update, decision.deadline) == (update - update % 3, update - update % 3 + 2)
        assert decision.target_uses == 16 * (3 - update % 3)


def test_more_settled_than_is_pending_asks_for_no_more_than_the_bound():
    assert decide(Observed(10, -(10**9), -(10**9), 0.4, 60.0)).num_tickets == (4 - 2 + 1) * 16
