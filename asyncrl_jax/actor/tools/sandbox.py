"""Runs Python that a model wrote, as a process that can't reach anything and can't take more than it is given.

                        bubblewrap                                          process (weaker, must be asked for)
    files               a read-only Python, /proc of its own, a tmpfs       those its user may read
    network             none                                                the host's
    processes it sees   its own                                             the host's
    parent's environment, open files                not there               not there
    CPU, address space, file size, open files       limited                 limited
    bytes of all files                              limited                 not limited
    number of processes                             limited                 limited, as root by a throwaway user
    wall-clock time, output                         limited by the parent   limited by the parent

A limit on processes does not bind root, so under root the code runs as a user id that nothing else uses. `probe` runs
hostile code once and refuses a sandbox that does not hold on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Literal

from asyncrl_jax.actor.subprocesses import reap

log = logging.getLogger(__name__)

ENTRY = Path(__file__).with_name("sandbox_entry.py")
STARTED = b"\x06"  # that it writes to standard output, before the code runs
FIRST_USER = 2_000_000_000  # far above any account; one sandbox at a time uses one of the following
NUM_USERS = 100_000
KILL_LIMIT_S = 5.0  # for the kernel to reap what was killed
REMOVE_LIMIT_S = 60.0  # for files: the code may have made very many
_SCRATCH_PREFIX = "asyncrl-sandbox-"

Kind = Literal["bubblewrap", "process"]
Ending = Literal["exited", "timeout", "output_limit"]


class SandboxUnavailable(RuntimeError):
    """This machine can't hold model-written code in the sandbox that was asked for; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one run may take."""

    wall_s: float = 5.0
    cpu_s: int = 5  # of each process
    memory_bytes: int = 512 * 2**20  # address space of each process
    processes: int = 8
    file_bytes: int = 16 * 2**20  # of one file
    disk_bytes: int = 64 * 2**20  # of all files together; of tmpfs, so it is memory
    open_files: int = 64
    output_bytes: int = 64 * 2**10  # of standard output and error together

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name}={getattr(self, field.name)}: a limit is more than 0")


@dataclasses.dataclass(frozen=True)
class Run:
    """What became of a piece of code."""

    stdout: str  # undecodable bytes are replaced
    stderr: str
    exit_code: int  # negative: killed by that signal
    ending: Ending  # who ended it; "exited" also when the kernel's limits did

    @property
    def succeeded(self) -> bool:
        return self.ending == "exited" and self.exit_code == 0


class Sandbox:
    """Runs pieces of code, in one event loop; each is a process tree of its own that is gone when `run` returns.

    Invariant: whatever the code does, and however `run` ends, its processes and files are gone afterwards.
    """

    def __init__(
        self, kind: Kind = "bubblewrap", limits: Limits | None = None, *, max_running: int | None = None
    ) -> None:
        """Args:
          kind: see the table of this module.
          limits: of every run; waiting for others does not count.
          max_running: pieces of code at one time; None for twice the number of cores.

        Raises:
          SandboxUnavailable: if bubblewrap is asked for and not installed.
        """
        self.kind = kind
        self.limits = limits or Limits()
        self._room = asyncio.Semaphore(max_running or 2 * (os.cpu_count() or 1))
        self._bwrap = shutil.which("bwrap") if kind == "bubblewrap" else None
        if kind == "bubblewrap" and self._bwrap is None:
            raise SandboxUnavailable(
                "bubblewrap (the program bwrap) is not installed: install the package bubblewrap, or accept the weaker "
                "sandbox, which shares the host's files and network, with --config.tools.sandbox=process"
            )
        # Random start: hosts on one machine should not meet in one user id, whose processes are counted together.
        start = random.SystemRandom().randrange(NUM_USERS)
        self._users = (FIRST_USER + (start + i) % NUM_USERS for i in itertools.count())

    async def run(self, code: str, stdin: str = "") -> Run:
        """Runs `code` with the interpreter of this process, standard library only.

        Raises:
          SandboxUnavailable: if the sandbox could not be made (not: if the code failed).
        """
        async with self._room:
            return await self._run(code, stdin)

    async def _run(self, code: str, stdin: str) -> Run:
        async with _scratch() as directory:
            (directory / "code.py").write_text(code, "utf-8", errors="replace")
            user = next(self._users) if os.geteuid() == 0 else -1
            if self.kind == "process":
                _hand_over(directory, user)
            process = await asyncio.create_subprocess_exec(
                *self._command(directory, user),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=directory,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                start_new_session=True,
            )
            try:
                outcome, started = await self._watch(process, stdin.encode("utf-8", errors="replace"))
            finally:
                await _end(process, user)
        if not started:  # told by what the code can't feign: it must not be able to pass for a broken sandbox
            why = outcome.stderr.strip()[-500:] or f"{outcome.ending}, exit code {outcome.exit_code}"
            raise SandboxUnavailable(f"the {self.kind} sandbox can't be made here: {why}")
        return outcome

    def _command(self, directory: Path, user: int) -> list[str]:
        limits = self.limits
        numbers = (user, limits.cpu_s, limits.memory_bytes, limits.processes, limits.file_bytes, limits.open_files)
        arguments = [str(number) for number in numbers]
        if self._bwrap is None:
            python = _python() if user < 0 else _python_for_everybody()
            return [python, "-I", "-S", str(ENTRY), *arguments]
        inside = ["/python" + _python().removeprefix(str(_prefix())), "-I", "-S", "/entry.py", *arguments]
        return [self._bwrap, *_walls(directory, limits.disk_bytes), "--", *inside]

    async def _watch(self, process: asyncio.subprocess.Process, stdin: bytes) -> tuple[Run, bool]:
        """What became of the code, and whether it was started at all."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        output = _Output(self.limits.output_bytes)
        ending: Ending = "exited"
        feeding = asyncio.create_task(_feed(process.stdin, stdin))
        try:
            async with asyncio.timeout(self.limits.wall_s):
                await asyncio.gather(output.read(process.stdout, "stdout"), output.read(process.stderr, "stderr"))
                await process.wait()
        except TimeoutError:
            ending = "timeout"
        except _OutputLimit:
            ending = "output_limit"
        finally:
            feeding.cancel()
        exit_code = process.returncode if process.returncode is not None else -signal.SIGKILL
        return Run(output.text("stdout"), output.text("stderr"), exit_code, ending), output.started


class _OutputLimit(Exception):
    """The code wrote more than it may."""


class _Output:
    """What the code wrote, up to a number of bytes over both streams."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes + len(STARTED)
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}

    @property
    def started(self) -> bool:
        """Whether the limits were set: the last that the entry does is to say so, before the code has a say."""
        return self._kept["stdout"].startswith(STARTED)

    async def read(self, stream: asyncio.StreamReader, name: str) -> None:
        while chunk := await stream.read(2**14):
            self._kept[name] += chunk[: self._left]
            self._left -= len(chunk)
            if self._left < 0:
                raise _OutputLimit

    def text(self, name: str) -> str:
        skipped = len(STARTED) if name == "stdout" and self.started else 0
        return self._kept[name][skipped:].decode("utf-8", errors="replace")


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # code need not read its input
        stream.write(data)
        await stream.drain()
        stream.close()


async def _end(process: asyncio.subprocess.Process, user: int) -> None:
    """Kills whatever is left. With bubblewrap, the end of its first process ends the whole namespace."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if user >= 0:
        _kill_all_of(user)
    async with asyncio.timeout(KILL_LIMIT_S):
        await reap(process)


def _kill_all_of(user: int) -> None:
    """Kills every process of a throwaway user, also those that left the process group."""
    for _ in range(20):  # a fork bomb may fork between listing and killing; its limit keeps the rounds few
        found = False
        for entry in os.scandir("/proc"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if entry.name.isdigit() and entry.stat().st_uid == user:
                    found = True
                    os.kill(int(entry.name), signal.SIGKILL)
        if not found:
            return


@contextlib.asynccontextmanager
async def _scratch() -> AsyncIterator[Path]:
    """A directory of one run."""
    directory = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX))
    try:
        yield directory
    finally:  # in a thread, and to its end: the actor's other work goes on meanwhile
        await asyncio.shield(asyncio.to_thread(_remove, directory))


def _remove(directory: Path) -> None:
    """Removes a tree that may be deeper than a path is long: every directory moves to the top to be emptied."""
    names, deadline = (f"{secrets.token_hex(8)}-{i}" for i in itertools.count()), time.monotonic() + REMOVE_LIMIT_S
    try:
        while inner := [entry.path for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]:
            for path in inner:
                os.chmod(path, 0o700)
                for entry in os.scandir(path):
                    if time.monotonic() > deadline:
                        raise OSError(f"more files than could be removed within {REMOVE_LIMIT_S:g} s")
                    if entry.is_dir(follow_symlinks=False):
                        os.chmod(entry.path, 0o700)  # or its owner could not move it
                        os.rename(entry.path, directory / next(names))
                    else:
                        os.unlink(entry.path)
                os.rmdir(path)
        for entry in os.scandir(directory):
            os.unlink(entry.path)
        directory.rmdir()
    except OSError as error:
        log.warning("files of a sandbox are left in %s: %s", directory, error)


def _hand_over(directory: Path, user: int) -> None:
    if user >= 0:
        os.chown(directory, user, user)


@functools.cache
def _prefix() -> Path:
    return Path(sys.base_prefix).resolve()


@functools.cache
def _python() -> str:
    """The interpreter without its virtual environment: tools get the standard library only."""
    return str(_prefix() / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


@functools.cache
def _python_for_everybody() -> str:
    """An interpreter that a throwaway user can start.

    Raises:
      SandboxUnavailable: if all are in directories closed to others, as the home of root is.
    """
    for candidate in (_python(), "/usr/bin/python3", "/usr/local/bin/python3"):
        path = Path(candidate)
        if path.exists() and all(part.stat().st_mode & 0o001 for part in (path, *path.resolve().parents)):
            return candidate
    raise SandboxUnavailable(
        f"the process sandbox runs code as a throwaway user, who can't reach {_python()}: install bubblewrap, install "
        "Python where all users can read it, or run actors as another user than root"
    )


def _walls(directory: Path, disk_bytes: int) -> Sequence[str]:
    """Arguments of bwrap: what the sandbox sees, which is all it can touch."""
    walls = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--setenv", "LANG", "C.UTF-8"]
    if os.geteuid() == 0:  # stays root for a moment, to become a throwaway user
        walls.remove("--unshare-all")
        walls += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        walls += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for library in ("/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        walls += ["--ro-bind-try", library, library]
    walls += ["--ro-bind", str(_prefix()), "/python", "--ro-bind", str(ENTRY), "/entry.py"]
    walls += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(disk_bytes), "--tmpfs", "/scratch"]
    # The root and /dev are of memory too, and belong to the code's user where that is not root: without a size.
    walls += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return [*walls, "--ro-bind", str(directory / "code.py"), "/scratch/code.py", "--chdir", "/scratch"]


_HOSTILE = """
import os, time
held = []
try:
    for _ in range({forks}):
        if os.fork() == 0:
            time.sleep(60)
except OSError:
    held.append("processes")
try:
    bytearray({size_bytes})
except MemoryError:
    held.append("memory")
print(" ".join(held))
"""


async def probe(sandbox: Sandbox) -> None:
    """Runs hostile code once.

    Raises:
      SandboxUnavailable: if a limit does not hold here.
    """
    code = _HOSTILE.format(forks=sandbox.limits.processes + 1, size_bytes=2 * sandbox.limits.memory_bytes)
    outcome = await sandbox.run(code)
    missing = {"processes", "memory"} - set(outcome.stdout.split())
    if missing:
        raise SandboxUnavailable(
            f"the {sandbox.kind} sandbox does not limit {' and '.join(sorted(missing))} here: run actors as another "
            f"user or on another kernel ({outcome.stderr.strip()[-200:]})"
        )
