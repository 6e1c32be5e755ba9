"""A whole actor, in a thread, against a real Redis and published weights."""

import asyncio
import dataclasses
import logging
import threading
import time
import uuid

import numpy as np
import pytest
from engine_setup import MAX_TOKENS, MODEL, full_logprobs, make_version

from asyncrl_jax.actor.engines.jax_engine import JaxEngine
from asyncrl_jax.actor.envs import registry
from asyncrl_jax.actor.envs.arithmetic import Arithmetic
from asyncrl_jax.actor.loop import _once, run_actor
from asyncrl_jax.actor.refresh import WeightsRefused
from asyncrl_jax.config import Config, RedisConfig, override
from asyncrl_jax.exit_codes import Mistake, Unreachable
from asyncrl_jax.observe.metrics import read_rows
from asyncrl_jax.transport.codec import Limits
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.groups import GroupReader
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.server import start_server
from asyncrl_jax.transport.tasks import TaskStream
from asyncrl_jax.types import EvaluationRequest, LearnerState, Outcome, Task, Ticket
from asyncrl_jax.weights.publish import publish

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = start_server(tmp_path_factory.mktemp("redis"), RedisConfig())
    yield started
    started.stop()


class Run:
    """Everything around an actor: Redis, the learner's announcements, the orchestrator's tickets."""

    def __init__(self, server, directory, changes=()):
        self.config = override(
            Config(model=MODEL),
            {
                "redis.url": server.url,
                "redis.namespace": uuid.uuid4().hex,
                "weights.poll_interval_s": 0.01,
                "environment.max_tokens": MAX_TOKENS,
                "environment.max_turns": 3,
                "actor.slots": 4,
                "actor.heartbeat_s": 0.05,
                "learner.group_size": 2,
                **dict(changes),
            },
        )
        self.directory = directory
        self.password = server.password
        self.redis, self.keys = connect(self.config.redis, server.password), Keys(self.config.redis.namespace)
        self.control, self.ledger = Control(self.redis, self.keys), Ledger(self.redis, self.keys)
        self.control.ensure_epoch()
        self.groups = GroupReader(self.redis, self.keys, "learner", self.config.redis)
        self.stop = threading.Event()
        self.ended = []
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            self.ended.append(run_actor(self.config, self.directory, self.password, "actor-0", self.stop))
        except Exception as error:  # noqa: BLE001  the tests look at it
            self.ended.append(error)

    def announce(self, number, update=None, canary_of=None):
        """Publishes version `number`, with the canary of other weights if asked to."""
        tensors = make_version(number)[2]
        canary = make_version(number if canary_of is None else canary_of)[1].canary
        update = number if update is None else update
        parent = number - 1 if number else None
        version = publish(
            self.directory / "weights", tensors, number=number, parent=parent, line=0, update=update, canary=canary
        )
        self.control.announce(version)
        return version

    def learner_at(self, update):
        self.control.set_learner(LearnerState(line=0, update=update, version=0, phase="training"))

    def issue(self, count, *, min_update=0, environment="arithmetic"):
        tickets = [
            Ticket(
                ticket_id=ticket_id,
                task=Task(environment, "train", 1 + i % 3, i),
                group_size=2,
                line=0,
                min_update=min_update,
                deadline=min_update + 4,
                temperature=1.3,
                seed=i,
                issued_at=time.time(),
            )
            for i, ticket_id in enumerate(self.ledger.next_ticket_ids(count))
        ]
        self.ledger.issue(tickets)
        return tickets

    def collect(self, count):
        """The next `count` groups."""
        groups, limits = [], Limits.from_config(self.config)
        deadline = time.monotonic() + LIMIT_S
        while len(groups) < count:
            assert time.monotonic() < deadline, f"{len(groups)} of {count} groups came"
            self.check()
            groups += [entry.decode(limits) for entry in self.groups.read(count - len(groups), 50)]
        return groups

    def beat(self):
        return self.control.heartbeats().get(("actor", "actor-0"), {})

    def until(self, condition):
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited too long; the last heartbeat is {self.beat()}"
            self.check()
            time.sleep(0.01)

    def check(self):
        assert not [error for error in self.ended if isinstance(error, Exception)], self.ended

    def finish(self):
        self.control.set_phase("finished")
        self.thread.join(LIMIT_S)
        assert self.ended == [0]


@pytest.fixture
def run(server, tmp_path):
    made = Run(server, tmp_path)
    yield made
    made.stop.set()
    made.thread.join(LIMIT_S)
    assert not made.thread.is_alive()


def sampled_versions(groups):
    return {int(v) for g in groups for t in g.trajectories for v in t.policy_versions} - {-1}


def test_tickets_become_groups_with_the_logprobs_of_their_version(run):
    run.announce(0)
    run.learner_at(0)
    tickets = run.issue(7)
    run.thread.start()
    groups = run.collect(7)
    assert sorted(g.ticket.ticket_id for g in groups) == sorted(t.ticket_id for t in tickets)
    for group in groups:
        first, second = group.trajectories
        assert first.tokens.tolist() != second.tokens.tolist()  # members have seeds of their own
        assert (group.actor_id, group.partial) == ("actor-0", False)
        for trajectory in group.trajectories:
            sampled = trajectory.loss_mask[1:] == 1
            expected = full_logprobs(make_version(0)[0], trajectory.tokens, temperature=1.3)
            np.testing.assert_allclose(trajectory.behaviour_logprobs[1:][sampled], expected[sampled], atol=2e-5)
    assert sampled_versions(groups) == {0}
    run.until(lambda: run.beat().get("groups_submitted") == 7 and run.beat()["running"] == 0)
    run.finish()
    assert read_rows(run.directory / "metrics" / "actor-0.jsonl")[-1]["groups_submitted"] == 7


def test_an_actor_has_the_settings_of_its_class_of_hosts(server, tmp_path):
    settings = ("actor.slots=2", "actor.episodes=3", "dear.slots=64")
    classes = {"orchestrator.fleet.classes": ("actor", "dear"), "orchestrator.fleet.class_settings": settings}
    run = Run(server, tmp_path, classes)
    run.announce(0)
    run.learner_at(0)
    run.issue(4)
    run.thread.start()
    try:
        run.collect(4)
        run.until(lambda: run.beat().get("slots") == 2)
        run.finish()
    finally:
        run.stop.set()
        run.thread.join(LIMIT_S)


def test_nothing_is_claimed_before_the_first_weights(run):
    run.issue(2)
    run.thread.start()
    run.until(lambda: "version" in run.beat())
    assert run.beat()["version"] is None
    assert run.redis.xpending(run.keys.tasks, "actors")["pending"] == 0
    run.announce(0)
    assert len(run.collect(2)) == 2


def test_orch_09_what_is_asked_before_the_engine_is_ready_waits_for_it(run, monkeypatch, caplog):
    """A first load of 2 s: nothing is claimed meanwhile, nothing is lost, and nobody complains."""
    load = JaxEngine.load

    async def slow(engine, directory, version):
        await asyncio.sleep(2.0)
        await load(engine, directory, version)

    monkeypatch.setattr(JaxEngine, "load", slow)
    run.announce(0)
    run.learner_at(0)
    tickets = run.issue(3)
    with caplog.at_level(logging.WARNING):
        run.thread.start()
        run.until(lambda: "version" in run.beat())
        assert run.beat()["version"] is None
        assert run.redis.xpending(run.keys.tasks, "actors")["pending"] == 0
        groups = run.collect(3)
    assert sorted(group.ticket.ticket_id for group in groups) == sorted(ticket.ticket_id for ticket in tickets)
    assert not caplog.records, [record.getMessage() for record in caplog.records]
    run.until(lambda: run.beat().get("groups_submitted") == 3)
    assert run.beat()["tickets_failed"] == 0


def test_wgt_04_a_new_actor_samples_with_nothing_older_than_the_learners_newest(run):
    """The learner is at v7: the host holds no ticket before it reports v7, and tags every token with what it loaded."""
    run.announce(0)
    run.announce(7)
    run.learner_at(7)
    run.issue(3, min_update=5)
    run.thread.start()
    groups = run.collect(3)
    assert run.beat().get("version") in (None, 7)
    assert sampled_versions(groups) == {7}
    for trajectory in (t for group in groups for t in group.trajectories):
        sampled = trajectory.loss_mask[1:] == 1
        expected = full_logprobs(make_version(7)[0], trajectory.tokens, temperature=1.3)
        np.testing.assert_allclose(trajectory.behaviour_logprobs[1:][sampled], expected[sampled], atol=2e-5)


def test_a_ticket_waits_for_weights_as_new_as_it_asks(run):
    run.announce(0)
    run.learner_at(0)
    run.issue(2, min_update=1)
    run.thread.start()
    run.until(lambda: run.beat().get("running") == 4)
    assert run.groups.depth() == 0
    run.announce(1)
    assert sampled_versions(run.collect(2)) == {1}


def test_an_actor_more_than_a_updates_behind_pauses_and_refreshes(run):
    run.announce(0)
    run.learner_at(3)  # A is 2
    run.thread.start()
    run.until(lambda: run.beat().get("paused_s", 0) > 0)
    run.issue(3)
    time.sleep(0.1)
    assert run.beat()["tokens_sampled"] == 0
    run.announce(1, update=2)
    assert sampled_versions(run.collect(3)) == {1}
    run.until(lambda: run.beat()["paused_s"] == 0)


def test_refused_weights_never_sample_and_the_next_version_is_tried(run, caplog):
    caplog.set_level(logging.ERROR)
    run.announce(0)
    run.learner_at(0)
    run.thread.start()
    run.until(lambda: run.beat().get("version") == 0)
    run.announce(1, canary_of=2)
    run.until(lambda: run.beat()["weights_refused"] > 0)
    run.issue(2)
    assert sampled_versions(run.collect(2)) == {0}
    run.announce(2)
    run.until(lambda: run.beat()["version"] == 2)
    assert any("REFUSED weights v1: canary" in record.message for record in caplog.records)


def test_refusals_in_a_row_end_the_process(run, monkeypatch, caplog):
    monkeypatch.setattr("asyncrl_jax.actor.refresh._RETRY_S", 0.01)
    run.announce(0, canary_of=1)
    run.thread.start()
    run.thread.join(LIMIT_S)
    assert [type(error) for error in run.ended] == [WeightsRefused]


def test_a_deleted_version_is_not_an_error(run):
    version = run.announce(0)
    run.control.announce(dataclasses.replace(version, number=1))  # never written
    run.thread.start()
    run.until(lambda: "version" in run.beat())
    time.sleep(0.1)
    assert (run.beat()["version"], run.beat()["weights_refused"]) == (None, 0)
    run.announce(2)
    run.until(lambda: run.beat()["version"] == 2)
    run.until(lambda: run.control.leased() == set())


def test_obs_06_an_evaluation_is_of_one_exact_version_and_repeats(run):
    run.announce(0)
    run.announce(1)
    run.learner_at(1)
    for name, version in (("a", 0), ("b", 1), ("c", 0)):
        run.control.request_evaluation(EvaluationRequest(name, version, version, num_tasks_per_level=4, seed=5))
    run.issue(4)  # training goes on meanwhile, with the newest weights
    run.thread.start()
    run.until(lambda: len(run.control.evaluations()) == 3)
    results = {result.evaluation_id: result for result in run.control.evaluations()}
    assert results["a"].num_tasks == {1: 4, 2: 4, 3: 4}
    assert (results["a"].version, results["b"].version) == (0, 1)
    assert results["a"].mean_reward == results["c"].mean_reward
    assert sampled_versions(run.collect(4)) == {1}
    assert run.control.pending_evaluations() == []


def test_a_settled_ticket_is_cancelled_and_its_slots_are_freed(run):
    run.announce(0)
    run.learner_at(0)
    doomed = run.issue(2, min_update=9)  # both wait, and fill the host
    run.thread.start()
    run.until(lambda: run.beat().get("running") == 4)
    run.issue(1)
    run.ledger.settle_many([ticket.ticket_id for ticket in doomed], Outcome.EXPIRED, reason="test")
    assert len(run.collect(1)) == 1
    run.until(lambda: run.beat()["tickets_cancelled"] == 2 and run.beat()["running"] == 0)


def test_env_01_a_broken_environment_costs_its_own_tickets_only(run, monkeypatch):
    class Mixed(Arithmetic):
        """Broken for the tasks with an even index."""

        async def reset(self, task):
            if task.index % 2 == 0:
                raise RuntimeError("no such tool")
            return await super().reset(task)

    monkeypatch.setattr(registry, "Arithmetic", Mixed)
    run.announce(0)
    run.learner_at(0)
    tickets = run.issue(6)
    run.thread.start()
    groups = run.collect(3)
    assert {g.ticket.ticket_id for g in groups} == {t.ticket_id for t in tickets if t.task.index % 2}
    run.until(lambda: run.ledger.counts()["failed"] == 3)
    run.until(lambda: run.beat().get("tickets_failed") == 3)
    assert run.beat()["episodes_failed"]["reset"] >= 3 * run.config.actor.max_attempts
    reasons = {event.reason for event in run.ledger.events() if event.outcome is Outcome.FAILED}
    assert reasons == {"reset: RuntimeError('no such tool')"}


def test_ckpt_08_a_task_that_hangs_fails_its_ticket_for_good_and_the_others_go_on(run, monkeypatch):
    """Also for the host that is started next: the wedge is not drawn again."""

    class Wedged(Arithmetic):
        """Never answers for the task with index 1."""

        async def reset(self, task):
            if task.index == 1:
                await asyncio.sleep(3600)
            return await super().reset(task)

    monkeypatch.setattr(registry, "Arithmetic", Wedged)
    run.config = override(run.config, {"environment.call_timeout_s": 0.2})
    run.announce(0)
    run.learner_at(0)
    tickets = run.issue(4)
    run.thread.start()
    groups = run.collect(3)
    assert {g.ticket.ticket_id for g in groups} == {t.ticket_id for t in tickets if t.task.index != 1}
    run.until(lambda: run.ledger.counts()["failed"] == 1)
    (failed,) = [event for event in run.ledger.events() if event.outcome is Outcome.FAILED]
    assert failed.ticket_id == tickets[1].ticket_id
    assert "reset" in failed.reason
    run.finish()
    again = TaskStream(run.redis, run.keys, "actor-0", run.config.redis)
    assert again.claim(4, 0) == []


def test_ux_06_a_clean_stop_gives_its_tickets_back_at_once(run):
    run.announce(0)
    run.learner_at(0)
    tickets = run.issue(2, min_update=9)
    run.thread.start()
    run.until(lambda: run.beat().get("running") == 4)
    run.stop.set()
    run.thread.join(LIMIT_S)
    assert run.ended == [0]
    other = TaskStream(run.redis, run.keys, "actor-1", run.config.redis)
    deliveries = other.claim(4, 1000)
    assert sorted(d.ticket.ticket_id for d in deliveries) == sorted(t.ticket_id for t in tickets)
    assert {d.deliveries for d in deliveries} == {1}


def test_a_server_that_is_not_there_is_no_mistake_of_the_user(run):
    """It may be at the next start."""
    changes = {"environment.name": "code", "model.vocab_size": 258, "tools.mcp": ("no-such-program",)}
    with pytest.raises(Unreachable, match="mcp=no-such-program"):
        run_actor(override(run.config, changes), run.directory, run.password, "actor-0", run.stop)
    run.thread.start()
    run.stop.set()


def test_a_model_too_small_for_the_environment_is_the_users_error(run):
    config = dataclasses.replace(run.config, model=dataclasses.replace(MODEL, vocab_size=20))
    with pytest.raises(Mistake, match="vocab_size=20"):
        run_actor(config, run.directory, run.password, "actor-0", run.stop)
    with pytest.raises(Mistake, match="name=chess: not known"):
        run_actor(override(run.config, {"environment.name": "chess"}), run.directory, run.password, "a", run.stop)
    changes = {"reward.process.model": "/nowhere"}
    with pytest.raises(Mistake, match="model=/nowhere: /nowhere/config"):
        run_actor(override(run.config, changes), run.directory, run.password, "a", run.stop)
    run.thread.start()
    run.stop.set()


def test_a_part_whose_environments_cannot_start_says_why_and_leaves_nothing_behind():
    async def start():
        raise OSError("no more processes")

    async def part():
        raise AssertionError("ran without its environments")

    async def play():
        waiting = part()
        with pytest.raises(OSError, match="no more processes"):
            await _once(asyncio.create_task(start()), waiting)
        assert waiting.cr_frame is None, "it is never awaited"

    asyncio.run(play())
