"""A Redis that loses things, and messages made to harm: nothing is trained twice, and no ticket goes astray."""

from __future__ import annotations

import threading

import pytest

from asyncrl_jax.config import LagConfig
from asyncrl_jax.learner.loop import finish
from asyncrl_jax.transport.keys import GROUP_CONSUMERS

from .run_fixture import Crash, ScriptedRun, crash_once, replaced, small_config

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("compile_once")]


def lose_everything(run: ScriptedRun) -> None:
    """As a server whose data directory is gone; only this run's keys, since tests share a server."""
    run.redis.delete(*run.redis.scan_iter(f"{run.keys.namespace}:*"))


def once_at(learner, update: int, act) -> None:
    """Calls `act` once, after that update."""
    real, due = learner.checkpoint_if_due, [True]

    def checkpoint_if_due():
        if learner.update == update and due:
            due.clear()
            act()
        real()

    learner.checkpoint_if_due = checkpoint_if_due


def test_a_consumer_group_that_is_destroyed_makes_nothing_train_twice(server, tmp_path):
    config = small_config(tmp_path / "destroyed", server, num_updates=9)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()

        def destroy():
            for partition in range(config.redis.partitions):
                assert run.redis.xgroup_destroy(run.keys.groups(partition), GROUP_CONSUMERS)

        once_at(learner, 5, destroy)
        run.drive(learner)
        report = run.audit()
    assert report.sound, report.problems
    assert report.ledger["issued"] == report.ledger["trained"] == 27


def test_a_reset_leaves_no_ticket_that_was_used_once_of_two_times_without_an_outcome(server, tmp_path):
    lag = LagConfig(actor_updates=2, token_updates=6, straggler_wait_s=1)
    config = small_config(tmp_path / "replay", server, mode="async", num_updates=9, replay_ratio=2)
    with ScriptedRun(replaced(config, lag=lag), server) as run:
        learner = run.make_learner()
        once_at(learner, 5, lambda: lose_everything(run))
        run.drive(learner)
        report = run.audit()
    assert report.sound, report.problems


@pytest.mark.parametrize("where", ["record_lost", "announce", "append_redo"])
def test_a_learner_killed_after_a_reset_leaves_no_ticket_without_an_outcome(where, server, tmp_path, monkeypatch):
    config = small_config(tmp_path / where, server, mode="async", num_updates=9)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()

        def lose():
            lose_everything(run)
            owner = learner.settlement if where == "record_lost" else learner.control
            crash_once(owner, where, monkeypatch)

        once_at(learner, 5, lose)
        with pytest.raises(Crash):
            run.drive(learner)
        resumed = run.make_learner()
        run.drive(resumed)
        report = run.audit()
    assert report.sound, report.problems
    assert resumed.update == 9


def test_a_reset_after_the_last_update_does_not_keep_the_run_from_ending(server, tmp_path):
    config = small_config(tmp_path / "late", server, num_updates=3)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        run.drive(learner)
        lose_everything(run)
        finishing = threading.Thread(target=finish, args=(learner,), daemon=True)
        finishing.start()
        finishing.join(10)
        assert not finishing.is_alive()
        assert run.control.phase() == "finished"


def test_an_epoch_that_was_raised_without_a_loss_leaves_no_ticket_astray(server, tmp_path):
    config = small_config(tmp_path / "raised", server, num_updates=9)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        once_at(learner, 5, lambda: run.redis.set(run.keys.epoch, 7))
        threading.Timer(25, learner.stop.set).start()
        run.drive(learner)
        report = run.audit()
    assert report.sound, report.problems
    assert learner.update == 9


def test_a_redis_that_has_gone_back_in_time_is_not_believed(server, tmp_path):
    """As after a power cut without a sync: what it holds as live was settled and archived long ago."""
    config = small_config(tmp_path / "gone-back", server, num_updates=9)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        earlier: dict[bytes, bytes] = {}

        def remember() -> None:
            names = list(run.redis.scan_iter(f"{run.keys.namespace}:*"))
            dumps = {name: run.redis.dump(name) for name in names}
            earlier.update({name: data for name, data in dumps.items() if data is not None})  # it may go meanwhile

        once_at(learner, 4, remember)
        run.drive(learner)
    longer = replaced(config, learner=replaced(config.learner, num_updates=12))
    run = ScriptedRun(longer, server)
    lose_everything(run)
    for name, value in earlier.items():
        run.redis.restore(name, 0, value)
    with run:
        resumed = run.make_learner()
        run.drive(resumed)
        report = run.audit()
        assert run.control.epoch() == 2
    assert resumed.update == 12
    assert report.sound, report.problems
