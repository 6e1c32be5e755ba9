"""A run in motion: what is acknowledged when, what is waited for, and what becomes of work that cannot be used."""

from __future__ import annotations

import re
import threading
import time

import pytest

from asyncrl_jax.config import LagConfig
from asyncrl_jax.learner import loop, settlement
from asyncrl_jax.learner.intake import Intake
from asyncrl_jax.learner.loop import expire
from asyncrl_jax.learner.resume import start_or_resume
from asyncrl_jax.transport.archive import read_ledger_events
from asyncrl_jax.types import Outcome

from .run_fixture import Crash, ScriptedRun, crash_once, replaced, small_config, trained_tasks

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("compile_once")]


def wait_for(condition, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def states(run) -> list[str]:
    return sorted(live.state for live in run.ledger.live().values())


def outcomes(run) -> dict[str, int]:
    return {name: count for name, count in run.ledger.counts().items() if count}


def events_of(run):
    archived = [event for path in (run.run_dir / "archive").glob("ledger-*") for event in read_ledger_events(path)]
    return archived + run.ledger.events()


def before_reading(learner, update: int, do) -> None:
    """Calls `do` once, when the learner looks for groups of the update after `update`."""
    real, armed = learner.intake.pool_new, [True]

    def pool_new(block_ms):
        if armed[0] and learner.update == update:
            armed[0] = False
            do()
        real(block_ms)

    learner.intake.pool_new = pool_new


def test_ckpt_07_nothing_is_acknowledged_before_a_durable_checkpoint_and_the_archive_hold_it(
    server, tmp_path, monkeypatch
):
    """The checkpoint of update 3 is slow: training goes on, and up to its end everything can be had again."""
    config = small_config(tmp_path / "slow", server, num_updates=6)
    events, seen = [], {}
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        released, write, publish_if_due = threading.Event(), learner.checkpoints._write, learner.publish_if_due

        def slow(step, *args):
            assert step != 3 or released.wait(60)
            write(step, *args)

        def look():
            if learner.update == 5:
                seen["archived"] = list((run.run_dir / "archive").glob("groups-*"))
                seen["outcomes"] = outcomes(run)
                state = run.control.learner()
                seen["unsettled"] = (state.update, state.unsettled_tickets, state.unsettled_uses)
                released.set()
                learner.checkpoints.wait()
            publish_if_due()

        def record(target, name, what):
            real = getattr(target, name)

            def recorded(*args, **kwargs):
                answer = real(*args, **kwargs)
                events.append((what, [entry["update"] for entry in run.control.redo(0)]))
                return answer

            monkeypatch.setattr(target, name, recorded)

        monkeypatch.setattr(learner.checkpoints, "_write", slow)
        learner.publish_if_due = look
        record(learner.control, "append_redo", "logged")
        record(learner.trainer, "update", "updated")
        record(learner.publisher, "start", "published")
        record(learner, "announce_state", "announced")
        record(settlement, "write_groups", "archived")
        record(learner.reader, "complete", "acknowledged")
        record(learner.control, "trim_redo", "trimmed")
        run.drive(learner)
        streams = [run.keys.groups(partition) for partition in range(config.redis.partitions)]
        left = [run.redis.xlen(stream) for stream in (*streams, run.keys.tasks, run.keys.ledger)]
        assert run.control.redo(0) == []
        assert run.audit().sound
    assert seen == {"archived": [], "outcomes": {"issued": 15, "pending": 15}, "unsettled": (4, 12, 12)}
    order = [what for what, _ in events]
    assert [what for what in order if what in ("logged", "updated", "published")] == [
        "published",
        *["logged", "updated", "published"] * 6,
    ]
    first = order.index("archived")
    assert order[first - 1 : first + 3] == ["announced", "archived", "acknowledged", "trimmed"]
    assert events[first + 2][1] == [4, 5]  # what the checkpoint does not hold can still be replayed
    assert left == [0, 0, 0, 0]  # of what is settled and archived, Redis keeps nothing


def test_the_checkpoint_of_v0_is_settled_like_any_other(server, tmp_path):
    with ScriptedRun(small_config(tmp_path / "first", server), server) as run:
        learner = run.make_learner()
        start_or_resume(learner)
        assert learner.saving == (0, [])
        learner.wait_durable()
        assert learner.saving is None
        learner.close()


def test_ckpt_01_prompts_in_flight_and_queued_at_a_kill_are_trained_once_each(server, tmp_path):
    """12 prompts; killed after update 2 with 3 of them in flight and 3 queued, and the newest checkpoint at 0."""
    config = small_config(tmp_path / "in_flight", server, mode="async", num_updates=4)
    with ScriptedRun(config, server) as run:
        run.withheld = {7, 9, 12}
        learner = run.make_learner()

        def die():
            wait_for(lambda: states(run) == ["issued"] * 3 + ["queued"] * 9)
            raise Crash

        before_reading(learner, 2, die)
        with pytest.raises(Crash):
            run.drive(learner)
        run.withheld = set()
        resumed = run.make_learner()
        run.drive(resumed)
        report = run.audit()
        assert outcomes(run) == {"issued": 12, "trained": 12}
    assert report.sound, report.problems
    assert sorted(trained_tasks(run.run_dir)) == list(range(1, 13))
    assert report.line == 0
    assert resumed.progress.over_bound_tokens == 0


def test_a_running_ticket_is_waited_for_until_its_deadline_has_passed(server, tmp_path):
    """The last update that may train on it waits for it; the one after would find it too old."""
    config = small_config(tmp_path / "straggler", server, mode="async", num_updates=7)
    with ScriptedRun(config, server) as run:
        run.withheld = {2}
        learner = run.make_learner()
        before_reading(learner, 4, lambda: threading.Timer(0.5, run.withheld.clear).start())
        run.drive(learner)
        assert outcomes(run) == {"issued": 21, "trained": 21}
        assert run.audit().sound
    assert trained_tasks(run.run_dir)[2] == (4,)  # min_update 0 and N = 4


def test_a_due_group_that_arrives_between_the_look_and_the_draw_is_drawn(server, tmp_path):
    """No actor has its ticket any more, and the pool does not hold it yet."""
    config = small_config(tmp_path / "arriving", server, mode="async", num_updates=7)
    with ScriptedRun(config, server) as run:
        run.withheld = {2}
        learner = run.make_learner()
        look = learner.intake.pool_new

        def pool_new(block_ms):
            look(block_ms)
            if run.withheld and learner.update == 4 and len(learner.pool) >= 3:
                run.withheld.clear()
                wait_for(lambda: run.ledger.live()["1-2"].state == "queued")

        learner.intake.pool_new = pool_new
        run.drive(learner)
        assert run.audit().sound
    assert trained_tasks(run.run_dir)[2] == (4,)


@pytest.mark.parametrize(("lead", "wait_s", "cut_at"), [(0, 0.1, 4), (1, 1000.0, 3)])
def test_late_members_are_given_up_when_the_wait_is_over_or_that_many_updates_ahead(
    server, tmp_path, monkeypatch, lead, wait_s, cut_at
):
    """Deadline 4. The wait ahead of it is endless where the cut comes before: then nothing may be left to wait for."""
    config = small_config(tmp_path / "cut", server, mode="async", num_updates=7)
    lag = LagConfig(straggler_policy="partial", straggler_wait_s=wait_s, straggler_lead_updates=lead)
    cuts = []
    with ScriptedRun(replaced(config, lag=lag), server) as run:
        run.withheld = {2}
        learner = run.make_learner()
        tell = learner.steering.cut

        def cut(ticket_ids):
            cuts.append((learner.update, set(ticket_ids)))
            tell(ticket_ids)
            run.withheld.discard(2)  # the actor sends what is there

        monkeypatch.setattr(learner.steering, "cut", cut)
        run.drive(learner)
        assert [update for update, tickets in cuts if "1-2" in tickets] == [cut_at]
        assert run.steering.cut_among(["1-2"]) == ["1-2"]
        assert outcomes(run) == {"issued": 21, "trained": 21}
        assert run.audit().sound


def test_obs_07_a_long_wait_says_what_it_waits_for_and_since_when(server, tmp_path, monkeypatch):
    """What is missing, and which ticket an actor holds; the actor answers only once that was said."""
    monkeypatch.setattr(loop, "NAMED_WAIT_S", 0.1)
    config = small_config(tmp_path / "named", server, num_updates=2)
    said = []
    with ScriptedRun(config, server) as run:
        run.withheld = {5}

        def warn(message, *values):
            said.append(message % values)
            if "'1-5'" in said[-1]:
                run.withheld.clear()

        monkeypatch.setattr(loop.log, "warning", warn)
        learner = run.make_learner()
        run.drive(learner)
        assert run.audit().sound
    expected = r"update 1 waits for \d more groups; tickets with actors: \[.*'1-5'.*\]; since \d+ s"
    assert any(re.fullmatch(expected, text) for text in said), said
    assert learner.update == 2


def test_ckpt_08_a_ticket_that_never_ends_expires_and_a_resume_does_not_draw_it_again(server, tmp_path, monkeypatch):
    config = small_config(tmp_path / "wedge", server, mode="async", num_updates=8)
    config = replaced(config, lag=LagConfig(straggler_wait_s=0.2))
    with ScriptedRun(config, server) as run:
        run.withheld = {2}
        learner = run.make_learner()
        crash_once(learner.control, "append_redo", monkeypatch, when=lambda update, _: update == 5)
        with pytest.raises(Crash):
            run.drive(learner)
        assert outcomes(run).get("expired", 0) == 0
        run.drive(run.make_learner())
        report = run.audit()
        assert outcomes(run) == {"issued": 25, "trained": 24, "expired": 1}
        (expired,) = [event for event in events_of(run) if event.outcome is Outcome.EXPIRED]
    assert report.sound, report.problems
    assert (expired.ticket_id, expired.reason, expired.update) == ("1-2", "sampled_too_late", 5)
    assert sorted(trained_tasks(run.run_dir)) == [1, *range(3, 26)]


def test_q_04_groups_that_someone_trims_are_counted_as_lost_and_replaced(server, tmp_path, monkeypatch):
    """Trimmed: 3 groups that nobody had read, and 6 that the learner has trained on; only the 3 are a loss."""
    monkeypatch.setattr(loop, "NAMED_WAIT_S", 0.2)
    config = small_config(tmp_path / "trimmed", server, num_updates=4)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()

        def trim():
            wait_for(lambda: states(run) == ["queued"] * 9)
            for partition in range(config.redis.partitions):
                run.redis.xtrim(run.keys.groups(partition), maxlen=0, approximate=False)

        before_reading(learner, 2, trim)
        run.drive(learner)
        assert outcomes(run) == {"issued": 15, "trained": 12, "failed": 3}
        assert {event.reason for event in events_of(run) if event.outcome is Outcome.FAILED} == {"entry_lost"}
        assert run.audit().sound


@pytest.mark.parametrize("kill", ["before_the_checkpoint", "after_it", "before_the_archive"])
def test_uses_are_counted_across_a_kill(server, tmp_path, monkeypatch, kill):
    """replay_ratio 2: every update trains 3 groups, no group more than twice, whatever the checkpoint held."""
    config = small_config(tmp_path / kill, server, mode="async", num_updates=7, replay_ratio=2)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        if kill == "before_the_archive":
            crash_once(learner.settlement, "settle", monkeypatch, when=lambda *, groups, **_: groups)
        else:
            at = {"before_the_checkpoint": 3, "after_it": 6}[kill]
            crash_once(learner.control, "append_redo", monkeypatch, when=lambda update, _: update == at)
        with pytest.raises(Crash):
            run.drive(learner)
        resumed = run.make_learner()
        run.drive(resumed)
        report = run.audit()
        state = run.control.learner()
        pending = run.ledger.live().keys()
    assert report.sound, report.problems
    uses = [update for updates in trained_tasks(run.run_dir).values() for update in updates]
    uses += [update for updates in resumed.uses.values() for update in updates]
    assert sorted(uses) == sorted([*range(7)] * 3)
    assert max(len(updates) for updates in trained_tasks(run.run_dir).values()) == 2
    assert resumed.uses.keys() <= pending
    assert state.unsettled_uses == sum(map(len, resumed.uses.values()))


def test_a_group_too_old_for_its_next_use_is_trained_and_one_never_used_is_expired(server, tmp_path):
    config = small_config(tmp_path / "grown_old", server, mode="async", num_updates=3, replay_ratio=2)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        uses = {}

        def arrived():
            Intake.pool_new(learner.intake, 20)
            return {pooled.uses for pooled in learner.pool.all()} == {0, 1}

        def grow_old():
            wait_for(arrived)
            uses.update({pooled.ticket_id: pooled.uses for pooled in learner.pool.all()})
            most, learner.staleness._most = learner.staleness._most, -1
            expire(learner)
            learner.staleness._most = most
            state = run.control.learner()
            assert (state.unsettled_tickets, state.unsettled_uses) == (3, 6)  # one use made and one forfeited by each

        before_reading(learner, 1, grow_old)
        run.drive(learner)
        ends = {event.ticket_id: event.outcome for event in events_of(run) if event.outcome}
        report = run.audit()
    assert report.sound, report.problems
    for ticket_id, count in uses.items():
        assert ends[ticket_id] is (Outcome.TRAINED if count else Outcome.EXPIRED)


def test_a_group_sampled_with_weights_beyond_the_bound_is_expired_not_trained(server, tmp_path):
    """The learner's own check: an actor that broke the bound is not believed."""
    config = small_config(tmp_path / "stale", server, mode="async", num_updates=8)
    with ScriptedRun(config, server) as run:
        run.stale = {22}  # answered for one of the last updates, at 5 or later, where v0 is beyond N = 4
        learner = run.make_learner()
        run.drive(learner)
        ends = {event.ticket_id: event.outcome for event in events_of(run) if event.outcome}
        report = run.audit()
    assert report.sound, report.problems
    assert [outcome for ticket_id, outcome in ends.items() if ticket_id == "1-22"] == [Outcome.EXPIRED]
    assert 22 not in trained_tasks(run.run_dir)
    assert learner.progress.over_bound_tokens == 0
    assert max(report.archived_lag_histogram) <= 4
