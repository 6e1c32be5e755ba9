"""The queries of docs/data.md, run as they stand there, on an archive that this package wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl_jax.transport.archive import ArchivedGroup, write_groups, write_ledger_events
from asyncrl_jax.transport.ledger import LedgerEvent
from asyncrl_jax.types import Group, Outcome, Trajectory
from tests.builders import make_ticket, make_trajectory

pytest.importorskip("polars")
pytest.importorskip("duckdb")

DOCUMENT = Path(__file__).parents[2] / "docs" / "data.md"


def member(version: int, success: bool) -> Trajectory:
    versions = [-1, -1, version, version, version]
    return make_trajectory(range(5), versions, reward=float(success), success=success)


def row(count: int, level: int, version: int, updates: tuple[int, ...], successes: tuple[bool, bool]) -> ArchivedGroup:
    ticket = make_ticket(f"1-{count}", level=level, index=count)
    group = Group(ticket, tuple(member(version, s) for s in successes), "actor-0", enqueued_at=3.0)
    return ArchivedGroup(group, dequeued_at=10.0, trained_at=12.0, line=0, updates=updates)


@pytest.fixture
def archive(tmp_path) -> Path:
    write_groups(
        tmp_path / "groups-000-00000002.avro",
        [row(1, 1, 0, (0, 1), (True, False)), row(2, 2, 0, (1,), (False, False))],
    )
    write_groups(tmp_path / "groups-000-00000004.avro", [row(3, 1, 1, (3,), (True, True))])
    events = [LedgerEvent(f"{n}-0", "issued", f"1-{n}") for n in range(1, 5)]
    events += [LedgerEvent(f"{n}-1", "outcome", f"1-{n}", outcome=Outcome.TRAINED, update=2) for n in range(1, 4)]
    events += [LedgerEvent("9-1", "outcome", "1-4", outcome=Outcome.EXPIRED, reason="lag_bound", update=4)]
    write_ledger_events(tmp_path / "ledger-1-0.avro", events)
    return tmp_path


def test_the_documented_queries_run_and_are_right(archive):
    code = "\n".join(re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
    namespace = {"archive": archive}
    exec(code, namespace)
    assert namespace["by_level"].rows() == [(1, 2, 0.75, 1.0), (2, 1, 0.0, 1.0)]
    assert namespace["outcomes"].rows() == [
        ("issued", "", 4),
        ("trained", "", 3),
        ("expired", "lag_bound", 1),
    ]
    assert namespace["updates"].rows() == [(0, 1, 6, 2.0), (1, 2, 12, 2.0), (3, 1, 6, 2.0)]
