"""A learner that dies anywhere goes on as if it had not: same weights, same groups, every ticket accounted for."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.learner import settlement
from asyncrl_jax.transport.server import start_server

from .run_fixture import Crash, ScriptedRun, crash_once, small_config, trained_tasks

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = start_server(tmp_path_factory.mktemp("redis"), RedisConfig())
    yield started
    started.stop()


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Every learner compiles the same step; later ones find it on disk."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("jit")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


@pytest.fixture(scope="module")
def straight(server, tmp_path_factory):
    """An uninterrupted run: its trained tasks, its last weights and its train state."""
    config = small_config(tmp_path_factory.mktemp("straight"), server, num_updates=9)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        run.drive(learner)
        assert run.audit().sound, run.audit().problems
    return trained_tasks(run.run_dir), learner.trainer.weights_digest(), jax.device_get(learner.trainer.state)


CRASHES = {
    "before_the_redo_log": ("control", "append_redo", {"when": lambda update, _: update == 5}),
    "after_the_redo_log": ("control", "append_redo", {"when": lambda update, _: update == 5, "after": True}),
    "after_the_update": ("trainer", "update", {"when": lambda *args: args[-1] == 4, "after": True}),
    "between_commit_and_announcement": ("control", "announce", {"when": lambda version: version.update == 5}),
    "before_the_checkpoint": ("checkpoints", "save", {"when": lambda step, *_: step == 6}),
    "before_the_archive": ("settlement", "settle", {}),
    "after_the_archive": (settlement, "write_groups", {"after": True}),
    "between_two_partitions": ("reader", "_complete", {"after": True}),
    "before_the_redo_log_is_trimmed": ("control", "trim_redo", {"when": lambda update: update == 6}),
    "before_the_events_are_discarded": ("ledger", "discard_events", {}),
}


@pytest.mark.parametrize("where", CRASHES)
def test_ckpt_01_05_q_01_a_crash_changes_neither_weights_nor_what_is_trained(
    where, straight, server, tmp_path, monkeypatch
):
    """At any point of an update: the same groups are trained, once each, to the same bits, and the ledger balances."""
    place, name, options = CRASHES[where]
    config = small_config(tmp_path / where, server, num_updates=9)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        crash_once(getattr(learner, place) if isinstance(place, str) else place, name, monkeypatch, **options)
        with pytest.raises(Crash):
            run.drive(learner)
        resumed = run.make_learner()
        run.drive(resumed)
        report = run.audit()
        counts = run.ledger.counts()
    tasks, digest, state = straight
    assert report.sound, report.problems
    assert counts == {"issued": 27, "trained": 27, "pending": 0} | dict.fromkeys(
        ("expired", "filtered", "quarantined", "failed", "undone"), 0
    )
    assert report.line == 0
    assert trained_tasks(run.run_dir) == tasks
    assert resumed.trainer.weights_digest() == digest
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed.trainer.state), state)
    assert resumed.progress.lag_histogram == {0: resumed.progress.tokens_trained}


def test_a_learner_that_cannot_reproduce_its_updates_opens_a_new_line(server, tmp_path, monkeypatch):
    """The payload of a trained group is gone: the updates since the checkpoint are undone, and named so."""
    config = small_config(tmp_path / "fork", server, num_updates=9)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        crash_once(learner.control, "append_redo", monkeypatch, when=lambda update, _: update == 6)
        with pytest.raises(Crash):
            run.drive(learner)
        lost_partition, lost_entry = run.control.redo(4)[0]["groups"][0][1:]
        run.redis.xdel(run.keys.groups(lost_partition), lost_entry)
        resumed = run.make_learner()
        run.drive(resumed)
        report = run.audit()
        lines = run.control.lines()
        versions = run.control.versions()
    assert (report.line, lines[1].parent, lines[1].fork_update) == (1, 0, 3)
    on_new_line = [version for version in versions.values() if version.line == 1]
    assert min(version.update for version in on_new_line) == 3
    first = min(on_new_line, key=lambda version: version.number)
    assert versions[first.parent].update == 3
    assert versions[first.parent].line == 0
    assert len({version.number for version in versions.values()}) == len(versions)
    assert report.sound, report.problems
    assert resumed.update == 9


def test_q_13_a_redis_that_lost_its_data_opens_a_new_epoch(server, tmp_path):
    """The run says so, asks for the lost groups anew, and ends; nothing hangs."""
    config = small_config(tmp_path / "reset", server, num_updates=9)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        real = learner.checkpoint_if_due

        def reset_at_five():
            if learner.update == 5 and run.control.epoch() == 1:
                for key in run.redis.scan_iter(f"{config.redis.namespace}:*"):
                    run.redis.delete(key)
            real()

        learner.checkpoint_if_due = reset_at_five
        run.drive(learner)
        assert run.control.epoch() == 2
        assert learner.update == 9
        report = run.audit()
    assert report.sound, report.problems
    assert report.ledger["pending"] == 0
