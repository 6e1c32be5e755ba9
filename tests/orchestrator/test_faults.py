"""Planted faults, with the real loop and a real Redis: each is caught, named in the log, contained, over when cured.

Actors are scripted: they claim tickets and tell what real ones would tell. Time is the test's own.
"""

from __future__ import annotations

import collections
import dataclasses

import pytest

from asyncrl_jax.config import Config, LearnerConfig, RedisConfig, override
from asyncrl_jax.orchestrator.loop import Orchestrator
from asyncrl_jax.transport.groups import GroupReader, GroupWriter
from asyncrl_jax.transport.ledger import LiveTicket
from asyncrl_jax.transport.tasks import TaskStream
from asyncrl_jax.types import LearnerState, Outcome, WeightVersion

SIZE = 8


class World:
    """A learner that trains whatever comes, and two scripted actors on three levels of one environment."""

    def __init__(self, space, monkeypatch, **changes):
        self.space = space
        self.config = override(
            Config(learner=LearnerConfig(groups_per_update=4, group_size=SIZE, num_updates=10_000)),
            {
                "orchestrator.policy_interval_s": 1e-6,
                "orchestrator.breaker.cooldown_s": 10.0,
                "orchestrator.breaker.stall_s": 30.0,
                "orchestrator.drift.window_groups": 4,
                "orchestrator.drift.action": "hold",
                **changes,
            },
        )
        self.now = 1e6
        self.update = 0
        self.orchestrator = Orchestrator.on(space.client, space.keys, self.config, None)
        monkeypatch.setattr(self.orchestrator._steering, "now", lambda: self.now)
        config = RedisConfig(url="redis://unused", partitions=1)
        self.tasks = TaskStream(space.client, space.keys, "a", config)
        self.writer = GroupWriter(space.client, space.keys, config, limits=None)
        self.reader = GroupReader(space.client, space.keys, "learner", config)
        self.tokens = collections.Counter({"a": 0, "b": 0})
        self.levels: collections.Counter[int] = collections.Counter()  # of tickets since the last `run`
        space.control.announce(WeightVersion(0, None, 0, 0, "0" * 32))

    def run(self, seconds, *, fault=None, reward=0.7, episode_s=1.0, hung=(), spread=0.1):
        """Lets some seconds pass; `fault` is the signature that every episode fails with."""
        self.levels.clear()
        for _ in range(seconds):
            self.now += 1
            self.space.control.set_learner(LearnerState(0, self.update, 0, "training"))
            for actor in self.tokens:
                self.tokens[actor] += 0 if actor in hung else 100
                beat = {"tokens_sampled": self.tokens[actor], "generating": 4, "paused_s": 0.0}
                self.space.control.beat("actor", actor, beat, 60)
            self.orchestrator.tick()
            for delivery in self.tasks.claim(8, 0):
                self._play(delivery, fault, reward, episode_s, spread)
            entries = [(entry, entry.ticket.ticket_id) for entry in self.reader.read(16, 0)]
            if entries:
                self.reader.complete(entries, Outcome.TRAINED, self.update)
                self.update += 1

    def _play(self, delivery, fault, reward, episode_s, spread):
        level = delivery.ticket.task.level
        self.levels[level] += 1
        target = "environment:arithmetic"
        if fault is not None:
            self.tasks.fail(delivery, fault)
            self.space.steering.observe({"targets": {target: {"infrastructure": {fault: SIZE}}}})
            return
        reward = reward.get(level, 0.7) if isinstance(reward, dict) else reward
        sums = {
            "groups": 1,
            "episodes": SIZE,
            "tokens": 20 * SIZE,
            "reward": reward * SIZE,
            "reward_squared": (reward**2 + spread**2) * SIZE,
            "group_variance": spread**2,
            "successes": SIZE // 2,
            "surprisal": 20.0 * SIZE,
        }
        done = {"successes": SIZE, "seconds": SIZE * episode_s}
        self.space.steering.observe(
            {"buckets": {f"arithmetic/{level}": sums}, "targets": {target: done, "actor:a": done}}
        )
        self.writer.submit_encoded(delivery, b"group")

    def log(self):
        return [one.decision for one in self.space.steering.decisions()]

    def named(self, action, subject):
        return [d for d in self.log() if (d.action, d.subject) == (action, subject)]


@pytest.fixture
def world(space, monkeypatch):
    return World(space, monkeypatch)


def test_an_environment_that_starts_failing_is_opened_probed_and_closed_when_cured(world):
    world.run(20)
    assert sum(world.levels.values()) > 20
    world.run(3, fault="step/ConnectionError")
    (opened,) = world.named("open", "environment:arithmetic")
    assert "step/ConnectionError" in opened.reason
    assert opened.numbers["infrastructure_faults"] >= 8
    world.run(9, fault="step/ConnectionError")
    assert sum(world.levels.values()) == 0, "contained: nothing is issued"
    world.run(30, fault="step/ConnectionError")
    assert 0 < sum(world.levels.values()) <= 3 * world.config.orchestrator.breaker.probes, "probes only"
    world.run(60)
    assert world.named("closed", "environment:arithmetic")
    world.run(10)
    assert sum(world.levels.values()) > 10, "recovered"
    counts = world.space.ledger.counts()
    assert counts["issued"] == sum(counts[outcome.value] for outcome in Outcome) + counts["pending"]


def test_a_reward_hole_is_held_for_a_human_and_comes_back_when_released(world):
    world.run(60)
    world.run(20, reward={3: 1.5})
    (held,) = world.named("hold", "bucket:arithmetic/3")
    assert "reward_rise" in held.reason
    assert held.numbers["value"] > held.numbers["usual"] + 0.25
    world.run(10)
    assert world.levels[3] == 0, "contained"
    assert world.levels[1] > 0, "all else goes on"
    world.space.steering.operate({"review.arithmetic/3": "released 1"}, dataclasses.replace(held, policy="operator"))
    world.run(20)
    assert world.levels[3] > 0, "recovered"


def test_a_tenfold_slowdown_is_named_and_over_when_it_is(world):
    world.run(20)
    world.run(5, episode_s=10.0)
    (slow,) = world.named("slow", "environment:arithmetic")
    assert slow.numbers["episode_s"] == pytest.approx(10.0)
    assert slow.numbers["usual_s"] == pytest.approx(1.0)
    world.run(5)
    assert world.named("closed", "environment:arithmetic")


def test_orch_08_an_actor_that_hangs_alive_is_replaced_and_probed(world):
    world.run(20)
    world.run(29, hung=("b",))
    assert not world.named("replace", "actor:b")
    world.run(3, hung=("b",))
    (replaced,) = world.named("replace", "actor:b")
    assert replaced.numbers["still_s"] >= 30
    orders = world.space.steering.directives().actors
    assert orders["b"].replace == 1
    assert orders["b"].pause, "the new process waits for the cool-down"
    assert "a" not in orders
    world.run(12)
    assert world.space.steering.directives().actors["b"].probe
    world.space.steering.observe({"targets": {"actor:b": {"successes": 4, "seconds": 4.0}}})
    world.run(2)
    order = world.space.steering.directives().actors["b"]
    assert (order.pause, order.probe, order.replace) == (False, False, 1)


def test_a_collapse_is_answered_with_a_higher_temperature(world):
    world.run(10)
    record = {
        "groups": 800,
        "episodes": 6400,
        "tokens": 64_000,
        "reward": 640.0,
        "reward_squared": 64.0,
        "surprisal": 10.0,
    }
    world.space.steering.observe({"buckets": {"arithmetic/1": record}})
    world.run(1)
    assert world.named("collapse", "bucket:arithmetic/1")
    temperatures = {live.ticket.temperature for live in world.space.ledger.live().values()}
    assert max(temperatures) == pytest.approx(1.25 * world.config.actor.temperature)


def test_a_quota_bounds_what_is_dispatched_each_second(space, monkeypatch):
    world = World(space, monkeypatch, **{"orchestrator.watermark.dispatch_episodes_per_s": float(SIZE)})
    world.run(30)
    assert sum(world.levels.values()) <= 30 + 2, "one group a second, and a burst of two"
    assert sum(world.levels.values()) >= 28


def test_a_successor_folds_each_observation_once_and_goes_on_with_open_breakers(world, monkeypatch):
    world.run(10)
    world.run(3, fault="step/ConnectionError")
    before = world.space.steering.states()["breaker"]
    world.orchestrator = Orchestrator.on(world.space.client, world.space.keys, world.config, None)
    monkeypatch.setattr(world.orchestrator._steering, "now", lambda: world.now)
    world.run(1, fault="step/ConnectionError")
    after = world.space.steering.states()["breaker"]["breakers"]["environment:arithmetic"]
    assert after["phase"] == before["breakers"]["environment:arithmetic"]["phase"] == "open"
    assert len(world.named("open", "environment:arithmetic")) == 1


def test_a_ticket_that_nobody_answers_is_given_up_and_replaced(space, monkeypatch):
    """Also in mode sync, where no update count passes by a hung actor's ticket."""
    world = World(space, monkeypatch, mode="sync", **{"lag.ticket_timeout_s": 60.0})
    monkeypatch.setattr("asyncrl_jax.orchestrator.loop.time.time", lambda: world.now)
    monkeypatch.setattr(LiveTicket, "handed_out_at", property(lambda live: live.ticket.issued_at))  # the world's clock
    monkeypatch.setattr(world, "_play", lambda *_: None)  # claimed, and never answered
    world.run(30)
    assert world.space.ledger.counts() | {"issued": 4, "pending": 4} == world.space.ledger.counts()
    world.run(40)
    counts = world.space.ledger.counts()
    assert (counts["failed"], counts["pending"]) == (4, 4)
