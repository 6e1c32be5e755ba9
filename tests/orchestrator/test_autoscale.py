"""The size of the fleet: three numbers together, cool-downs, draining, a budget that is a limit."""

import dataclasses
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from asyncrl_jax.config import Config, override
from asyncrl_jax.config_fleet import AutoscaleConfig, FleetConfig
from asyncrl_jax.orchestrator.policies import autoscale
from asyncrl_jax.orchestrator.policies.autoscale import Observed, State

CONFIG = AutoscaleConfig(
    enabled=True,
    max_actors=16,
    window_s=10.0,
    grow_cooldown_s=20.0,
    shrink_cooldown_s=60.0,
    drain_limit_s=100.0,
    learner_patience_s=200.0,
)
FLEET = FleetConfig()
STARVED = {"starved": 0.5, "busy": 1.0, "stale": 0.2, "level": "fast"}
SPARE = {"starved": 0.0, "busy": 0.4, "stale": 0.2, "level": "normal"}


class Run:
    """A policy over time. Every member is alive; those that drain have nothing left when `lets_go`."""

    def __init__(self, size=4, config=CONFIG, fleet=FLEET, copies=1):
        self.state, self.now, self.config, self.fleet = State(size, size, copies), 0.0, config, fleet
        self.log, self.lets_go = [], True

    def see(self, seconds=1, **observed):
        for _ in range(seconds):
            self.now += 1.0
            leaving = frozenset(range(self.state.target, self.state.size)) if self.lets_go else frozenset()
            given = {"alive": frozenset(range(self.state.size)), "drained": leaving} | observed
            decided = autoscale.decide(self.state, Observed(self.now, **given), self.config, self.fleet)
            self.state = decided.state
            self.log += [(self.now, entry) for entry in decided.log]
        return self.state

    def actions(self):
        return [entry.action for _, entry in self.log]


def test_a_starved_learner_whose_actors_are_all_busy_gets_more():
    run = Run()
    assert run.see(9, **STARVED).target == 4, "one window passes before a judgement"
    assert run.see(20, **STARVED).target == 8
    ((_, entry),) = run.log
    assert (entry.policy, entry.action, entry.subject) == ("autoscale", "grow", "actors")
    assert entry.numbers == {
        "starved_share": 0.5,
        "busy_share": 1.0,
        "stale_share": pytest.approx(0.2),
        "size": 8.0,
        "hourly_cost": 0.0,
    }


@pytest.mark.parametrize(
    "but",
    [
        {"starved": 0.05},
        {"busy": 0.5},
        {"stale": 0.9},
        {"level": "slow"},
        {"alive": frozenset({0, 1, 2})},
        {"training": False},
    ],
    ids=lambda but: next(iter(but)),
)
def test_no_one_number_alone_adds_an_actor(but):
    run = Run()
    assert run.see(200, **STARVED | but).target == 4
    assert run.log == []


@pytest.mark.parametrize("but", [{"starved": 0.08}, {"busy": 0.9}, {"level": "fast"}], ids=lambda but: next(iter(but)))
def test_no_one_number_alone_takes_one_away(but):
    run = Run()
    assert run.see(500, **SPARE | but).target == 4
    assert run.log == []


def test_spare_actors_drain_before_they_are_removed():
    run = Run()
    run.lets_go = False
    state = run.see(61, **SPARE)
    assert (state.target, state.size) == (2, 4)
    assert run.see(50, **SPARE).size == 4, "they have work left"
    run.lets_go = True
    assert run.see(1, **SPARE).size == 2
    assert run.actions() == ["drain", "remove"]


def test_who_does_not_end_in_time_is_removed_all_the_same():
    run = Run()
    run.lets_go = False
    run.see(61, **SPARE)
    changed_at = run.state.changed_at
    while run.state.size == 4:
        run.see(1, **SPARE)
    assert run.now - changed_at == CONFIG.drain_limit_s


def test_a_draining_actor_stays_when_it_is_wanted_again():
    run = Run()
    run.lets_go = False
    run.see(61, **SPARE)
    state = run.see(21, **STARVED)
    assert (state.target, state.size) == (4, 4)
    assert run.actions() == ["drain", "grow"]


def test_stale_work_that_piles_up_costs_one_actor_at_a_time():
    run = Run()
    run.see(61, starved=0.0, busy=1.0, stale=0.95, level="slow")
    assert run.state.target == 3


def test_a_change_that_is_hardly_one_is_none():
    run = Run(size=10)
    assert run.see(300, starved=0.0, busy=0.85, stale=0.2, level="normal").target == 10


def test_a_member_that_is_dead_has_nothing_to_finish():
    run = Run()
    run.lets_go = False
    run.see(61, **SPARE)
    assert run.see(1, **SPARE, alive=frozenset({0, 1, 2})).size == 3


def test_the_budget_is_a_limit_also_when_it_falls():
    fleet = FleetConfig(classes=("cheap:4:1.0", "dear:8:5.0"))
    config = dataclasses.replace(CONFIG, hourly_budget=20.0, learner_price=6.0)
    run = Run(size=2, config=config, fleet=fleet)
    assert run.see(400, **STARVED).target == 6, "4 × 1 + 2 × 5 + 6 = 20"
    assert fleet.members(6) == {"cheap": 4, "dear": 2}
    run.config = dataclasses.replace(config, hourly_budget=10.0)
    assert run.see(2, **STARVED).size == 4
    assert fleet.names(6) == ["cheap-0", "cheap-1", "cheap-2", "cheap-3", "dear-0", "dear-1"]


def test_each_class_has_its_own_limits_and_growing_appends():
    fleet = FleetConfig(classes=("cheap:2-4:1.0", "dear:1-3:5.0"))
    order = ["cheap-0", "cheap-1", "dear-0", "cheap-2", "cheap-3", "dear-1", "dear-2"]
    for size in range(8):
        assert fleet.names(size) == order[:size]
        members = fleet.members(size)
        assert sorted(f"{name}-{n}" for name, count in members.items() for n in range(count)) == sorted(order[:size])
    assert [fleet.class_at(place) for place in range(7)] == [name.rpartition("-")[0] for name in order]
    assert [fleet.hourly_cost(size) for size in (3, 5, 6)] == [7.0, 9.0, 14.0]
    assert [fleet.affordable(budget) for budget in (7.0, 9.5, 14.0)] == [3, 5, 6]
    run = Run(size=3, config=dataclasses.replace(CONFIG, min_actors=3), fleet=fleet)
    assert run.see(400, **STARVED).target == 7, "no class above its most"
    assert run.see(1, **SPARE, pinned=1).target == 3, "nor below its least"


def test_members_count_by_the_slots_of_their_class():
    fleet = FleetConfig(classes=("cheap:8", "dear:8"))
    slots = {"cheap": 1, "dear": 10}
    run = Run(size=8, fleet=fleet)
    assert run.see(30, **STARVED | {"starved": 0.55}, slots=slots).target == 10, "19.8 slots are wanted: 8 and 2 × 10"
    run = Run(size=12, fleet=fleet)
    assert run.see(100, **SPARE, slots=slots).target == 10, "of 8 and 4 × 10 slots, 21.3 are wanted"


def test_by_hand_wins_within_the_limits_and_also_when_it_is_off():
    run = Run()
    assert run.see(1, **SPARE, pinned=9).target == 9
    assert run.see(300, **SPARE, pinned=9).target == 9
    assert run.see(1, **SPARE, pinned=99).target == 16
    off = Run(config=AutoscaleConfig())
    assert off.see(300, **STARVED).target == 4
    assert off.see(1, **SPARE, pinned=1).target == 1
    assert off.see(1, **SPARE).size == 1


def test_a_learner_that_is_long_the_bottleneck_is_to_have_a_larger_mesh_if_it_can_be_paid():
    fleet = FleetConfig(classes=("actor:32:1.0",))
    config = dataclasses.replace(CONFIG, learner_copies=(1, 2, 4), learner_price=10.0, hourly_budget=27.0)
    busy = {"starved": 0.0, "busy": 0.7, "stale": 0.2, "level": "normal"}
    run = Run(config=dataclasses.replace(config, shrink_cooldown_s=1e6), fleet=fleet)
    assert run.see(150, **busy).copies == 1
    assert run.see(100, **busy).copies == 2, "2 × 10, and 7 actors to feed it"
    assert run.actions() == ["grow_learner"]
    assert run.see(1000, **busy).copies == 2, "4 copies would cost 40"
    assert Run(config=config, fleet=fleet).see(1000, **STARVED).copies == 1, "it starves: it is not the bottleneck"


def test_in_a_steady_world_it_settles_and_stays():
    """A learner that takes what `need` actors can make: from too few and from too many, the end is near `need`."""
    for need, start in itertools.product((3, 6, 11), (1, 16)):
        run = Run(size=start)
        for _ in range(3000):
            serving = run.state.target
            starved, busy = max(1 - serving / need, 0.0), min(need / serving, 1.0)
            run.see(1, starved=starved, busy=busy, stale=0.3, level="normal")
        changes = [at for at, entry in run.log if entry.action != "remove"]
        assert need <= run.state.target <= need * 1.25 + 1, (need, start, run.state.target)
        assert not changes or changes[-1] < 1000, "it goes on changing"


def test_a_world_that_swings_is_followed_ever_more_slowly_downwards():
    run = Run()
    run.state = dataclasses.replace(run.state, seen_at=0.0)
    for _ in range(4):
        run.see(2000, **SPARE | {"busy": 0.5})
        run.see(40, **STARVED)
    drains = [at for at, entry in run.log if entry.action == "drain"]
    grows = [at for at, entry in run.log if entry.action == "grow"]
    waits = [min(d - g for d in drains if d > g) for g in grows if any(d > g for d in drains)]
    assert run.state.patience > 1
    assert max(waits) >= 2 * CONFIG.shrink_cooldown_s, waits


def test_settings_that_do_not_fit_are_refused_by_name():
    base = {"orchestrator.autoscale.enabled": True}
    dear = {"orchestrator.fleet.classes": ("actor:8:2.0",), "orchestrator.autoscale.hourly_budget": 3.0}
    with pytest.raises(ValueError, match=r"actor\.num_hosts=9: between orchestrator\.autoscale\.min_actors"):
        override(Config(), base | {"actor.num_hosts": 9})
    with pytest.raises(ValueError, match=r"hourly_budget=3\.0: at least 4"):
        override(Config(), base | dear)
    with pytest.raises(ValueError, match=r"fleet\.classes=Big: as actor"):
        FleetConfig(classes=("Big",))
    with pytest.raises(ValueError, match="each name once"):
        FleetConfig(classes=("a", "a:3"))
    with pytest.raises(ValueError, match="only rise"):
        AutoscaleConfig(learner_copies=(2, 1))


class Fleets(RuleBasedStateMachine):
    """Any numbers, a clock that jumps, actors that die, drain or do not, and hands: the promises hold at each step."""

    steps = 0
    fleet = FleetConfig(classes=("cheap:3:1.0", "dear:5:2.5"))
    config = dataclasses.replace(CONFIG, min_actors=2, max_actors=7, hourly_budget=14.0, learner_price=2.0)

    @initialize(size=st.integers(2, 5))
    def begin(self, size):
        self.state, self.now, self.changes = State(size, size, 1), 1e3, []

    @rule(
        elapsed=st.floats(-50, 200),
        starved=st.floats(0, 1),
        busy=st.floats(0, 1),
        stale=st.floats(0, 2),
        level=st.sampled_from(["slow", "normal", "fast"]),
        dead=st.frozensets(st.integers(0, 7)),
        drained=st.frozensets(st.integers(0, 7)),
        training=st.booleans(),
        pinned=st.none() | st.integers(0, 20),
        looks=st.integers(1, 30),
    )
    def look(self, elapsed, starved, busy, stale, level, dead, drained, training, pinned, looks):
        for _ in range(looks):
            self._look(elapsed, starved, busy, stale, level, dead, drained, training, pinned)

    @rule(kind=st.sampled_from([STARVED, SPARE]), looks=st.integers(10, 60))
    def as_in_life(self, kind, looks):
        for _ in range(looks):
            self._look(10.0, dead=frozenset(), drained=frozenset({5, 6}), training=True, pinned=None, **kind)

    def _look(self, elapsed, starved, busy, stale, level, dead, drained, training, pinned):
        type(self).steps += 1
        self.now += elapsed
        before, config = self.state, self.config
        alive = frozenset(range(before.size)) - dead
        observed = Observed(self.now, starved, busy, stale, level, alive, drained & alive, training, pinned)
        decided = autoscale.decide(before, observed, config, self.fleet)
        after = self.state = decided.state
        cost = self.fleet.hourly_cost(after.size) + config.learner_price * after.copies
        assert 1 <= after.target <= after.size <= config.max_actors
        assert cost <= config.hourly_budget, "the budget is a limit"
        assert pinned is not None or after.target >= min(before.target, config.min_actors)
        for place in range(after.size, before.size):
            had_time = after.seen_at - before.draining_since >= config.drain_limit_s
            assert place >= before.target, "nobody is removed who was not draining"
            assert had_time or place not in alive or place in drained, "drain before removal"
        if after.target != before.target:
            named = [entry for entry in decided.log if entry.action in ("grow", "drain")]
            assert len(named) == 1, "no change without a line in the log"
            if pinned is None and before.target >= config.min_actors:
                least = config.grow_cooldown_s if after.target > before.target else config.shrink_cooldown_s
                assert after.seen_at - before.changed_at >= min(least, config.window_s)
                assert after.seen_at - before.changed_at >= least
                assert training
                assert after.target <= before.target * config.step
            if pinned is None and after.target > before.target >= config.min_actors:
                assert level != "slow"
                assert alive >= set(range(before.target))


def test_the_promises_hold_in_any_order_of_events():
    Fleets.steps = 0
    run_state_machine_as_test(Fleets, settings=settings(max_examples=120, stateful_step_count=20, deadline=None))
    assert Fleets.steps >= 10_000


def test_the_budget_is_a_limit_by_hand_too():
    config = dataclasses.replace(CONFIG, enabled=False, hourly_budget=14.0, learner_price=2.0)
    fleet = FleetConfig(classes=("actor:8:2.0",))
    assert autoscale.most_members(config, fleet, 1) == 6
    assert autoscale.most_members(dataclasses.replace(config, hourly_budget=0.0), fleet, 1) == 8
