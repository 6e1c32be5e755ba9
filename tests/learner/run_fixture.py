"""A whole run in one process but for the actors: real Redis, the real learner and orchestrator, and scripted actors.

The scripted actor answers a ticket with a group that follows from the ticket alone, so runs can be compared bit by bit.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from pathlib import Path

import numpy as np

from asyncrl_jax.config import (
    ActorConfig,
    Config,
    EnvironmentConfig,
    EvaluationConfig,
    LearnerConfig,
    ModelConfig,
    RedisConfig,
    WarmStartConfig,
)
from asyncrl_jax.config_file import write_config
from asyncrl_jax.learner.learner import Learner
from asyncrl_jax.learner.loop import finish, train
from asyncrl_jax.learner.resume import start_or_resume
from asyncrl_jax.observe.audit import AuditReport, audit
from asyncrl_jax.orchestrator.loop import Orchestrator
from asyncrl_jax.transport.codec import Limits
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.groups import GroupWriter
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.server import Server
from asyncrl_jax.transport.steering import Steering
from asyncrl_jax.transport.tasks import TaskStream
from asyncrl_jax.types import EvaluationRequest, EvaluationResult, Group, Ticket, Trajectory
from tests.builders import make_trajectory


class Crash(BaseException):
    """Ends a learner where it stands, as a kill would."""


def small_config(run_dir: Path, server: Server, *, mode: str = "sync", num_updates: int = 6, **learner: int) -> Config:
    return Config(
        run_dir=str(run_dir),
        mode=mode,
        redis=RedisConfig(url=server.url, namespace=uuid.uuid4().hex, claim_idle_s=5, outage_s=10),
        model=ModelConfig(
            num_layers=1,
            hidden_dim=16,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            num_experts=4,
            expert_dim=16,
            vocab_size=16,
            max_positions=16,
        ),
        environment=EnvironmentConfig(max_tokens=12),
        warm_start=WarmStartConfig(num_steps=0),
        learner=LearnerConfig(
            num_updates=num_updates,
            groups_per_update=3,
            group_size=2,
            pack_tokens=16,
            microbatch_rows=2,
            **{"checkpoint_every_updates": 3, **learner},
        ),
        actor=ActorConfig(heartbeat_s=0.2),
        evaluation=EvaluationConfig(every_updates=1000, num_tasks_per_level=1),
    )


def scripted_group(ticket: Ticket, version: int) -> Group:
    """Random tokens that follow from the ticket."""

    def member(rng: np.random.Generator) -> Trajectory:
        length = int(rng.integers(4, 12))
        mask_T = (np.arange(length) >= 2).astype(np.uint8)
        return make_trajectory(
            rng.integers(0, 16, length),
            np.where(mask_T, version, -1),
            behaviour_logprobs=np.where(mask_T, -rng.random(length) * 3, 0).astype(np.float32),
            reward=float(rng.random()),
            success=bool(rng.random() < 0.5),
            sampling_started_at=ticket.issued_at,
            sampling_ended_at=ticket.issued_at + 1,
        )

    # By the count alone: ids and seeds of a replacement ticket differ, what it stands for may not.
    rng = np.random.default_rng(ticket.task.index)
    return Group(ticket, tuple(member(rng) for _ in range(ticket.group_size)), "actor-0")


class ScriptedRun:
    """The orchestrator and a scripted actor on a thread, beside a learner that the test runs."""

    def __init__(self, config: Config, server: Server):
        self.config = config
        self.run_dir = Path(config.run_dir)
        self._password = server.password
        self.redis = connect(config.redis, server.password)
        self.keys = Keys(config.redis.namespace)
        self.control = Control(self.redis, self.keys)
        self.ledger = Ledger(self.redis, self.keys)
        self.steering = Steering(self.redis, self.keys)
        self.evaluate = self._solved  # result of an evaluation request
        self.withhold_evaluations_after: int | None = None  # update beyond which no evaluation is answered
        self.withheld: set[int] = set()  # task counts that the actor claims and never answers
        self.stale: set[int] = set()  # task counts that the actor answers with weights of v0, against what was asked
        self.learner: Learner | None = None
        self.turn = threading.Lock()  # held while orchestrator and actor do anything
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.error: BaseException | None = None
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_config(self.run_dir / "config.json", config)

    def __enter__(self) -> ScriptedRun:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self.redis.close()
        if self.error is not None:
            raise self.error

    def make_learner(self) -> Learner:
        self.learner = Learner(self.config, self.run_dir, self._password, threading.Event())
        return self.learner

    def drive(self, learner: Learner) -> None:
        """Runs the learner until its updates are done and durable, or it crashes."""
        learner.vitals.start()
        try:
            start_or_resume(learner)
            train(learner)
            if self.evaluate == self._solved:
                learner.publish(wait=True)
                learner.save_checkpoint()
                learner.wait_durable()
            else:  # what the last evaluation says may send the learner back
                while finish(learner):
                    train(learner)
        finally:
            learner.vitals.close()
            learner.metrics.close()
            for background in (learner.publisher._thread, learner.checkpoints._writer):
                background.shutdown(wait=True)  # a killed process has no threads left either

    def audit(self) -> AuditReport:
        return audit(self.run_dir, self.redis)

    def _solved(self, request: EvaluationRequest) -> EvaluationResult:
        return EvaluationResult(request.evaluation_id, request.version, request.update, {1: 1}, {1: 1}, 1.0)

    def _serve(self) -> None:
        try:
            self._serve_until_stopped()
        except BaseException as error:  # noqa: BLE001  raised again by __exit__
            self.error = error
            if self.learner is not None:
                self.learner.stop.set()

    def _serve_until_stopped(self) -> None:
        orchestrator = Orchestrator.on(self.redis, self.keys, self.config, None, self.run_dir)
        tasks = TaskStream(self.redis, self.keys, "actor-0", self.config.redis)
        writer = GroupWriter(self.redis, self.keys, self.config.redis, Limits.from_config(self.config))
        waiting = []
        while not self._stop.is_set():
            with self.turn:
                orchestrator.tick()
                for request in self.control.pending_evaluations():
                    limit = self.withhold_evaluations_after
                    if limit is None or request.update <= limit:
                        self.control.report_evaluation(self.evaluate(request))
                waiting += tasks.claim(8, 5)
                latest = self.control.latest()
                for delivery in list(waiting):
                    ticket = delivery.ticket
                    if ticket.task.index in self.withheld:
                        continue
                    if latest is not None and latest.line == ticket.line and latest.update >= ticket.min_update:
                        version = 0 if ticket.task.index in self.stale else latest.number
                        writer.submit(delivery, scripted_group(ticket, version))
                        waiting.remove(delivery)
            time.sleep(0.002)


def crash_once(target: object, name: str, monkeypatch, *, when=lambda *_, **__: True, after: bool = False) -> None:
    """Makes the next call of `target.name` that `when` names crash, before or after it has run."""
    real = getattr(target, name)
    armed = [True]

    def crashing(*args, **kwargs):
        if armed[0] and when(*args, **kwargs):
            armed[0] = False
            if after:
                real(*args, **kwargs)
            raise Crash(name)
        return real(*args, **kwargs)

    monkeypatch.setattr(target, name, crashing)


def trained_tasks(report_dir: Path) -> dict[int, tuple[int, ...]]:
    """Updates that trained each task, by its count, from the archive alone."""
    from asyncrl_jax.transport.archive import read_groups

    rows = [row for path in sorted((report_dir / "archive").glob("groups-*.avro")) for row in read_groups(path)]
    assert len(rows) == len({row.group.ticket.ticket_id for row in rows})
    return {row.group.ticket.task.index: row.updates for row in rows}


def replaced(config: Config, **changes: object) -> Config:
    return dataclasses.replace(config, **changes)
