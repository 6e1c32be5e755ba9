"""Control state: versions, leases, heartbeats, redo log, evaluations."""

from __future__ import annotations

import dataclasses
import time

import pytest

from asyncrl_jax.types import EvaluationRequest, EvaluationResult, LearnerState, Line, WeightVersion


def version(number: int, **changes) -> WeightVersion:
    parent = number - 1 if number else None
    return dataclasses.replace(WeightVersion(number, parent, 0, number, f"{number:032x}", 5.0), **changes)


def request(name: str, update: int = 0) -> EvaluationRequest:
    return EvaluationRequest(name, update, update, 10, 3)


def result(name: str, update: int = 0, **changes) -> EvaluationResult:
    return dataclasses.replace(
        EvaluationResult(name, update, update, {1: 10, 2: 10}, {1: 9, 2: 4}, 0.7, 9.0), **changes
    )


def test_the_epoch_is_made_once(run):
    assert run.control.epoch() == 1
    assert run.control.ensure_epoch(at_least=5) == (1, False)
    run.client.delete(run.keys.epoch)
    assert run.control.epoch() is None
    with pytest.raises(RuntimeError, match="ensure_epoch"):
        run.ledger.next_ticket_ids(1)
    assert run.control.ensure_epoch(at_least=4) == (4, True)


def test_phase_and_learner(run):
    assert run.control.phase() == "running"
    run.control.set_phase("finishing")
    assert run.control.phase() == "finishing"
    with pytest.raises(ValueError, match="paused"):
        run.control.set_phase("paused")
    assert run.control.learner() is None
    state = LearnerState(0, 3, 2, "training")
    run.control.set_learner(state)
    assert run.control.learner() == state


def test_the_latest_version_never_goes_backwards_unless_told_to(run):
    assert run.control.latest() is None
    assert run.control.announce(version(0))
    assert run.control.announce(version(9))
    assert run.control.announce(version(10))
    assert not run.control.announce(version(2))  # known, but nobody is sent back to it
    assert run.control.latest() == version(10)
    assert run.control.announce(version(9), backwards=True)
    assert run.control.latest() == version(9)
    assert list(run.control.versions()) == [0, 2, 9, 10]
    assert run.control.version(2) == version(2)
    assert run.control.version(3) is None


def test_a_version_number_never_repeats(run):
    run.control.announce(version(1))
    assert run.control.announce(version(1, announced_at=99.0))  # the same version again
    assert run.control.version(1).announced_at == 5.0
    for change in ({"manifest_digest": "other"}, {"line": 1}, {"update": 2}, {"parent": None}):
        with pytest.raises(RuntimeError, match="version 1"):
            run.control.announce(version(1, **change))
    run.control.announce(version(2, announced_at=0.0))
    assert abs(run.control.latest().announced_at - time.time()) < 60


def test_a_lease_runs_out_or_is_given_back_and_only_announced_versions_have_one(run):
    for number in range(5):
        run.control.announce(version(number))
    assert run.control.lease(1, "actor-0", 30)
    assert run.control.lease(2, "actor-0", 30)
    assert run.control.lease(3, "actor-0", 30)
    run.control.release(3, "actor-0")
    assert run.control.leased() == {1, 2}
    assert run.control.lease(2, "actor-0", 0.01)
    time.sleep(0.05)
    assert run.control.leased() == {1}
    assert not run.control.lease(7, "actor-1", 30)


def test_lines(run):
    assert run.control.lines() == {0: Line(0)}
    line = Line(1, parent=0, fork_update=7)
    run.control.add_line(line)
    run.control.add_line(line)
    assert run.control.lines() == {0: Line(0), 1: line}
    with pytest.raises(RuntimeError, match="line 1"):
        run.control.add_line(Line(1, parent=0, fork_update=8))


def test_heartbeats_run_out(run):
    run.control.beat("actor", "host-1", {"version": 3}, 30)
    run.control.beat("actor", "host-2", {"version": 2}, 0.05)
    run.control.beat("actor", "host-1", {"version": 4}, 30)
    assert run.control.heartbeats()["actor", "host-1"] == {"version": 4}
    time.sleep(0.1)
    assert list(run.control.heartbeats()) == [("actor", "host-1")]
    with pytest.raises(ValueError, match="a b"):
        run.control.beat("actor", "a b", {}, 1)


def test_redo_log_keeps_one_plan_for_each_update(run):
    for update in (9, 10, 11):
        run.control.append_redo(update, {"tickets": [f"1-{update}"]})
        run.control.append_redo(update, {"tickets": [f"1-{update}"]})  # a lost reply, retried
    assert run.control.redo(9) == [{"update": 10, "tickets": ["1-10"]}, {"update": 11, "tickets": ["1-11"]}]
    run.control.append_redo(10, {"tickets": ["1-99"]})  # another line: what was planned after it is void
    assert run.control.redo(0) == [{"update": 9, "tickets": ["1-9"]}, {"update": 10, "tickets": ["1-99"]}]
    run.control.trim_redo(9)
    assert [record["update"] for record in run.control.redo(0)] == [10]


def test_an_evaluation_has_one_holder_and_one_result(run):
    control = run.control
    assert control.request_evaluation(request("e2", 20))
    assert control.request_evaluation(request("e1", 10))
    assert not control.request_evaluation(request("e1", 10))
    assert control.pending_evaluations() == [request("e1", 10), request("e2", 20)]
    assert control.claim_evaluation("a", 30) == request("e1", 10)
    assert control.claim_evaluation("a", 30) == request("e1", 10)  # the reply was lost, or the holder restarted
    assert control.claim_evaluation("b", 30) == request("e2", 20)
    assert control.claim_evaluation("c", 30) is None
    assert control.renew_evaluation("e1", "a", 30)
    assert not control.renew_evaluation("e1", "b", 30)
    assert control.report_evaluation(result("e1", 10))
    assert not control.report_evaluation(result("e1", 10, mean_reward=0.1))
    assert not control.renew_evaluation("e1", "a", 30)
    assert control.evaluations() == [result("e1", 10)]
    assert control.pending_evaluations() == [request("e2", 20)]
    assert not control.request_evaluation(request("e1", 10))
    assert control.claim_evaluation("a", 30) is None


def test_an_evaluation_of_a_dead_holder_is_claimed_again(run):
    run.control.request_evaluation(request("e"))
    assert run.control.claim_evaluation("dead", 0.05) is not None
    time.sleep(0.1)
    assert run.control.claim_evaluation("alive", 30) == request("e")
    assert not run.control.renew_evaluation("e", "dead", 30)
    assert run.control.claim_evaluation("dead", 30) is None


def test_q_02_control_writes_survive_a_lost_reply(lossy):
    proxy, run = lossy
    control = run.control
    control.announce(version(0))
    control.lease(0, "a", 30)
    control.request_evaluation(request("e0"))
    control.claim_evaluation("a", 30)
    control.report_evaluation(result("e0"))
    control.append_redo(1, {"n": 1})
    calls = [
        lambda: control.announce(version(1)),
        lambda: control.request_evaluation(request("e1")) or True,
        lambda: control.claim_evaluation("a", 30),
        lambda: control.append_redo(2, {"n": 2}) or True,
        lambda: control.report_evaluation(result("e1")),
    ]
    for number, call in enumerate(calls):
        proxy.lose_next_reply()
        assert call(), number
        assert proxy.lost == number + 1
    assert control.latest() == version(1)
    assert [record["n"] for record in control.redo(0)] == [1, 2]
    assert [found.evaluation_id for found in control.evaluations()] == ["e0", "e1"]
