"""Each test breaks one thing in a sound run and expects the audit to name it."""

import contextlib
import dataclasses
import json

import pytest

from asyncrl_jax.config import Config, override
from asyncrl_jax.config_file import write_config
from asyncrl_jax.observe.audit import Evidence, audit, collect, examine, main, read_checkpoint_meta
from asyncrl_jax.transport.archive import ArchivedGroup, write_groups, write_ledger_events
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger, LedgerEvent
from asyncrl_jax.transport.server import start_server
from asyncrl_jax.types import Group, Line, Outcome, WeightVersion
from tests.builders import make_ticket, make_trajectory

CONFIG = override(Config(), {"learner.groups_per_update": 2, "learner.group_size": 2})
NUM_UPDATES = 3


def group(name: str, versions: tuple[int, ...] = (0, 0, 0)) -> Group:
    trajectory = make_trajectory(range(len(versions) + 1), (-1, *versions), reward=1.0, success=True)
    return Group(make_ticket(name), (trajectory, trajectory), "actor-0", enqueued_at=2.0)


def archived(name: str, *updates: int, versions: tuple[int, ...] = (0, 0, 0)) -> ArchivedGroup:
    return ArchivedGroup(group(name, versions), dequeued_at=3.0, trained_at=4.0, line=0, updates=updates)


def issued(name: str) -> LedgerEvent:
    return LedgerEvent(f"{1000 + int(name.split('-')[1])}-0", "issued", name, make_ticket(name))


def ended(name: str, outcome: Outcome, number: int = 0) -> LedgerEvent:
    return LedgerEvent(f"{2000 + int(name.split('-')[1])}-{number}", "outcome", name, None, outcome, "", 3)


def sound() -> Evidence:
    """Six tickets trained by three updates of two groups, one expired, one still running."""
    trained = [f"1-{number}" for number in range(1, 7)]
    return Evidence(
        events=[
            *(issued(name) for name in (*trained, "1-7", "1-8")),
            *(ended(name, Outcome.TRAINED) for name in trained),
            ended("1-7", Outcome.EXPIRED),
        ],
        groups=[archived(name, index // 2) for index, name in enumerate(trained)],
        checkpoint={
            "line": 0,
            "update": NUM_UPDATES,
            "epoch": 1,
            "uses": {},
            "progress": {"lag_histogram": {"0": 12, "1": 12, "2": 12}},
        },
        live=frozenset({"1-8"}),
        seen=frozenset([*trained, "1-7", "1-8"]),
        versions={number: WeightVersion(number, None, 0, number, "") for number in range(NUM_UPDATES + 1)},
        lines={0: Line(0)},
    )


def test_a_sound_run_balances():
    report = examine(CONFIG, sound())
    assert report.sound, report.problems
    assert report.ledger == {
        "issued": 8,
        "trained": 6,
        "expired": 1,
        "filtered": 0,
        "quarantined": 0,
        "failed": 0,
        "undone": 0,
        "pending": 1,
    }
    assert report.lag_histogram == report.archived_lag_histogram == {0: 12, 1: 12, 2: 12}
    assert report.mixed_version_trajectories == 0


def break_by(**changes: object) -> Evidence:
    return dataclasses.replace(sound(), **changes)


BROKEN = {
    "issued, not ended and not live: 1 tickets, 1-8": break_by(live=frozenset()),
    "live but never issued: 1 tickets, 1-9": break_by(live=frozenset({"1-8", "1-9"})),
    "ended but never issued: 1 tickets, 1-9": break_by(events=[*sound().events, ended("1-9", Outcome.FAILED)]),
    "ended more than once: 1 tickets, 1-7": break_by(events=[*sound().events, ended("1-7", Outcome.FAILED, number=1)]),
    "trained but not archived: 1 tickets, 1-1": break_by(groups=sound().groups[1:]),
    "archived more than once: 1 tickets, 1-1": break_by(groups=[*sound().groups, sound().groups[0]]),
    "archived as trained but ended otherwise: 1 tickets, 1-7": break_by(groups=[*sound().groups, archived("1-7", 9)]),
    "ticket 1-6 was used by updates [2, 3], allowed 1": break_by(groups=[*sound().groups[:5], archived("1-6", 2, 3)]),
    "trained more than 1 times: 1 tickets, 1-6": break_by(checkpoint=sound().checkpoint | {"uses": {"1-6": [1]}}),
    "archived but never issued: 1 tickets, 1-6": break_by(
        events=[event for event in sound().events if event.ticket_id != "1-6"]
    ),
    "update 2 used 1": break_by(groups=sound().groups[:5]),
    "3 trained tokens were older than 4 updates, by the learner's count": break_by(
        checkpoint=sound().checkpoint | {"progress": {"lag_histogram": {"5": 3}}}
    ),
    "6 archived tokens were older than their tickets allow": break_by(groups=[*sound().groups, archived("1-9", 5)]),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_broken_run_is_named(problem):
    report = examine(CONFIG, BROKEN[problem])
    assert not report.sound
    assert any(found.startswith(problem) or problem in found for found in report.problems), report.problems


def test_a_ticket_used_by_two_updates_is_right_when_replay_allows_it():
    config = override(CONFIG, {"learner.replay_ratio": 2})
    groups = [archived("1-1", 0, 1), archived("1-2", 0, 1)]
    evidence = dataclasses.replace(
        sound(),
        events=[*map(issued, ("1-1", "1-2")), *(ended(name, Outcome.TRAINED) for name in ("1-1", "1-2"))],
        groups=groups,
        checkpoint=sound().checkpoint | {"update": 2},
        live=frozenset(),
        seen=frozenset({"1-1", "1-2"}),
    )
    assert examine(config, evidence).sound


def test_a_group_that_the_checkpoint_trained_and_that_is_not_archived_yet_counts_as_used():
    evidence = break_by(
        groups=sound().groups[:5],
        events=[event for event in sound().events if (event.ticket_id, event.outcome) != ("1-6", Outcome.TRAINED)],
        live=frozenset({"1-6", "1-8"}),
        checkpoint=sound().checkpoint | {"uses": {"1-6": [2]}},
    )
    report = examine(CONFIG, evidence)
    assert report.sound, report.problems
    assert report.ledger["pending"] == 2


def test_wgt_06_lag_is_that_of_each_token_and_mixed_trajectories_are_counted():
    evidence = break_by(groups=[*sound().groups[:4], archived("1-5", 2, versions=(0, 0, 2)), sound().groups[5]])
    report = examine(CONFIG, evidence)
    assert report.mixed_version_trajectories == 2
    assert report.archived_lag_histogram == {0: 14, 1: 12, 2: 10}


def test_events_lost_with_redis_are_restored_from_archived_groups():
    evidence = break_by(
        events=[event for event in sound().events if event.ticket_id != "1-6"],
        checkpoint=sound().checkpoint | {"epoch": 2},
    )
    report = examine(CONFIG, evidence)
    assert report.sound, report.problems
    assert report.ledger["issued"] == 8
    assert report.ledger["trained"] == 6


def test_a_ticket_issued_while_redis_is_read_is_no_contradiction():
    assert examine(CONFIG, break_by(events=[*sound().events, issued("1-9")])).sound


def test_without_redis_the_files_alone_are_judged():
    assert examine(CONFIG, break_by(live=None, versions={})).sound


@pytest.fixture
def run_dir(tmp_path):
    evidence = sound()
    write_config(tmp_path / "config.json", CONFIG)
    (tmp_path / "archive").mkdir()
    write_ledger_events(tmp_path / "archive" / "ledger-1.avro", evidence.events[:-1])
    write_groups(tmp_path / "archive" / "groups-000-00000003.avro", evidence.groups)
    for step in (2, 10):
        directory = tmp_path / "checkpoints" / f"{step:08d}"
        directory.mkdir(parents=True)
        meta = dict(evidence.checkpoint) | {"update": NUM_UPDATES if step == 10 else 0}
        (directory / "checkpoint.json").write_text(json.dumps({"meta": meta}))
    (tmp_path / "checkpoints" / "00000020").mkdir()  # not complete
    return tmp_path


def test_the_newest_complete_checkpoint_is_read(run_dir):
    assert read_checkpoint_meta(run_dir)["update"] == NUM_UPDATES
    assert read_checkpoint_meta(run_dir / "none") == {}


def test_a_run_directory_is_audited_from_the_command_line(run_dir, capsys):
    assert main([str(run_dir)]) == 0
    assert "trained 6" in capsys.readouterr().out
    (run_dir / "archive" / "groups-000-00000003.avro").unlink()
    assert main([str(run_dir)]) == 1
    assert "PROBLEM: trained but not archived" in capsys.readouterr().out


def test_what_redis_still_holds_completes_the_files(run_dir):
    server = start_server(run_dir / "redis", CONFIG.redis)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(server.stop)
        client = connect(override(CONFIG, {"redis.url": server.url}).redis, server.password)
        stack.callback(client.close)
        keys = Keys(CONFIG.redis.namespace)
        Control(client, keys).ensure_epoch(at_least=2)  # ids that no file has
        ledger = Ledger(client, keys)
        (name, other) = ledger.next_ticket_ids(2)
        ledger.issue([make_ticket(name), make_ticket(other)])
        ledger.settle(name, Outcome.FAILED)
        evidence = collect(run_dir, CONFIG, client)
        report = audit(run_dir, client)
    assert evidence.live == {other}
    assert {event.ticket_id for event in evidence.events} >= {name, other, "1-3"}
    assert (report.ledger["issued"], report.ledger["failed"], report.ledger["pending"]) == (10, 1, 3)
