"""The orchestrator's loop against a real Redis: no memory of its own, nothing issued twice, a run that ends."""

from __future__ import annotations

import dataclasses
import json
import uuid

import pytest

from asyncrl_jax.config import ActorConfig, Config, EvaluationConfig, LagConfig, LearnerConfig, RedisConfig
from asyncrl_jax.orchestrator.decision_files import archive_decisions, read_decisions
from asyncrl_jax.orchestrator.loop import FULL_EVALUATION, Orchestrator
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.groups import GroupWriter
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.server import start_server
from asyncrl_jax.transport.steering import Steering
from asyncrl_jax.transport.tasks import TaskStream
from asyncrl_jax.types import Decision, EvaluationResult, LearnerState, WeightVersion


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = start_server(tmp_path_factory.mktemp("redis"), RedisConfig())
    yield started
    started.stop()


class Scene:
    """A control state that the test writes as the learner would."""

    def __init__(self, server, **changes):
        self.config = dataclasses.replace(
            Config(
                learner=LearnerConfig(groups_per_update=4, group_size=2, num_updates=10),
                actor=ActorConfig(heartbeat_s=0.001),
                evaluation=EvaluationConfig(every_updates=4, num_tasks_per_level=5),
            ),
            **changes,
        )
        self.redis = connect(RedisConfig(url=server.url, outage_s=5), server.password)
        self.keys = keys = Keys(uuid.uuid4().hex)
        self.control, self.ledger = Control(self.redis, keys), Ledger(self.redis, keys)
        self.control.ensure_epoch()

    def orchestrator(self) -> Orchestrator:
        return Orchestrator(self.config, self.control, self.ledger, Steering(self.redis, self.keys))

    def learner_at(self, update: int, phase: str = "training", **changes) -> None:
        self.control.announce(WeightVersion(update, update - 1 if update else None, 0, update, f"{update:032x}"))
        self.control.set_learner(LearnerState(0, update, update, phase, **changes))

    def lose_everything(self) -> None:
        self.redis.delete(*self.redis.scan_iter(f"{self.keys.namespace}:*"))

    def submit(self, count: int) -> set[str]:
        """Queues a group for each of `count` tickets; returns their ids."""
        writer = GroupWriter(self.redis, self.keys, self.config.redis, limits=None)
        deliveries = TaskStream(self.redis, self.keys, "actor-0", self.config.redis).claim(count, 0)
        assert all(writer.submit_encoded(delivery, b"group") for delivery in deliveries)
        return {delivery.ticket.ticket_id for delivery in deliveries}

    def report(self) -> list[str]:
        requests = self.control.pending_evaluations()
        for request in requests:
            self.control.report_evaluation(
                EvaluationResult(request.evaluation_id, request.version, request.update, {1: 1}, {1: 1}, 1.0)
            )
        return [request.evaluation_id for request in requests]


@pytest.fixture
def scene(server):
    return Scene(server)


def test_nothing_is_issued_before_the_learner_trains(scene):
    scene.orchestrator().tick()
    scene.learner_at(0, phase="warm_start")
    scene.orchestrator().tick()
    assert scene.ledger.counts()["issued"] == 0


def test_a_successor_goes_on_where_the_dead_one_stood(scene):
    scene.learner_at(0)
    for _ in range(5):
        scene.orchestrator().tick()  # a new one every time: all it needs is in Redis
    issued = scene.ledger.counts()["issued"]
    assert issued == 4 + 4 + scene.config.lag.slack_groups
    scene.learner_at(1)
    scene.orchestrator().tick()
    assert scene.ledger.counts()["issued"] == issued


def test_trained_but_unsettled_tickets_are_not_outstanding(scene):
    scene.learner_at(0)
    scene.orchestrator().tick()
    issued = scene.ledger.counts()["issued"]
    scene.learner_at(1, unsettled_tickets=4, unsettled_uses=4)
    scene.orchestrator().tick()
    assert scene.ledger.counts()["issued"] == issued + 4


def test_a_running_ticket_expires_once_no_update_can_use_it(scene):
    scene.learner_at(0)
    orchestrator = scene.orchestrator()
    orchestrator.tick()
    issued = set(scene.ledger.live())
    scene.learner_at(4)
    orchestrator.tick()
    assert scene.ledger.counts()["expired"] == 0  # its deadline is update 4
    scene.learner_at(5)
    orchestrator.tick()
    assert scene.ledger.counts()["expired"] == len(issued)
    assert not issued & scene.ledger.live().keys()


def test_queued_groups_and_other_lines_are_the_learners_to_judge(scene):
    scene.learner_at(0)
    scene.orchestrator().tick()
    queued = scene.submit(3)
    scene.control.set_learner(LearnerState(1, 5, 0, "training"))
    scene.orchestrator().tick()
    assert scene.ledger.counts()["expired"] == 0
    scene.learner_at(5)
    scene.orchestrator().tick()
    assert queued <= scene.ledger.live().keys()
    assert scene.ledger.counts()["expired"] == scene.ledger.counts()["issued"] - len(scene.ledger.live()) > 0


def test_a_late_ticket_whose_old_tokens_are_masked_runs_until_all_would_be(server):
    scene = Scene(server, lag=LagConfig(straggler_policy="mask"))
    scene.learner_at(0)
    scene.orchestrator().tick()
    scene.learner_at(8)
    scene.orchestrator().tick()
    assert scene.ledger.counts()["expired"] == 0  # deadline 4, and its newest tokens may be 4 updates younger
    scene.learner_at(9)
    scene.orchestrator().tick()
    assert scene.ledger.counts()["expired"] > 0


def test_orch_03_uses_and_tickets_are_counted_apart_when_groups_are_replayed(server):
    scene = Scene(server, learner=LearnerConfig(groups_per_update=4, group_size=2, num_updates=10, replay_ratio=2))

    def issued_at(update, **unsettled):
        scene.learner_at(update, **unsettled)
        scene.orchestrator().tick()
        return scene.ledger.counts()["issued"]

    assert issued_at(0) == 6  # 12 uses: 3 updates' worth
    assert issued_at(1, unsettled_uses=4) == 6 + 2  # 8 uses are left
    assert issued_at(9, unsettled_tickets=6, unsettled_uses=12) == 8 + 2  # the last update takes 4 distinct groups


def test_evaluations_are_asked_for_once_and_pin_a_version(scene):
    scene.learner_at(0)
    for _ in range(2):
        scene.orchestrator().tick()
    (first,) = scene.control.pending_evaluations()
    assert (first.evaluation_id, first.version, first.num_tasks_per_level) == ("update-0", 0, 5 * FULL_EVALUATION)
    scene.learner_at(5)
    scene.orchestrator().tick()
    second = scene.control.pending_evaluations()[1]
    assert (second.evaluation_id, second.version, second.update, second.num_tasks_per_level) == ("update-4", 5, 5, 5)


def test_the_run_ends_with_the_last_evaluation_and_goes_on_when_it_is_extended(scene):
    scene.learner_at(10)
    assert not scene.orchestrator().tick()
    scene.report()
    scene.learner_at(10, phase="done")
    orchestrator = scene.orchestrator()
    assert not orchestrator.tick()
    assert scene.report() == ["final-10"]
    assert orchestrator.tick()
    assert scene.control.phase() == "finished"
    # Resumed for more updates: what the learner left behind does not end the longer run.
    scene.config = dataclasses.replace(scene.config, learner=dataclasses.replace(scene.config.learner, num_updates=20))
    scene.control.set_phase("running")
    assert not scene.orchestrator().tick()
    scene.learner_at(20, phase="done")
    orchestrator = scene.orchestrator()
    assert not orchestrator.tick()
    assert "final-20" in scene.report()
    assert orchestrator.tick()


def test_an_evaluation_that_redis_lost_is_asked_for_again(scene):
    orchestrator = scene.orchestrator()
    scene.learner_at(10, phase="done")
    orchestrator.tick()
    assert [request.evaluation_id for request in scene.control.pending_evaluations()] == ["final-10"]
    scene.lose_everything()
    orchestrator.tick()
    scene.control.ensure_epoch(at_least=2)
    scene.learner_at(10, phase="done")
    orchestrator.tick()
    assert scene.report() == ["final-10"]
    orchestrator.tick()
    assert scene.control.phase() == "finished"


@pytest.mark.parametrize("before", ["next_ticket_ids", "issue"])
def test_a_redis_that_is_emptied_within_a_round_ends_nothing(scene, monkeypatch, before):
    real = getattr(scene.ledger, before)

    def emptied(*args):
        scene.lose_everything()
        return real(*args)

    scene.learner_at(0)
    monkeypatch.setattr(scene.ledger, before, emptied)
    assert not scene.orchestrator().tick()
    assert scene.ledger.counts()["issued"] == 0


def test_decisions_behind_what_is_none_go_to_files_too(scene, tmp_path):
    steering = Steering(scene.redis, scene.keys)
    line = json.dumps(dataclasses.asdict(Decision("lag", "raise", "N", "why")))
    for text in [*["garbage"] * 1000, *[line] * 300]:
        scene.redis.xadd(scene.keys.decisions, {"decision": text})
    assert archive_decisions(tmp_path, steering, 0) == 1300
    assert steering.num_decisions() == 0
    assert len(read_decisions(tmp_path)) == 300
