"""Actors are scaled 1 → 4 → 1 by the policy during a run, as processes and on Ray; nothing is lost, whatever dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl_jax.config_file import read_config
from asyncrl_jax.local.environment import redis_password
from asyncrl_jax.observe.audit import audit
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.steering import Steering

from .varying_task import DELAY_FILE

sys.path.insert(0, str(Path(__file__).parents[1] / "fleets"))  # for ray_cluster

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(900)]

FLAGS = [
    "--config.environment.name=function:varying_task:last_digit",
    "--config.environment.level_weights=1",
    "--config.environment.demonstrated_levels=1",
    "--config.environment.max_turns=1",
    "--config.environment.turn_tokens=2",
    "--config.environment.max_tokens=32",
    "--config.warm_start.num_steps=0",
    "--config.model.vocab_size=258",
    "--config.model.num_layers=1",
    "--config.model.hidden_dim=16",
    "--config.model.expert_dim=16",
    "--config.learner.groups_per_update=4",
    "--config.learner.group_size=4",
    "--config.learner.num_updates=1000000",
    "--config.learner.checkpoint_every_updates=20",
    "--config.evaluation.every_updates=1000000",
    "--config.evaluation.num_tasks_per_level=4",
    "--config.redis.claim_idle_s=4",
    "--config.actor.num_hosts=1",
    "--config.actor.slots=4",
    "--config.actor.heartbeat_timeout_s=6",
    "--config.orchestrator.autoscale.enabled",
    "--config.orchestrator.autoscale.max_actors=4",
    "--config.orchestrator.autoscale.step=4",
    "--config.orchestrator.autoscale.window_s=8",
    "--config.orchestrator.autoscale.grow_cooldown_s=5",
    "--config.orchestrator.autoscale.shrink_cooldown_s=10",
    "--config.orchestrator.autoscale.starved_high=0.5",
    "--config.orchestrator.autoscale.starved_low=0.4",
    "--config.orchestrator.autoscale.busy_high=0.6",
    "--config.orchestrator.autoscale.drain_limit_s=30",
]
LIMIT_S = 240.0


class Run:
    """A run under way."""

    def __init__(self, directory: Path, flags: list[str], delay_file: Path):
        self.delay_file = delay_file
        self.directory = directory
        self.slow(0.0)  # the launcher looks at a hundred tasks before it starts
        command = [sys.executable, "-m", "asyncrl_jax.launchers.local", f"--config.run_dir={directory}", *flags]
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {DELAY_FILE: str(delay_file), "PYTHONPATH": paths}
        self.process = subprocess.Popen(command, env=environment)
        self.until(lambda: (directory / "redis" / "redis.password").exists(), "Redis is there")
        self.slow(3.0)
        self.until(lambda: read_config(directory / "config.json").redis.url, "its address is written")
        config = read_config(directory / "config.json")
        client, keys = connect(config.redis, redis_password(config.redis)), Keys(config.redis.namespace)
        self.control, self.steering = Control(client, keys), Steering(client, keys)

    def slow(self, seconds: float) -> None:
        draft = self.delay_file.with_suffix(".tmp")
        draft.write_text(str(seconds))
        draft.replace(self.delay_file)

    def until(self, condition, what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(OSError, ValueError):
                if condition():
                    return
            assert self.process.poll() is None, f"the run ended before {what}"
            assert time.monotonic() < deadline, f"in {LIMIT_S:.0f} s it did not come true that {what}"
            time.sleep(0.2)

    def alive(self) -> set[str]:
        return {name for role, name in self.control.heartbeats() if role == "actor"}

    def actions(self) -> list[str]:
        return [one.decision.action for one in self.steering.decisions() if one.decision.policy == "autoscale"]

    def finish(self):
        """Stops once nothing is outstanding. Returns what is left of the run."""
        self.steering.operate({"draining": True}, decision_by_hand())
        self.process.wait(LIMIT_S)
        return audit(self.directory)


def decision_by_hand():
    from asyncrl_jax.types import Decision

    return Decision("operator", "drain", "run", "the test is over")


@contextlib.contextmanager
def running(tmp_path, *flags):
    run = Run(tmp_path / "run", [*FLAGS, *flags], tmp_path / "delay")
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
        run.process.wait(60)


def scales_up_and_down(run: Run, at_four) -> None:
    four = {f"actor-{number}" for number in range(4)}
    run.until(lambda: run.alive() == {"actor-0"}, "one actor samples")
    run.until(lambda: run.alive() == four, "the policy has made it four")
    at_four(four)
    run.slow(0.0)
    run.until(lambda: run.alive() == {"actor-0"}, "the policy has made it one again")
    actions = run.actions()
    assert actions.index("grow") < actions.index("drain") < actions.index("remove")


def is_sound(report) -> None:
    assert report.sound, report.problems
    lost = {name: report.ledger.get(name, 0) for name in ("failed", "quarantined", "undone")}
    assert not any(lost.values()), report.ledger
    assert report.ledger["trained"] > 0


def test_local_actors_are_scaled_up_and_down_by_the_policy_and_nothing_is_lost(tmp_path):
    with running(tmp_path) as run:
        scales_up_and_down(run, lambda four: None)
        is_sound(run.finish())


@pytest.mark.ray
def test_actors_on_ray_are_scaled_up_and_down_a_node_dies_and_nothing_is_lost(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from ray_cluster import ENVIRONMENT, RayCluster

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    variables = {DELAY_FILE: str(tmp_path / "delay"), "PYTHONPATH": str(Path(__file__).parent), "JAX_PLATFORMS": "cpu"}
    cluster = RayCluster(variables)
    try:
        cluster.start("head", {"actor": 1}, head=True)
        cluster.start("second", {"actor": 3})
        flags = ["--config.orchestrator.fleet.kind=ray", "--config.orchestrator.fleet.ray_cpus=0.1"]
        flags += [f"--config.orchestrator.fleet.ray_address={cluster.address}"]
        with running(tmp_path, *flags) as run:

            def a_node_dies(four):
                cluster.start("third", {"actor": 4})
                cluster.kill("second")
                run.until(lambda: len(run.alive()) < 4, "actors died with their node")
                run.until(lambda: run.alive() == four, "they are back on another node")

            scales_up_and_down(run, a_node_dies)
            is_sound(run.finish())
    finally:
        cluster.close()
