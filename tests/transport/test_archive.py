"""Files of groups and of ledger events: plain Avro, complete or absent."""

import os
import signal
import subprocess
import sys

import fastavro
import pytest

from asyncrl_jax.transport.archive import (
    ArchivedGroup,
    read_groups,
    read_ledger_events,
    write_groups,
    write_ledger_events,
)
from asyncrl_jax.transport.codec import InvalidGroup
from asyncrl_jax.transport.ledger import LedgerEvent
from asyncrl_jax.types import Outcome


def archived(group, updates=(4, 6)) -> ArchivedGroup:
    return ArchivedGroup(group, dequeued_at=1.0, trained_at=2.0, line=1, updates=updates)


def test_an_archive_is_a_plain_avro_file(make_ticket, make_group, tmp_path):
    rows = [archived(make_group(make_ticket(f"1-{n}")), updates=(n, n + 1)) for n in range(3)]
    path = tmp_path / "groups.avro"
    write_groups(path, rows)
    for row, again in zip(rows, read_groups(path), strict=True):
        assert again.group.ticket == row.group.ticket
        for before, after in zip(row.group.trajectories, again.group.trajectories, strict=True):
            assert before.tokens.tolist() == after.tokens.tolist()
            assert before.behaviour_logprobs.tolist() == after.behaviour_logprobs.tolist()
        assert (again.dequeued_at, again.trained_at, again.line, again.updates) == (1.0, 2.0, 1, row.updates)
    with open(path, "rb") as file:
        records = list(fastavro.reader(file))  # by the schema in the file alone
    assert [record["group"]["ticket"]["ticket_id"] for record in records] == ["1-0", "1-1", "1-2"]
    assert os.listdir(tmp_path) == ["groups.avro"]


def test_ledger_events_come_back_as_they_were(make_ticket, tmp_path):
    events = [
        LedgerEvent("10-0", "issued", "1-1", ticket=make_ticket("1-1")),
        LedgerEvent("11-0", "outcome", "1-1", outcome=Outcome.EXPIRED, reason="lag_bound", update=7),
    ]
    path = tmp_path / "ledger.avro"
    write_ledger_events(path, events)
    assert read_ledger_events(path) == events


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    path = tmp_path / "groups.avro"
    path.write_bytes(b"not avro")
    with pytest.raises(ValueError, match="avro"):
        read_groups(path)


@pytest.mark.parametrize("position", range(0, 1200, 40))
def test_a_damaged_archive_is_named_or_read(position, make_ticket, make_group, tmp_path):
    """A flipped byte is found by the container, or hits what it does not check; it is never another error."""
    path = tmp_path / "groups.avro"
    write_groups(path, [archived(make_group(make_ticket()))])
    data = bytearray(path.read_bytes())
    data[-(position + 1) % len(data)] ^= 0x55
    path.write_bytes(data)
    problem = f"{path} was read"
    try:
        read_groups(path)
    except InvalidGroup:
        pass
    except ValueError as error:
        problem = str(error)
    assert str(path) in problem


def test_a_killed_archive_writer_leaves_the_old_file_whole(make_ticket, make_group, tmp_path):
    path = tmp_path / "groups.avro"
    write_groups(path, [archived(make_group(make_ticket()))])
    killed_at_rename = (
        "import os, signal, sys\n"
        "from asyncrl_jax.transport import archive\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "archive.write_groups(sys.argv[1], [])\n"
    )
    process = subprocess.run([sys.executable, "-c", killed_at_rename, str(path)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert len(read_groups(path)) == 1
