"""The queries of docs/data.md, run as they stand there, on an archive that this package wrote."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from asyncrl_jax.transport.archive import ArchivedGroup, write_groups, write_ledger_events
from asyncrl_jax.transport.ledger import LedgerEvent
from asyncrl_jax.types import FinishReason, Group, Outcome, Task, Ticket, Trajectory

pytest.importorskip("polars")
pytest.importorskip("duckdb")

DOCUMENT = Path(__file__).parents[2] / "docs" / "data.md"


def member(version: int, success: bool) -> Trajectory:
    mask = np.array([0, 0, 1, 1, 1], np.uint8)
    return Trajectory(
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=-mask.astype(np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        reward=float(success),
        reward_parts=np.zeros(4, np.float32),
        success=success,
        finish_reason=FinishReason.ANSWERED,
        num_turns=1,
        sampling_started_at=1.0,
        sampling_ended_at=2.0,
    )


def row(count: int, level: int, version: int, updates: tuple[int, ...], successes: tuple[bool, bool]) -> ArchivedGroup:
    ticket = Ticket(f"1-{count}", Task("arithmetic", "train", level, count), 2, 0, 0, 4, 1.0, 0, 0.0)
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
