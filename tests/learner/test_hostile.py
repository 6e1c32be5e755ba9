"""A Redis that loses things, and messages made to harm: nothing is trained twice, and no ticket goes astray."""

from __future__ import annotations

import pytest

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport.keys import GROUP_CONSUMERS
from asyncrl_jax.transport.server import start_server

from .run_fixture import ScriptedRun, small_config

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = start_server(tmp_path_factory.mktemp("redis"), RedisConfig())
    yield started
    started.stop()


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
