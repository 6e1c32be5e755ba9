"""Keeps the processes of a run alive: starts them, restarts what dies, stops all in order, and says which part failed.

    part ends                            then
    by SIGKILL or another crash          it is started again, after 0.5 s, 1 s, 2 s, …
    with a non-zero exit code            the same
    more than 5 times in 120 s           the run fails
    twice in a row within 20 s of start  the run fails: it would never come up (SIGKILL apart: it comes from outside)
    with exit code 2, a user's mistake   the run fails at once
    by SIGTERM, SIGINT or exit code 0    the run stops, unless it was at its end anyway
    after it was retired                 it is forgotten

Invariant: when `stop` returns, no process of the run is left.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from asyncrl_jax.exit_codes import USER_ERROR
from asyncrl_jax.local.tail import last_lines

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
RESTART_WINDOW_S = 120.0
FIRST_BACKOFF_S = 0.5
EARLY_S = 20.0
STOP_S = 6.0  # for roles to close after SIGTERM, before they are killed
FOUNDATION_STOP_S = 1.5  # for foundations, whose data is safe whenever they are killed
_KILL_WAIT_S = 5.0  # for the system to end a killed process
_POLL_S = 0.05


class PartFailed(RuntimeError):
    """A part can't be kept alive. The message names it and holds its last lines."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One process of a run.

    Args:
      name: as shown and as its log is named.
      start: starts it and returns the process; called again for every restart.
      log: file that holds what it prints.
      foundation: others need it to close cleanly (Redis), so it is stopped after them.
    """

    name: str
    start: Callable[[], subprocess.Popen[bytes]]
    log: Path
    foundation: bool = False


class Ending(enum.Enum):
    """What the end of a process means for the run."""

    RESTART = enum.auto()
    FAIL = enum.auto()
    CLOSED = enum.auto()


@dataclasses.dataclass
class _Running:
    part: Part
    process: subprocess.Popen[bytes]
    started_at: float
    restarted_at: collections.deque[float] = dataclasses.field(default_factory=collections.deque)
    early_crashes: int = 0
    due_at: float | None = None  # when it is started again
    retired_at: float | None = None  # since when it is expected to end


def spawn(
    command: Sequence[str], environment: Mapping[str, str], log_path: Path, cores: Collection[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a command whose output is appended to `log_path`.

    In a session of its own, so that Ctrl-C in the terminal reaches only the launcher, which then closes parts in order.

    Args:
      cores: the only ones that it may use; if empty, those of this process.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    if cores:
        with contextlib.suppress(ProcessLookupError):  # it has ended already, which is the supervisor's business
            os.sched_setaffinity(process.pid, cores)
    return process


class Supervisor:
    """Owns the processes. `poll` is to be called several times a second; `stop` must be called at the end."""

    def __init__(self, notify: Callable[[str], None] = log.warning, clock: Callable[[], float] = time.monotonic):
        self._notify = notify
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self.restarts: collections.Counter[str] = collections.Counter()

    def start(self, part: Part) -> None:
        """Starts a part and watches it from now on. One of its name that was retired and is still there ends first."""
        if part.name in self._running:
            _end([self._running[part.name]], STOP_S, self._notify)
        self._running[part.name] = _Running(part, part.start(), self._clock())

    def retire(self, name: str) -> None:
        """Closes a part that the run no longer needs, without waiting for it."""
        running = self._running[name]
        running.retired_at = self._clock()
        if running.process.poll() is None:
            running.process.terminate()

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """The newest process of a part."""
        return self._running[name].process

    def all_ended(self) -> bool:
        """Whether every part but the foundations has ended by itself with exit code 0."""
        return all(r.part.foundation or r.process.poll() == 0 for r in self._running.values())

    def poll(self, *, ending: bool) -> str | None:
        """Restarts what died and is due.

        Args:
          ending: the run has done its work, so parts are expected to close.

        Returns:
          Name of a part that was closed before the run's end; the caller then stops the run. None otherwise.

        Raises:
          PartFailed: if a part can't be kept alive.
        """
        for running in list(self._running.values()):
            if running.retired_at is not None:
                self._forget_if_ended(running, running.retired_at)
                continue
            if running.due_at is not None:
                self._restart_if_due(running)
                continue
            code = running.process.poll()
            if code is None or (code == 0 and ending):
                continue
            verdict = self._judge(running, code)
            if verdict is Ending.CLOSED:
                return running.part.name
            if verdict is Ending.FAIL:
                raise PartFailed(failure(running.part.name, running.part.log, code))
            self._notify(f"{running.part.name} ended by {describe(code)}; it is started again")
            self._schedule_restart(running)
        return None

    def stop_roles(self, timeout_s: float = STOP_S) -> None:
        """Closes all but the foundations: SIGTERM, then SIGKILL to those that are still there after `timeout_s`."""
        _end([r for r in self._running.values() if not r.part.foundation], timeout_s, self._notify)

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Closes all parts, the foundations last. May be called again."""
        self.stop_roles(timeout_s)
        _end([r for r in self._running.values() if r.part.foundation], FOUNDATION_STOP_S, self._notify)

    def _forget_if_ended(self, running: _Running, retired_at: float) -> None:
        if running.process.poll() is None and self._clock() - retired_at < STOP_S:
            return
        _end([running], 0.0, self._notify)
        del self._running[running.part.name]

    def _judge(self, running: _Running, code: int) -> Ending:
        if code in (0, -signal.SIGTERM, -signal.SIGINT):
            return Ending.CLOSED
        if code == USER_ERROR:
            return Ending.FAIL
        now = self._clock()
        early = now - running.started_at < EARLY_S and code != -signal.SIGKILL
        running.early_crashes = running.early_crashes + 1 if early else 0
        while running.restarted_at and now - running.restarted_at[0] > RESTART_WINDOW_S:
            running.restarted_at.popleft()
        if running.early_crashes >= 2 or len(running.restarted_at) >= MAX_RESTARTS:
            return Ending.FAIL
        return Ending.RESTART

    def _schedule_restart(self, running: _Running) -> None:
        running.due_at = self._clock() + FIRST_BACKOFF_S * 2 ** len(running.restarted_at)
        running.restarted_at.append(self._clock())
        self.restarts[running.part.name] += 1

    def _restart_if_due(self, running: _Running) -> None:
        if running.due_at is not None and self._clock() >= running.due_at:
            running.due_at = None
            running.process = running.part.start()
            running.started_at = self._clock()


def _end(running: Sequence[_Running], timeout_s: float, notify: Callable[[str], None]) -> None:
    processes = [(r.part.name, r.process) for r in running]
    for _, process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(process.poll() is None for _, process in processes):
        time.sleep(_POLL_S)
    for name, process in processes:
        if process.poll() is None:
            notify(f"{name} did not close within {timeout_s:g} s of SIGTERM and is killed")
            process.kill()
        process.wait(_KILL_WAIT_S)
        # The part leads a process group, which may have outlived it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def describe(code: int) -> str:
    """`exit code 3` or `signal SIGKILL`, from a return code of subprocess."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def failure(name: str, log_path: Path, code: int) -> str:
    """Says that a part ended and can't be kept running, with the last lines that it printed."""
    lines = last_lines(log_path) or ["(it printed nothing)"]
    body = "\n".join(f"  {line}" for line in lines)
    return f"{name} ended by {describe(code)} and can't be kept running. Its last lines, from {log_path}:\n{body}"
