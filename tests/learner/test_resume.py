"""A learner that dies anywhere goes on as if it had not: same weights, same groups, every ticket accounted for."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from asyncrl_jax.learner import settlement
from asyncrl_jax.learner.resume import start_or_resume

from .run_fixture import Crash, ScriptedRun, crash_once, small_config, trained_tasks

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("compile_once")]


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
    "after_the_update": ("trainer", "update", {"when": lambda *args: args[4] == 4, "after": True}),
    "between_commit_and_announcement": ("control", "announce", {"when": lambda version: version.update == 5}),
    "before_the_checkpoint": ("checkpoints", "save", {"when": lambda step, *_: step == 6}),
    "before_the_archive": ("settlement", "settle", {"when": lambda *, groups, **_: groups}),
    "after_the_archive": (settlement, "write_groups", {"after": True}),
    "between_two_partitions": ("reader", "_complete", {"after": True}),
    "before_the_redo_log_is_trimmed": ("control", "trim_redo", {"when": lambda update: update == 6}),
    "before_the_events_are_discarded": ("ledger", "discard_events", {"when": lambda ids: len(ids) > 9}),  # not of v0
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


def redo_log_lost(run, resumed, monkeypatch):
    run.redis.delete(run.keys.redo)


def replay_differs(run, resumed, monkeypatch):
    real = resumed.trainer.weights_digest
    monkeypatch.setattr(resumed.trainer, "weights_digest", lambda: "other" if resumed.update == 4 else real())


@pytest.mark.parametrize(
    ("fault", "left_behind"),
    [(replay_differs, {"undone": 3, "expired": 3}), (redo_log_lost, {"undone": 0, "expired": 6})],
)
def test_ckpt_03_parts_that_stand_at_different_steps_all_go_back_to_the_checkpoint(
    fault, left_behind, server, tmp_path, monkeypatch
):
    """Checkpoint 3, versions announced up to 4, v5 written and never announced: all go on from 3, on a new line.

    Groups that v3 sampled are trained again. What v4 sampled is too old for lag 0: undone where the redo log says that
    it was trained on, else expired.
    """
    config = small_config(tmp_path / fault.__name__, server, num_updates=9)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        crash_once(learner.control, "announce", monkeypatch, when=lambda version: version.update == 5)
        with pytest.raises(Crash):
            run.drive(learner)
        resumed = run.make_learner()
        fault(run, resumed, monkeypatch)
        run.drive(resumed)
        report = run.audit()
        counts = run.ledger.counts()
        state = run.control.learner()
        versions = run.control.versions()
    assert report.sound, report.problems
    assert (report.line, report.update, state.line, state.update, resumed.update) == (1, 9, 1, 9, 9)
    announced = [(version.line, version.update) for version in versions.values()]
    assert announced == [(0, n) for n in range(5)] + [(1, n) for n in range(3, 10)]
    assert {name: counts[name] for name in left_behind} == left_behind
    assert (counts["trained"], counts["pending"]) == (27, 0)


def test_a_line_that_dies_before_its_first_checkpoint_leaves_its_number_behind(server, tmp_path, monkeypatch):
    """Two kills, both of which make the learner fork at 3: what line 1 published is never taken for line 2's."""
    config = small_config(tmp_path / "twice", server, num_updates=9)
    with ScriptedRun(config, server) as run:
        for _ in range(2):
            learner = run.make_learner()
            crash_once(learner.control, "append_redo", monkeypatch, when=lambda update, _: update == 6)
            with pytest.raises(Crash):
                run.drive(learner)
            run.redis.delete(run.keys.redo)
        run.drive(run.make_learner())
        report = run.audit()
        lines = run.control.lines()
        versions = run.control.versions()
    assert report.sound, report.problems
    assert report.line == 2
    assert {n: (line.parent, line.fork_update) for n, line in lines.items()} == {0: (None, 0), 1: (0, 3), 2: (0, 3)}
    places = [(version.line, version.update) for version in versions.values()]
    assert len(set(places)) == len(places)


def test_q_13_a_redis_that_lost_its_data_opens_a_new_epoch(server, tmp_path):
    """The run says so, asks for the lost groups anew, and ends; nothing hangs."""
    config = small_config(tmp_path / "reset", server, num_updates=9)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        real = learner.checkpoint_if_due

        def reset_at_five():
            if learner.update == 5 and run.control.epoch() == 1:
                with run.turn:  # a reset is one moment, and an orchestrator that issues through it ends with an error
                    run.redis.delete(*run.redis.scan_iter(f"{config.redis.namespace}:*"))
            real()

        learner.checkpoint_if_due = reset_at_five
        run.drive(learner)
        assert run.control.epoch() == 2
        assert learner.update == 9
        report = run.audit()
    assert report.sound, report.problems
    assert report.ledger["pending"] == 0


def damage(directory, step: int) -> None:
    """Flips bytes in the largest file of a checkpoint."""
    path = max((directory / f"{step:08d}").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 3, len(data) // 3 + 64):
        data[at] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("archive", ["whole", "lost"])
def test_ckpt_03_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    archive, straight, server, tmp_path, monkeypatch, caplog
):
    """Said aloud. The archive makes the updates again to the same bits; without it a new line is opened."""
    config = small_config(tmp_path / archive, server, num_updates=9)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        crash_once(learner.control, "append_redo", monkeypatch, when=lambda update, _: update == 8)
        with pytest.raises(Crash):
            run.drive(learner)
        assert learner.checkpoints.steps()[-2:] == [3, 6]
        damage(run.run_dir / "checkpoints", 6)
        if archive == "lost":
            for path in (run.run_dir / "archive").glob("updates-*"):
                path.unlink()
        resumed = run.make_learner()
        with caplog.at_level("ERROR"):
            run.drive(resumed)
        report = run.audit()
    assert "checkpoint 6 is damaged and left out" in caplog.text
    assert "going back to checkpoint 3" in caplog.text
    assert resumed.update == 9
    if archive == "whole":
        assert report.sound, report.problems
        assert (report.line, resumed.trainer.weights_digest()) == (0, straight[1])
        assert trained_tasks(run.run_dir) == straight[0]
    else:
        assert report.line == 1
        assert "cannot be" in caplog.text or "is published" in caplog.text


def test_ckpt_03_without_a_readable_checkpoint_the_learner_says_so(server, tmp_path):
    config = small_config(tmp_path / "none", server, num_updates=3)
    with ScriptedRun(config, server) as run:
        run.drive(run.make_learner())
        damage(run.run_dir / "checkpoints", 3)
        damage(run.run_dir / "checkpoints", 0)
        with pytest.raises(ValueError, match="can be read"):
            run.drive(run.make_learner())


def test_ckpt_05_what_an_abandoned_line_trained_is_remembered_by_the_checkpoint(server, tmp_path):
    """A ticket trained on an abandoned line ends as undone, also when the learner that knew is gone."""
    config = small_config(tmp_path / "undone", server, num_updates=3)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        save = learner.checkpoint_if_due

        def remember():
            learner.undone.add("1-99")
            save()

        learner.checkpoint_if_due = remember
        run.drive(learner)
        resumed = run.make_learner()
        start_or_resume(resumed)
        assert resumed.undone == {"1-99"}
        resumed.close()


def test_ckpt_03_updates_of_another_line_in_the_redo_log_are_not_made_again(server, tmp_path, monkeypatch):
    config = small_config(tmp_path / "lines", server, num_updates=9)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        crash_once(learner.control, "append_redo", monkeypatch, when=lambda update, _: update == 6)
        with pytest.raises(Crash):
            run.drive(learner)
        fifth = run.control.redo(4)[0]
        run.control.append_redo(6, {"line": 9, "seed": 1, "groups": fifth["groups"], "weights": fifth["weights"]})
        resumed = run.make_learner()
        start_or_resume(resumed)
        assert (resumed.line, resumed.update) == (0, 5)
        resumed.close()
