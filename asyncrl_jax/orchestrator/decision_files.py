"""The decision log beyond what Redis keeps: JSON lines in `<run_dir>/decisions/`."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from asyncrl_jax.transport.steering import LoggedDecision, Steering

_PER_FILE = 1000
_SLACK = 200  # above what is kept, before a file is written


def archive_decisions(run_dir: Path, steering: Steering, keep: int) -> int:
    """Moves the oldest decisions from Redis to files, so that `keep` stay. Returns the number moved.

    A file is named by its first decision and written whole before its decisions are deleted, so a kill in between
    writes the same file again and loses nothing.
    """
    moved = 0
    while (excess := steering.num_decisions() - keep) > (_SLACK if keep else 0):
        entry_ids = steering.decision_ids(min(excess, _PER_FILE))
        if not entry_ids:
            return moved
        if logged := steering.decisions(count=len(entry_ids)):
            _write(run_dir, logged)
        moved += steering.discard_decisions(entry_ids)
    return moved


def _write(run_dir: Path, logged: list[LoggedDecision]) -> None:
    """A file of these decisions, whole or not at all."""
    directory = run_dir / "decisions"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{logged[0].entry_id}.jsonl"
    draft = path.with_suffix(".tmp")
    rows = [{"id": one.entry_id, "at": one.at, **dataclasses.asdict(one.decision)} for one in logged]
    draft.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(draft, path)


def read_decisions(run_dir: Path) -> list[dict[str, Any]]:
    """Decisions in the files, oldest first."""
    paths = sorted((run_dir / "decisions").glob("*.jsonl"), key=lambda p: tuple(int(n) for n in p.stem.split("-")))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]
