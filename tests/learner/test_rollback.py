"""A fall of held-out success sends the learner back to the last good checkpoint, on a new line; the run ends well."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from asyncrl_jax.config import EvaluationConfig
from asyncrl_jax.orchestrator.decision_files import read_decisions
from asyncrl_jax.transport.archive import read_groups
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.types import EvaluationResult
from asyncrl_jax.weights.read import describe, read

from .run_fixture import Crash, ScriptedRun, crash_once, small_config

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("compile_once")]


def poison(learner, monkeypatch, at):
    """One update, once, that ruins the weights: an exploded step that the learner took for a good one."""
    real, done = learner.trainer.update, []

    def update(*args):
        values = real(*args)
        if args[4] == at and not done:
            done.append(at)
            state = learner.trainer._state
            ruined = jax.tree.map(lambda leaf: leaf + 3.0, state.params)
            learner.trainer._state = state._replace(params=ruined)
        return values

    monkeypatch.setattr(learner.trainer, "update", update)


class HeldOut:
    """Success of the very weights that were published: nine in ten, or one in ten when they are ruined."""

    def __init__(self, run):
        self.run = run
        self.norms: dict[int, float] = {}

    def __call__(self, request):
        version = self.run.control.version(request.version)
        _, tensors = read(str(self.run.run_dir / "weights"), version)
        norm = float(np.sqrt(sum(np.square(np.asarray(t, np.float64)).sum() for t in tensors.values())))
        healthy = self.norms.setdefault(0, norm)
        share = 0.9 if norm < 2 * healthy else 0.1
        tasks = 100 * request.num_tasks_per_level
        return EvaluationResult(
            request.evaluation_id, request.version, request.update, {1: tasks}, {1: round(share * tasks)}, share
        )


def config_of(tmp_path, server, **changes):
    config = small_config(tmp_path, server, num_updates=12)
    return dataclasses.replace(
        config,
        evaluation=EvaluationConfig(every_updates=3, num_tasks_per_level=1),
        orchestrator=dataclasses.replace(config.orchestrator, policy_interval_s=0.05, decisions_kept=5),
        **changes,
    )


def test_a_poisoned_update_falls_in_evaluation_is_rolled_back_and_the_run_reaches_its_goal(
    server, tmp_path, monkeypatch
):
    with ScriptedRun(config_of(tmp_path / "run", server), server) as run:
        run.evaluate = HeldOut(run)
        learner = run.make_learner()
        poison(learner, monkeypatch, at=7)
        run.drive(learner)
        report = run.audit()
        lines, versions = run.control.lines(), run.control.versions()
        results = run.control.evaluations()
        states = run.steering.states()["regression"]
        decisions = [logged.decision for logged in run.steering.decisions()]
        counts = run.ledger.counts()
    assert report.sound, report.problems
    assert (learner.update, learner.line) == (12, 1)
    fork = lines[1].fork_update
    assert lines[1].parent == 0
    assert fork in (3, 6), "the newest checkpoint that a passed evaluation vouches for, before the poison"
    # The new line is a new version, whose manifest names its parent, and the parent is healthy.
    first = min((v for v in versions.values() if v.line == 1), key=lambda v: v.number)
    described = describe(str(run.run_dir / "weights"), first.number)
    assert (described.parent, described.line, described.update) == (first.parent, 1, fork)
    assert versions[first.parent].line == 0
    assert versions[first.parent].update == fork
    # Named in the decision log, by the numbers.
    seen = [*(d["action"] for d in read_decisions(run.run_dir) if d["policy"] == "regression")]
    seen += [d.action for d in decisions if d.policy == "regression"]
    assert seen.count("suspect") == 1
    assert seen.count("rollback") == 1
    assert seen.index("suspect") < seen.index("rollback")
    # The end is as good as the best before.
    final = max(results, key=lambda r: (r.update, versions[r.version].line))
    assert final.success((1,)) == pytest.approx(0.9)
    assert states["good_update"] == 12
    # The abandoned line's work is quarantined, and every ticket has one outcome.
    undone = {
        row.group.ticket.ticket_id for p in (run.run_dir / "archive/undone").glob("*.avro") for row in read_groups(p)
    }
    trained = {
        row.group.ticket.ticket_id for p in (run.run_dir / "archive").glob("groups-*.avro") for row in read_groups(p)
    }
    assert not undone & trained
    assert len(trained) == counts["trained"] == 36
    assert counts["pending"] == 0
    assert counts["undone"] >= len(undone)


def test_a_checkpoint_stays_until_a_later_one_has_passed(server, tmp_path):
    with ScriptedRun(config_of(tmp_path / "run", server), server) as run:
        run.withhold_evaluations_after = 3
        learner = run.make_learner()
        run.drive(learner)
        kept = learner.checkpoints.steps()
    assert {3, 9, 12} <= set(kept), "3 is the last that passed"
    assert 0 not in kept


ROLLBACK_CRASHES = {
    "before_the_archive_is_cleared": (Ledger, "undo", False),
    "after_it": (Ledger, "undo", True),
    "after_they_went": ("checkpoints", "discard_newer", True),
    "after_it_is": ("control", "add_line", True),
}


@pytest.mark.parametrize("where", ROLLBACK_CRASHES)
def test_a_learner_killed_while_it_goes_back_ends_on_a_new_line_with_a_sound_ledger(
    where, server, tmp_path, monkeypatch
):
    place, name, after = ROLLBACK_CRASHES[where]
    with ScriptedRun(config_of(tmp_path / where, server), server) as run:
        run.evaluate = HeldOut(run)
        learner = run.make_learner()
        poison(learner, monkeypatch, at=7)
        target = getattr(learner, place) if isinstance(place, str) else place
        crash_once(target, name, monkeypatch, when=lambda *args: args[-1] != learner.staleness.lines[0], after=after)
        with pytest.raises(Crash):
            run.drive(learner)
        resumed = run.make_learner()
        run.drive(resumed)
        report = run.audit()
        versions = run.control.versions()
        results = run.control.evaluations()
    assert report.sound, report.problems
    assert resumed.update == 12
    assert resumed.line >= 1
    final = max(results, key=lambda r: (r.update, versions[r.version].line))
    assert final.success((1,)) == pytest.approx(0.9)
