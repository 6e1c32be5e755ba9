"""The leading orchestrator is killed every 20 s for five minutes: training goes on and the state is intact."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from asyncrl_jax.config_file import read_config
from asyncrl_jax.local.environment import redis_password
from asyncrl_jax.observe.audit import audit
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.keys import Keys

from .test_small_run import SMALL

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1200)]

KILLS, EVERY_S, LEASE_S = 15, 20.0, 2.0


def test_killing_the_leader_every_20_s_for_5_minutes_costs_at_most_three_leases_each(tmp_path):
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--config.learner.num_updates=100000", f"--config.orchestrator.lease_s={LEASE_S}"]
    command = [sys.executable, "-m", "asyncrl_jax.launchers.local", f"--config.run_dir={run_dir}"]
    process = subprocess.Popen([*command, *flags, "--config.orchestrator.num_instances=2"])
    took_over, updates = [], []
    try:
        rows = run_dir / "metrics" / "learner.jsonl"
        while not (rows.exists() and rows.stat().st_size):  # it trains
            _wait(1.0, process)
        config = read_config(run_dir / "config.json")
        client, keys = connect(config.redis, redis_password(config.redis)), Keys(config.redis.namespace)
        for _ in range(KILLS):
            _wait(EVERY_S, process)
            updates.append(int(json.loads(client.get(keys.learner))["update"]))
            holder = client.hget(keys.leader, "holder")
            os.kill(int(holder.decode().split("/")[1]), signal.SIGKILL)
            killed_at = time.monotonic()
            while client.hget(keys.leader, "holder") == holder:
                assert time.monotonic() - killed_at < 10 * LEASE_S, "nobody took over"
                time.sleep(0.02)
            took_over.append(time.monotonic() - killed_at)
        _wait(EVERY_S, process)
        updates.append(int(json.loads(client.get(keys.learner))["update"]))
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    assert max(took_over) <= 3 * LEASE_S, took_over
    assert all(later > earlier for earlier, later in itertools.pairwise(updates)), updates
    report = audit(run_dir)
    assert report.sound, report.problems
    assert report.line == 0


def _wait(seconds, process):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert process.poll() is None, "the run ended"
        time.sleep(0.1)
