"""Orchestrators as real processes: the leader is killed three times, a standby takes over, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl_jax.config import Config, LearnerConfig, override
from asyncrl_jax.config_file import write_config
from asyncrl_jax.transport.groups import GroupReader, GroupWriter
from asyncrl_jax.transport.ledger import recompute
from asyncrl_jax.transport.tasks import TaskStream
from asyncrl_jax.types import LearnerState, Outcome, WeightVersion

LIMIT_S = 60.0


@pytest.fixture
def candidates(space, server, tmp_path):
    config = override(
        Config(learner=LearnerConfig(groups_per_update=4, group_size=2, num_updates=100_000)),
        {
            "redis.url": server.url,
            "redis.namespace": space.keys.namespace,
            "redis.partitions": 1,
            "orchestrator.lease_s": 0.5,
        },
    )
    write_config(tmp_path / "config.json", config)
    started = []

    def start():
        command = [
            sys.executable,
            str(Path(__file__).parent / "candidate.py"),
            str(tmp_path / "config.json"),
            str(tmp_path),
        ]
        environment = os.environ | {"PASSWORD": server.password, "PYTHONPATH": str(Path(__file__).parents[2])}
        started.append(subprocess.Popen(command, env=environment))

    yield config, start
    for process in started:
        process.kill()
        process.wait()


def test_the_leader_is_killed_three_times_and_a_standby_goes_on_where_it_stood(space, candidates):
    config, start = candidates
    tasks = TaskStream(space.client, space.keys, "actor", config.redis)
    writer = GroupWriter(space.client, space.keys, config.redis, limits=None)
    reader = GroupReader(space.client, space.keys, "learner", config.redis)
    space.control.announce(WeightVersion(0, None, 0, 0, "0" * 32))
    update, trained, leaders = 0, 0, []

    def work_until(condition):
        nonlocal update, trained
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, "no leader issues tickets"
            space.control.set_learner(LearnerState(0, update, 0, "training"))
            for delivery in tasks.claim(8, 20):
                assert writer.submit_encoded(delivery, b"group")
            entries = [(entry, entry.ticket.ticket_id) for entry in reader.read(16, 0)]
            reader.complete(entries, Outcome.TRAINED, update)
            trained += len(entries)
            update = trained // 4

    def leader():
        holder = space.client.hget(space.keys.leader, "holder")
        return None if holder is None else int(holder.decode().split("/")[1])

    for _ in range(3):
        start()
    for _ in range(3):
        before = update
        work_until(lambda before=before: update > before + 3 and leader() not in (None, *leaders))
        leaders.append(leader())
        os.kill(leaders[-1], 9)
        start()
    before = update
    work_until(lambda: update > before + 3 and leader() not in (None, *leaders))
    assert len(set(leaders)) == 3
    events = recompute(space.ledger.events(count=100_000))
    assert events.balances
    assert events.outcomes[Outcome.TRAINED] == trained
    assert space.ledger.duplicates() == 0
    tokens = space.client.hget(space.keys.leader, "count")
    assert int(tokens) >= 4
