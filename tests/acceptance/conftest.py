"""Whole runs leave a row each in docs/acceptance.md, good or bad."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from .whole_run import WholeRun

TABLE = Path(__file__).parents[2] / "docs" / "acceptance.md"
_COLUMNS = (
    "run",
    "success, shown",
    "not shown",
    "updates",
    "versions",
    "wall s",
    "lag mean",
    "p95",
    "max",
    "over bound",
    "spanning versions",
    "busy",
    "issued = trained + others",
    "restarts",
    "verdict",
)
_HEAD = """# Acceptance runs

Made by `make accept` on {date}: {conditions}.

Success is sampled, on held-out tasks (400 of each level, before the first update and after the last). "Shown" are the
levels that demonstrations show, "not shown" the one that they never do. The ledger was recomputed from the archive and
the checkpoint, by unique ticket.

"""

_rows: list[str] = []


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[str, WholeRun], None]:
    """Adds a run to the table; the verdict is that of the test that asked."""
    runs = request.node.recorded = []

    def add(name: str, run: WholeRun) -> None:
        runs.append((name, run))

    return add


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        verdict = "held" if report.passed else "FAILED"
        _rows.extend(_row(*recorded, verdict=verdict) for recorded in getattr(item, "recorded", []))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _rows:
        return
    conditions = (
        f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}, "
        f"JAX {jax.__version__}, load average {os.getloadavg()[2]:.1f} over the last 15 minutes"
    )
    head = _HEAD.format(date=datetime.date.today().isoformat(), conditions=conditions)
    columns = f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}\n"
    TABLE.write_text(head + columns + "".join(_rows))


def _row(name: str, run: WholeRun, verdict: str) -> str:
    if not (run.directory / "summary.json").exists():
        return f"| {name} | exit code {run.code} |{' |' * (len(_COLUMNS) - 3)} {verdict} |\n"
    s = run.summary
    lag, ledger = s["lag"], run.audited.ledger
    others = sum(count for name, count in ledger.items() if name not in ("issued", "trained"))
    restarts = ", ".join(f"{part} {count}" for part, count in s["restarts"].items()) or "–"
    cells = [
        name,
        f"{s['success_before']:.3f} → {s['success_after']:.3f}",
        f"{s['success_undemonstrated_before']:.3f} → {s['success_undemonstrated_after']:.3f}",
        s["updates"],
        s["versions"],
        f"{run.wall_s:.0f}",
        f"{lag['mean']:.2f}",
        f"{lag['p95']:.0f}",
        f"{lag['max']:.0f} of {lag['bound']}",
        lag["over_bound_tokens"],
        s["mixed_version_trajectories"],
        f"{s['learner_busy']:.2f}",
        f"{ledger['issued']} = {ledger['trained']} + {others}",
        restarts,
        verdict,
    ]
    return "| " + " | ".join(map(str, cells)) + " |\n"
