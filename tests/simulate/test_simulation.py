import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl_jax.config import Config, override
from asyncrl_jax.orchestrator.policies import admission
from asyncrl_jax.simulate.controller import Controller, Tallies
from asyncrl_jax.simulate.inputs import Inputs
from asyncrl_jax.simulate.simulation import Simulation, simulate

BASE = {"learner.groups_per_update": 4, "learner.group_size": 4, "actor.num_hosts": 4, "actor.slots": 6}


def config_of(**changes):
    return override(Config(), BASE | {"learner.num_updates": 30} | changes)


QUICK = Inputs(
    duration_s=0.0,
    episode_s="lognormal:2:1.0",
    update_s="lognormal:1:0.2",
    publish_s=0.3,
    swap_s=0.2,
    swap_pause_s=0.05,
)


@st.composite
def small_runs(draw):
    mode = draw(st.sampled_from(["async", "async", "sync", "semi_async"]))
    a = draw(st.integers(0, 3))
    n = a + draw(st.integers(0, 4))
    lag = n - a if mode == "async" else 0
    changes = {
        "mode": mode,
        "seed": draw(st.integers(0, 10_000)),
        "lag.actor_updates": a,
        "lag.token_updates": n,
        "lag.semi_async_batches": draw(st.integers(1, 4)),
        "lag.straggler_policy": draw(st.sampled_from(["expire", "mask", "partial"])),
        "lag.straggler_wait_s": draw(st.sampled_from([0.0, 1.0, 20.0])),
        "learner.replay_ratio": draw(st.integers(1, lag + 1)),
        "learner.num_updates": 12,
        "weights.publish_every_updates": draw(st.integers(1, a + 1)) if mode == "async" else 1,
        "weights.keep_versions": 16,
        "actor.swap_at": draw(st.sampled_from(["token", "episode"])),
        "pool.refill_groups_per_update": draw(st.sampled_from([0, 3])),
        "redis.claim_idle_s": 2.0,
    }
    inputs = dataclasses.replace(
        QUICK,
        duration_s=400.0,
        episode_s=draw(st.sampled_from(["lognormal:2:1.5", "constant:1", "pareto:0.5:1.1", "exponential:3"])),
        crash_every_h=draw(st.sampled_from([0.0, 0.005])),
        restart_s=3.0,
        episode_fault_share=draw(st.sampled_from([0.0, 0.3])),
        swap_s=draw(st.sampled_from([0.0, 0.5, 4.0])),
        slow_share=draw(st.sampled_from([0.0, 0.5])),
    )
    return config_of(**changes), inputs


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(small_runs())
def test_no_token_is_over_lag_and_the_ledger_balances_whatever_happens(case):
    config, inputs = case
    run = Simulation(config, inputs)
    while run.step():
        assert sum(run.controller.issued.values()) == run.ledger.total() + run.num_pending
        assert run.trainer.over_lag_tokens == 0
    outcome = run.outcome()
    ratio, batch = config.learner.replay_ratio, config.learner.groups_per_update
    assert max(outcome.lag_histogram, default=0) <= config.most_token_updates
    assert outcome.ledger["trained"] * ratio >= outcome.updates * batch - ratio * outcome.ledger["pending"]
    assert outcome.ledger["trained"] <= outcome.updates * batch
    assert 0 <= outcome.actor_busy <= 1 + 1e-9
    assert 0 <= outcome.wasted_share <= 1


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(small_runs())
def test_no_token_is_sampled_with_weights_older_than_its_ticket_asks(case):
    run = Simulation(*case)
    while run.step():
        for flight in run.fleet.running():
            assert run.versions.at(min(flight.starts)) >= flight.min_update


@pytest.mark.parametrize("seed", range(3))
def test_counting_only_what_is_outstanding_does_not_bound_lag_and_tickets_with_deadlines_do(seed):
    changes = {"seed": seed, "learner.num_updates": 200, "lag.straggler_wait_s": 0.0}
    heavy = dataclasses.replace(QUICK, episode_s="lognormal:0.4:2.0", update_s="constant:0.5")
    loose = simulate(config_of(**changes), dataclasses.replace(heavy, deadlines=False))
    held = simulate(config_of(**changes), heavy)
    assert loose.lag_max > 2 * 4
    assert loose.over_lag_tokens > 0
    assert held.lag_max <= 4
    assert held.over_lag_tokens == 0
    assert held.ledger["expired"] > 0  # the price


def test_sync_is_exactly_on_policy():
    outcome = simulate(config_of(mode="sync"), QUICK)
    assert outcome.updates == 30
    assert set(outcome.lag_histogram) == {0}
    assert outcome.ledger["expired"] == 0


def test_the_same_seed_gives_the_same_run_and_another_does_not():
    first, second, other = (simulate(config_of(seed=seed), QUICK) for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_async_is_faster_than_sync_when_episodes_have_a_heavy_tail():
    inputs = dataclasses.replace(QUICK, episode_s="lognormal:0.3:1.0")
    sync, asynchronous = (simulate(config_of(mode=mode), inputs) for mode in ("sync", "async"))
    assert asynchronous.wall_s < 0.8 * sync.wall_s
    assert asynchronous.learner_busy > sync.learner_busy


def test_a_learner_that_is_the_bottleneck_sets_the_pace():
    inputs = dataclasses.replace(QUICK, episode_s="constant:0.1", update_s="constant:2", dispatch_s=0.0)
    outcome = simulate(config_of(), inputs)
    assert outcome.learner_busy > 0.9
    assert outcome.wall_s == pytest.approx(30 * 2, rel=0.1)


def events(actors):
    config = config_of(
        **{
            "actor.num_hosts": actors,
            "learner.groups_per_update": actors,
            "learner.num_updates": 10,
            "lag.straggler_wait_s": 0.0,
        }
    )
    return simulate(config, QUICK).events


def test_updates_beside_episodes_take_longer_where_the_machine_is_shared():
    shared = dataclasses.replace(QUICK, update_s="constant:1;constant:3", update_load="0;0.5")
    alone = simulate(config_of(mode="sync"), shared)
    assert alone.learner_busy * alone.wall_s == pytest.approx(30)
    beside = simulate(config_of(), shared)
    assert 30 < beside.learner_busy * beside.wall_s <= 90


def test_events_grow_with_groups_and_at_most_linearly():
    small, large = events(50), events(400)
    assert large <= 8 * small * 1.1


def test_events_do_not_grow_with_the_length_of_episodes_or_the_size_of_groups():
    few = simulate(config_of(), QUICK)
    many = simulate(config_of(**{"learner.group_size": 32, "actor.slots": 48}), QUICK)
    assert many.events / many.ledger["issued"] <= few.events / few.ledger["issued"] * 1.5


def test_it_decides_with_the_orchestrators_own_admission(monkeypatch):
    asked = []
    decide = admission.decide

    def watched(observed, lag, **settings):
        asked.append(observed)
        return decide(observed, lag, **settings)

    monkeypatch.setattr(admission, "decide", watched)
    outcome = simulate(config_of(), QUICK)
    assert len(asked) >= outcome.updates
    assert max(one.outstanding_uses for one in asked) <= 3 * 4 + 4  # N - A + 1 updates' worth


def test_n_is_raised_when_the_learner_starves_and_data_is_good_and_lowered_when_it_is_not():
    tuned = {
        "orchestrator.tuning.enabled": True,
        "learner.num_updates": 150,
        "actor.num_hosts": 12,
        "weights.keep_versions": 16,
    }
    inputs = dataclasses.replace(QUICK, episode_s="lognormal:4:1.0")
    good = simulate(config_of(**tuned), dataclasses.replace(inputs, kl_per_update=0.0001))
    bad = simulate(config_of(**tuned), dataclasses.replace(inputs, kl_per_update=0.03))
    assert good.token_updates > 4
    assert good.decisions.get("lag/raise")
    assert bad.token_updates < 4
    assert bad.decisions.get("lag/lower")


def test_an_outage_opens_the_breaker_and_its_end_closes_it():
    inputs = dataclasses.replace(QUICK, outage_from_s=20.0, outage_s=30.0)
    outcome = simulate(config_of(**{"learner.num_updates": 100}), inputs)
    assert outcome.decisions["breaker/open"] >= 1
    assert outcome.decisions["breaker/closed"] >= 1
    assert outcome.updates == 100
    calm = simulate(config_of(**{"learner.num_updates": 100}), QUICK)
    assert outcome.wall_s > calm.wall_s + 20
    assert "breaker/open" not in calm.decisions


def test_a_crashed_actors_tickets_are_delivered_again_and_none_is_lost():
    config = config_of(**{"redis.claim_idle_s": 2.0, "learner.num_updates": 60, "mode": "sync"})
    outcome = simulate(config, dataclasses.replace(QUICK, crash_every_h=0.01, restart_s=5.0))
    assert outcome.crashes > 5
    assert outcome.updates == 60
    assert outcome.ledger["trained"] == 60 * 4
    assert outcome.wasted_share > 0


@pytest.mark.parametrize("policy", ["expire", "mask", "partial"])
def test_what_happens_to_stragglers_is_what_the_policy_says(policy):
    inputs = dataclasses.replace(QUICK, episode_s="lognormal:0.5:2.0", update_s="constant:0.5")
    changes = {"lag.straggler_policy": policy, "lag.straggler_wait_s": 0.5, "learner.num_updates": 100}
    outcome = simulate(config_of(**changes), inputs)
    assert outcome.over_lag_tokens == 0
    assert (outcome.partial_groups > 0) == (policy == "partial")
    assert outcome.straggler_s > 0


def test_members_given_up_ahead_leave_little_to_wait_for():
    inputs = dataclasses.replace(QUICK, episode_s="lognormal:0.5:1.5", update_s="constant:0.5")
    partial = {"lag.straggler_policy": "partial", "lag.straggler_wait_s": 0.5, "lag.token_updates": 6}
    partial |= {"actor.heartbeat_s": 0.1, "learner.num_updates": 200}
    due, ahead = (simulate(config_of(**partial, **{"lag.straggler_lead_updates": lead}), inputs) for lead in (0, 1))
    assert due.straggler_s > 0
    assert ahead.straggler_s < 0.1 * due.straggler_s
    assert ahead.wall_s < due.wall_s
    assert ahead.over_lag_tokens == 0
    assert ahead.ledger["issued"] == sum(ahead.ledger[name] for name in ahead.ledger if name != "issued")


def test_long_episodes_are_not_starved_while_the_learner_waits_for_them():
    levels = {"environment.level_weights": (1.0, 1.0), "lag.straggler_wait_s": 1000.0, "learner.num_updates": 100}
    inputs = dataclasses.replace(QUICK, episode_s="constant:0.5;constant:10", update_s="constant:1")
    patient = simulate(config_of(**levels), inputs)
    hasty = simulate(config_of(**levels | {"lag.straggler_wait_s": 0.0}), inputs)
    short, long = patient.trained_share.values()
    assert short == long == 1.0
    assert hasty.trained_share["arithmetic/2"] < hasty.trained_share["arithmetic/1"]


def test_slower_actors_take_longer():
    even = simulate(config_of(), QUICK)
    uneven = simulate(config_of(), dataclasses.replace(QUICK, slow_share=0.5, slow_factor=5.0))
    assert uneven.wall_s > even.wall_s


def test_what_is_aimed_at_does_not_fall_with_the_time_that_the_learner_waits():
    """Little's law is asked with the seconds of an update itself; the time between updates has its waits in it."""
    config, aimed = config_of(**{"lag.token_updates": 8, "weights.keep_versions": 12}), []
    for update_s in (1.0, 10.0):
        controller = Controller(config)
        beat = {"step_s": 1.0, "service_s": 3.0, "update_s": update_s, "idle_share": 0.0}
        controller.round(0.0, 5, beat, 4, Tallies())
        aimed.append(len(controller.admit(5, 0, 0, beat)))
    assert aimed == [4 + 3 * 4 + config.lag.slack_groups] * 2


@pytest.mark.parametrize("start", [1, 64])
def test_autoscale_finds_the_fleet_that_feeds_the_learner_from_either_side(start):
    """64 episodes of 20 s for every update of 10 s are 128 slots: 16 actors of 8, and a tenth to spare."""
    changes = {
        "learner.groups_per_update": 16,
        "learner.num_updates": 100_000,
        "lag.token_updates": 8,
        "weights.keep_versions": 12,
        "actor.slots": 8,
        "orchestrator.autoscale.enabled": True,
        "orchestrator.autoscale.max_actors": 64,
    }
    inputs = Inputs(duration_s=3600.0, episode_s="constant:20", update_s="constant:10", publish_s=1.0, swap_s=1.0)
    run = Simulation(config_of(**changes, **{"actor.num_hosts": start}), inputs)
    run.finish()
    outcome = run.outcome()
    assert 16 <= outcome.actors_end <= 24
    fixed = simulate(
        config_of(**changes | {"orchestrator.autoscale.enabled": False}, **{"actor.num_hosts": 64}), inputs
    )
    last = [entry for at, entry in run.controller.decisions if entry.policy == "autoscale" and at > 1800]
    assert last == [], "it has settled"
    assert outcome.updates >= (0.95 if start == 64 else 0.85) * fixed.updates, "the learner does not wait for it"
    assert outcome.ledger["failed"] == 0, "nothing is lost by taking actors away"
    assert outcome.ledger["issued"] == sum(n for name, n in outcome.ledger.items() if name != "issued")


def test_actors_of_a_class_have_its_slots():
    config = config_of(
        **{
            "orchestrator.fleet.classes": ("cheap:1-2", "dear:1-9"),
            "orchestrator.fleet.class_settings": ("cheap.slots=2", "dear.slots=7"),
        }
    )
    run = Simulation(config, QUICK)
    assert run.fleet.slot_seconds_there(10.0) == (2 + 7 + 2 + 7) * 10.0
    run.fleet.resize(5, 10.0, 1.0)
    run.fleet.resize(3, 20.0, 1.0)
    assert run.fleet.slot_seconds_there(30.0) == 18 * 10.0 + 25 * 10.0 + 11 * 10.0
    outcome = simulate(config, QUICK)
    assert outcome.updates == 30
    assert 0 < outcome.actor_busy <= 1


def test_a_policy_that_has_run_off_waits_for_data_as_fresh_as_what_is_published():
    config = override(
        Config(),
        {
            "learner.groups_per_update": 4,
            "learner.group_size": 4,
            "learner.num_updates": 40,
            "weights.publish_every_updates": 3,
            "orchestrator.tuning.enabled": True,
        },
    )
    inputs = Inputs(duration_s=4000.0, episode_s="constant:5", update_s="constant:5", kl_per_update=0.06)
    run = Simulation(config, inputs)
    run.finish()
    assert run.update == 40
    assert "wait_for_fresh" in {decision.action for _, decision in run.controller.decisions}
