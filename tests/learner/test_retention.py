"""The archive's bound: the oldest groups go, never one that a checkpoint may need, and the ledger stays whole."""

from __future__ import annotations

import pytest

from asyncrl_jax.config_data import ArchiveConfig
from asyncrl_jax.transport.archive import read_retired

from .run_fixture import ScriptedRun, replaced, small_config

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("compile_once")]


@pytest.mark.parametrize("bound", [ArchiveConfig(keep_updates=4), ArchiveConfig(keep_bytes=1)], ids=["age", "size"])
def test_the_archive_drops_what_no_checkpoint_needs_and_the_audit_is_still_sound(bound, server, tmp_path):
    """Of 9 updates with checkpoints 0, 6 and 9 nothing goes; once 6 is the oldest, what was trained after it stays."""
    config = replaced(small_config(tmp_path / "run", server, num_updates=9), archive=bound)
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        run.drive(learner)
        archive = run.run_dir / "archive"
        assert learner.checkpoints.steps() == [0, 6, 9]  # 0 is kept to roll back to: no evaluation has passed since
        assert list(archive.glob("retired-*")) == []
        learner.settlement.retain(update=9, oldest_checkpoint=6)
        report = run.audit()
    kept = sorted(path.name for path in archive.glob("groups-*"))
    assert kept[-1] == "groups-000-00000009.avro"
    dropped = [row for path in sorted(archive.glob("retired-*")) for row in read_retired(path)]
    assert {update for row in dropped for update in row.updates} == set(range({4: 3, 0: 6}[bound.keep_updates]))
    assert len(kept) + len(list(archive.glob("retired-*"))) == 3
    assert report.sound, report.problems
    assert report.ledger["trained"] == 27
