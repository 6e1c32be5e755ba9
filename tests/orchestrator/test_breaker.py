"""Circuit breakers: open on faults, probe, close; actors that hang alive are replaced, a bounded number of times."""

import pytest

from asyncrl_jax.config_orchestrator import BreakerConfig
from asyncrl_jax.orchestrator.policies import breaker
from asyncrl_jax.orchestrator.policies.breaker import Actor, Observed, State, Tally

CONFIG = BreakerConfig(cooldown_s=10.0, stall_s=60.0, max_replacements=2)
ENV = "environment:sums"


class Watched:
    """A policy and its log over time."""

    def __init__(self, config=CONFIG):
        self.config, self.state, self.log, self.now = config, State(), [], 0.0
        self.decided = None

    def see(self, elapsed=1.0, **observed):
        self.now += elapsed
        self.decided = breaker.decide(self.state, Observed(self.now, **observed), self.config)
        self.state = self.decided.state
        self.log += self.decided.log
        return self.decided

    def phase(self, target=ENV):
        return self.state.phase(target)


def good(n=1.0, seconds=1.0):
    return Tally(successes=n, seconds=n * seconds)


def faults(n, signature="step/TimeoutError"):
    return Tally(infrastructure={signature: n})


@pytest.fixture
def watched():
    return Watched()


def test_it_opens_on_one_signature_and_closes_after_probes(watched):
    watched.see(tallies={ENV: good(20)})
    assert watched.see(tallies={ENV: faults(8)}).factors == {ENV: 0.0}
    entry = watched.log[-1]
    assert (entry.action, entry.subject) == ("open", ENV)
    assert "step/TimeoutError" in entry.reason
    assert entry.numbers == {"successes": 20, "infrastructure_faults": 8, "data_faults": 0}
    watched.see(5.0)
    assert watched.phase() == "open"
    assert watched.see(6.0).factors == {ENV: breaker.PROBE_SHARE}
    watched.see(tallies={ENV: good(2)})
    assert watched.phase() == "closed"
    assert [entry.action for entry in watched.log] == ["open", "half_open", "closed"]


def test_a_failed_probe_opens_it_for_twice_as_long(watched):
    watched.see(tallies={ENV: faults(8)})
    watched.see(11.0)
    watched.see(tallies={ENV: faults(1)})
    assert watched.phase() == "open"
    watched.see(11.0)
    assert watched.phase() == "open"
    watched.see(10.0)
    assert watched.phase() == "half_open"


def test_rare_faults_of_many_kinds_are_tolerated(watched):
    for n in range(100):
        watched.see(tallies={ENV: good(10).plus(faults(1, f"kind {n}"))})
    assert watched.phase() == "closed"
    assert watched.log == []


def test_a_share_of_faults_opens_it_whatever_their_kinds(watched):
    for n in range(8):
        watched.see(tallies={ENV: good(1).plus(faults(1, f"kind {n}"))})
    assert watched.phase() == "open"


def test_faults_of_the_data_are_counted_apart(watched):
    bad_tasks = Tally(data={"reset/ValueError": 10.0})
    watched.see(tallies={ENV: good(10).plus(bad_tasks)})
    assert watched.phase() == "closed"  # as infrastructure faults, half of all would have opened it
    watched.see(120.0)
    watched.see(120.0)
    watched.see(tallies={ENV: Tally(data={"reset/ValueError": 10.0})})
    assert watched.phase() == "open"
    assert "of the data" in watched.log[-1].reason


def test_faults_are_forgotten_after_two_windows(watched):
    watched.see(tallies={ENV: faults(7)})
    watched.see(60.0)
    watched.see(60.0)
    watched.see(tallies={ENV: faults(7)})
    assert watched.phase() == "closed"


def test_a_tenfold_slowdown_is_named_and_lowers_the_share_until_it_is_over(watched):
    for _ in range(20):
        watched.see(tallies={ENV: good(10, seconds=1.0)})
    for _ in range(2):
        assert watched.see(tallies={ENV: good(10, seconds=10.0)}).factors == {}  # it may be noise
    assert watched.see(tallies={ENV: good(10, seconds=10.0)}).factors == {ENV: breaker.SLOW_SHARE}
    assert (watched.log[-1].action, watched.log[-1].subject) == ("slow", ENV)
    assert watched.log[-1].numbers == {"episode_s": 10.0, "usual_s": 1.0}
    assert watched.see(tallies={ENV: good(10, seconds=10.0)}).factors == {ENV: breaker.SLOW_SHARE}
    assert watched.see(tallies={ENV: good(10, seconds=1.5)}).factors == {}
    assert [entry.action for entry in watched.log] == ["slow", "closed"]


def test_orch_08_an_actor_that_beats_without_progress_is_dead_and_replaced(watched):
    """It opens on progress, not on health; the replacement is probed; the cap holds."""
    alive = {"a": Actor(100.0, True), "b": Actor(5.0, True)}
    watched.see(actors=alive)
    for n in range(60):
        decided = watched.see(actors={"a": Actor(100.0 + n, True), "b": Actor(5.0, True)})
    assert decided.replace == ("b",)
    assert (watched.log[-1].action, watched.log[-1].subject) == ("replace", "actor:b")
    assert watched.decided.factors == {} or "actor:a" not in watched.decided.factors
    watched.see(11.0, actors={"a": Actor(200.0, True), "b": Actor(0.0, True)})  # a new process, half open
    assert watched.phase("actor:b") == "half_open"
    watched.see(actors={"a": Actor(201.0, True), "b": Actor(50.0, True)}, tallies={"actor:b": good(2)})
    assert watched.phase("actor:b") == "closed"
    replaced = 1
    for n in range(400):
        replaced += len(watched.see(actors={"a": Actor(300.0 + n, True), "b": Actor(50.0, True)}).replace)
    assert replaced == CONFIG.max_replacements
    assert watched.log[-1].action in ("open", "half_open")
    assert "left out" in " ".join(entry.reason for entry in watched.log)


def test_an_idle_or_paused_actor_is_not_dead(watched):
    for _ in range(300):
        assert watched.see(actors={"a": Actor(5.0, False)}).replace == ()


def test_the_last_healthy_actor_is_never_left_out():
    watched = Watched(BreakerConfig(stall_s=10.0, max_replacements=0, min_healthy_actors=1))
    for _ in range(100):
        watched.see(actors={"a": Actor(5.0, True)})
    assert "actor:a" not in watched.state.breakers


def test_by_hand_wins(watched):
    watched.see(forced={ENV: "open"})
    assert watched.phase() == "open"
    watched.see(1000.0, forced={ENV: "open"}, tallies={ENV: good(50)})
    assert watched.phase() == "open"
    watched.see()
    assert watched.phase() == "half_open"  # released: it must prove itself
    watched.see(tallies={ENV: faults(50)}, forced={ENV: "closed"})
    assert watched.phase() == "closed"


def test_a_clock_that_jumps_back_neither_closes_nor_hangs(watched):
    watched.see(1000.0, tallies={ENV: faults(8)})
    watched.see(-900.0)
    assert watched.phase() == "open"
    watched.see(911.0)
    assert watched.phase() == "half_open"


def test_buckets_follow_the_worst_of_what_they_need():
    factors = {ENV: 1.0, "tool:sums/calculator": 0.0, "reward:proofs": 0.05, "actor:a": 0.0}
    assert breaker.bucket_factors(factors, ["sums/1", "proofs/2", "other/1"]) == {
        "sums/1": 0.0,
        "proofs/2": 0.05,
        "other/1": 1.0,
    }


def test_a_bucket_whose_environments_name_is_a_path_follows_its_breakers():
    math = "math:/data/questions.jsonl"
    for target in (f"environment:{math}", f"reward:{math}", f"tool:{math}/python"):
        assert breaker.bucket_factors({target: 0.0}, [f"{math}/1", "sums/1"]) == {f"{math}/1": 0.0, "sums/1": 1.0}


def test_off_opens_nothing():
    watched = Watched(BreakerConfig(enabled=False))
    assert watched.see(tallies={ENV: faults(100)}).factors == {}


def test_what_is_well_has_no_breaker_and_keeps_its_counts_until_a_fault(watched):
    """200 successes before it keep 8 faults from opening: they count although no breaker was there."""
    watched.see(tallies={ENV: good(200)})
    assert watched.state.breakers == {}
    watched.see(tallies={ENV: faults(8)})
    assert watched.phase() == "closed"
    assert watched.state.breakers[ENV].usual_s == 1.0
    watched.see(tallies={ENV: faults(3)})
    assert watched.phase() == "open"


def test_a_target_is_well_again_once_its_windows_are_clean(watched):
    watched.see(tallies={ENV: good(20).plus(faults(1))})
    assert ENV in watched.state.breakers
    watched.see(60.0)
    watched.see(60.0)
    assert watched.state.breakers == {}
    assert watched.state.usual_s == {ENV: 1.0}


def test_what_is_known_of_an_actor_that_is_gone_is_forgotten(watched):
    alive = {"a": Actor(1.0, False)}
    watched.see(tallies={"actor:a": good(), "actor:b": good(), "actor:c": faults(8), ENV: good()}, actors=alive)
    for _ in range(3):
        watched.see(61.0, actors=alive, tallies={"actor:a": good()})
    assert watched.state.usual_s.keys() == {"actor:a", ENV}
    assert watched.phase("actor:c") == "half_open"
    watched.see(3601.0, actors=alive)
    watched.see(61.0, actors=alive)
    assert watched.state.breakers == {}


def test_what_a_human_closed_stays_closed_though_it_stands_still():
    config, state, lines = BreakerConfig(stall_s=10, max_replacements=1), breaker.State(), []
    for now in range(100):
        actors = {"x": breaker.Actor(5.0, True), "y": breaker.Actor(float(now), True)}
        observed = breaker.Observed(float(now), actors=actors, forced={"actor:x": "closed"})
        decided = breaker.decide(state, observed, config)
        state = decided.state
        lines += decided.log
        assert state.phase("actor:x") == "closed"
    assert [line.action for line in lines] == ["replace"]
