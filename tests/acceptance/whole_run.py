"""One whole local run: real processes, real Redis, real weights; killed where the test says."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from asyncrl_jax.observe.audit import AuditReport, audit
from asyncrl_jax.observe.metrics import read_rows

TIME_LIMIT_S = 900.0


@dataclasses.dataclass
class WholeRun:
    """What is left of a run that has ended."""

    directory: Path
    code: int
    output: str
    wall_s: float
    left_running: list[str]  # command lines of processes that outlived the launcher
    audited: AuditReport | None  # None when the run never had a config

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    def log(self, part: str) -> str:
        return (self.directory / "logs" / f"{part}.log").read_text()


def run_local(directory: Path, flags: Sequence[str], kills: Sequence[tuple[int, str]] = ()) -> WholeRun:
    """Runs `asyncrl-local` to its end.

    Args:
      directory: of the run.
      flags: besides the directory.
      kills: (updates done, part) in rising order; the part gets SIGKILL then.
    """
    command = [sys.executable, "-m", "asyncrl_jax.launchers.local", f"--config.run_dir={directory}", *flags]
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    seen: dict[int, psutil.Process] = {}
    try:
        for updates, part in kills:
            _wait_for_updates(process, directory, updates, started)
            os.kill(_find(process.pid, part, seen), signal.SIGKILL)
        output, _ = process.communicate(timeout=TIME_LIMIT_S)
    finally:
        seen |= {child.pid: child for child in _children(process.pid)}
        if process.poll() is None:
            process.kill()
            process.communicate()
    wall_s = time.monotonic() - started
    left = [" ".join(child.cmdline()) for child in seen.values() if child.is_running()]
    audited = audit(directory) if (directory / "config.json").exists() else None
    return WholeRun(directory, process.returncode, output, wall_s, left, audited)


def _wait_for_updates(process: subprocess.Popen[str], directory: Path, updates: int, started: float) -> None:
    rows_file = directory / "metrics" / "learner.jsonl"
    while not rows_file.exists() or max((row["step"] for row in read_rows(rows_file)), default=0) < updates:
        assert process.poll() is None, f"the run ended before update {updates}"
        assert time.monotonic() - started < TIME_LIMIT_S, f"no update {updates} in time"
        time.sleep(0.1)


def _children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True) if psutil.pid_exists(pid) else []


def _find(launcher: int, part: str, seen: dict[int, psutil.Process]) -> int:
    """The pid of a part among the launcher's own children; waits while it is being started again."""
    sign = {"redis": "redis-server", "actor-0": "actor_id=actor-0"}.get(part, f"launchers.{part}")
    for _ in range(300):
        for child in _children(launcher):
            seen[child.pid] = child
            if any(sign in word for word in child.cmdline()):
                return child.pid
        time.sleep(0.1)
    raise AssertionError(f"{part} is not running")
