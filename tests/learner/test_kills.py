"""Killed again and again in one run: the ledger balances, and a replay of the surviving line gives its weights.

In every test run a few kills inside one process; `make accept` has 20 of real processes, at random moments.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl_jax.config import Config
from asyncrl_jax.config_data import PoolConfig
from asyncrl_jax.learner.learner import Learner
from asyncrl_jax.learner.replay import replay
from asyncrl_jax.local.environment import PASSWORD_VARIABLE
from asyncrl_jax.transport.archive import read_groups
from asyncrl_jax.weights.manifest import content_digest
from asyncrl_jax.weights.read import read_manifest

from .run_fixture import Crash, ScriptedRun, replaced, small_config

pytestmark = pytest.mark.usefixtures("compile_once")

NUM_KILLS = 20
PLACES = (
    ("control", "append_redo"),
    ("control", "announce"),
    ("control", "trim_redo"),
    ("control", "set_learner"),
    ("trainer", "update"),
    ("checkpoints", "save"),
    ("settlement", "settle"),
    ("reader", "complete"),
    ("ledger", "discard_events"),
    ("pool", "draw"),
)


def config_of(run_dir: Path, server, num_updates: int) -> Config:
    config = small_config(run_dir, server, mode="async", num_updates=num_updates, replay_ratio=2)
    return replaced(config, pool=PoolConfig(draw="strata"))


def crash_after(learner: Learner, num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the learner at its `num_calls`-th passage of any of the places, counting entry and exit of each."""
    left = [num_calls]

    def pass_by() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Crash

    def watched(real):
        def call(*args, **kwargs):
            pass_by()
            answer = real(*args, **kwargs)
            pass_by()
            return answer

        return call

    for part, name in PLACES:
        target = getattr(learner, part)
        monkeypatch.setattr(target, name, watched(getattr(target, name)))


def check(run: ScriptedRun, config: Config, num_updates: int) -> None:
    """The ledger balances, no group was used too often, and a replay gives the newest weights."""
    report = run.audit()
    versions = [v for v in run.control.versions().values() if v.line == report.line and v.update == num_updates]
    assert report.sound, report.problems
    assert report.update == num_updates
    rows = [row for path in (run.run_dir / "archive").glob("groups-*") for row in read_groups(path)]
    assert max(len(row.updates) for row in rows) <= config.learner.replay_ratio
    assert len({row.group.ticket.ticket_id for row in rows}) == len(rows)
    assert sum(report.ledger[name] for name in report.ledger if name != "issued") == report.ledger["issued"]
    replayed = replay(config, run.run_dir)
    assert replayed.updates == num_updates
    assert replayed.differing == ()
    published = read_manifest(config.weights.directory or str(run.run_dir / "weights"), versions[0].number)
    assert replayed.weights_digest == content_digest(published)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0])
def test_obs_05_ckpt_01_three_kills_at_random_places_leave_a_balanced_ledger_and_a_run_that_can_be_replayed(
    seed, server, tmp_path, monkeypatch
):
    rng = random.Random(seed)
    config = config_of(tmp_path / "run", server, num_updates=8)
    with ScriptedRun(config, server) as run:
        for _ in range(3):
            learner = run.make_learner()
            with monkeypatch.context() as patches:
                crash_after(learner, rng.randint(6, 40), patches)
                with pytest.raises(Crash):
                    run.drive(learner)
        resumed = run.make_learner()
        run.drive(resumed)
        resumed.archive_held()
        check(run, config, 8)


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
def test_obs_05_ckpt_01_twenty_kills_of_real_processes_leave_a_run_that_can_be_replayed(server, compiled, tmp_path):
    """SIGKILL 20 times, each at a random moment between the start of a process and a dozen updates later."""
    rng = random.Random(7)
    num_updates = 400
    config = config_of(tmp_path / "run", server, num_updates)
    command = [sys.executable, "-m", "asyncrl_jax.launchers.learner", f"--config_file={tmp_path / 'run/config.json'}"]
    environment = os.environ | {
        PASSWORD_VARIABLE: server.password,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with ScriptedRun(config, server) as run, (tmp_path / "learner.log").open("w") as log:
        reached = []
        for _ in range(NUM_KILLS):
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            at, since = _update(run), time.monotonic()
            goes_on = rng.random() < 0.8  # else it dies on its way up
            while goes_on and _update(run) <= at and time.monotonic() - since < 120:
                assert process.poll() is None, (tmp_path / "learner.log").read_text()[-3000:]
                time.sleep(0.02)
            time.sleep(rng.uniform(0.0, 1.0 if goes_on else 8.0))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            reached.append(_update(run))
        assert reached[-1] < num_updates, "every kill strikes a run in motion"
        last = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=900, check=False)
        assert last.returncode == 0, (tmp_path / "learner.log").read_text()[-3000:]
        check(run, config, num_updates)


def _update(run: ScriptedRun) -> int:
    state = run.control.learner()
    return state.update if state else 0
