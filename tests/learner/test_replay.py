"""A replay of the archive gives the weights of the run, bit by bit; what is missing or abandoned is told."""

from __future__ import annotations

import pytest

from asyncrl_jax.config_data import PoolConfig
from asyncrl_jax.learner.replay import replay
from asyncrl_jax.transport.archive import read_batches
from asyncrl_jax.types import Line, on_line

from .run_fixture import Crash, ScriptedRun, crash_once, replaced, small_config

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("compile_once")]


def test_the_archive_makes_the_same_weights_again_twice(server, tmp_path, monkeypatch):
    """Async, drawn by strata with weights, two uses a group, a kill on the way: fed twice, bit-equal to the run."""
    config = small_config(tmp_path / "run", server, mode="async", num_updates=7, replay_ratio=2)
    config = replaced(config, pool=PoolConfig(draw="strata", max_draw_weight=3.0))
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        crash_once(learner.control, "append_redo", monkeypatch, when=lambda update, _: update == 5)
        with pytest.raises(Crash):
            run.drive(learner)
        resumed = run.make_learner()
        run.drive(resumed)
        resumed.archive_held()
        report = run.audit()
        digest = resumed.trainer.weights_digest()
    assert report.sound, report.problems
    drawn = [batch for path in (run.run_dir / "archive").glob("updates-*") for batch in read_batches(path)]
    assert sorted(batch.update for batch in drawn) == list(range(7))
    assert any(weight != 1 for batch in drawn for weight in batch.weights)
    first, second = replay(config, run.run_dir), replay(config, run.run_dir)
    assert first == second
    assert (first.updates, first.weights_digest, first.differing) == (7, digest, ())
    assert len(first.compared) == 8
    assert replay(config, run.run_dir, 4).weights_digest != digest
    for path in (run.run_dir / "archive").glob("groups-*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"the group of ticket .* is not there"):
        replay(config, run.run_dir)


LINES = {0: Line(0), 1: Line(1, 0, 3), 2: Line(2, 0, 5), 3: Line(3, 2, 8)}


@pytest.mark.parametrize(
    ("line", "update", "surviving", "expected"),
    [
        (0, 2, 0, True),
        (0, 99, 0, True),
        (0, 2, 1, True),
        (0, 3, 1, False),  # the update that line 1 made instead
        (1, 3, 1, True),
        (1, 3, 2, False),
        (1, 2, 2, True),  # shared by all
        (0, 4, 3, True),
        (0, 5, 3, False),
        (2, 7, 3, True),
        (2, 8, 3, False),
        (3, 8, 3, True),
        (1, 4, 3, False),
    ],
)
def test_an_update_is_on_the_surviving_line_until_a_fork_left_it_behind(line, update, surviving, expected):
    assert on_line(line, update, surviving, LINES) is expected
