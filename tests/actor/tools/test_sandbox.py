"""Hostile code in real sandboxes of both kinds."""

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl_jax.actor.tools import sandbox as sandbox_module
from asyncrl_jax.actor.tools.sandbox import FIRST_USER, Limits, Sandbox, SandboxUnavailable, probe

SMALL = Limits(wall_s=1.0, cpu_s=2, memory_bytes=256 * 2**20, processes=6, disk_bytes=2**22, file_bytes=2**21)
FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
DEEP = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')"
LEAVE = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(60)\nprint('left')"


def _make(kind: str, limits: Limits = SMALL) -> Sandbox:
    try:
        box = Sandbox(kind, limits)
        asyncio.run(box.run(""))
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    return box


@pytest.fixture(params=["bubblewrap", "process"])
def box(request: pytest.FixtureRequest) -> Sandbox:
    return _make(request.param)


@pytest.fixture
def walled() -> Sandbox:
    return _make("bubblewrap")


def _present() -> set[str]:
    scratch = [path.name for path in Path(tempfile.gettempdir()).glob("asyncrl-sandbox-*")]
    mine = [child for child in psutil.Process().children(recursive=True) if "sandbox" in " ".join(child.cmdline())]
    throwaway = [
        process
        for process in psutil.process_iter(["uids", "status"])
        if process.info["uids"]
        and process.info["uids"].real >= FIRST_USER
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]
    return {*scratch, *(f"process {process.pid}" for process in mine + throwaway)}


@pytest.fixture
def leftovers() -> Callable[[], set[str]]:
    before = _present()

    def left() -> set[str]:
        deadline = time.monotonic() + 2.0  # what was killed may take a moment to be gone
        while (found := _present() - before) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    return left


def test_code_reads_its_input_and_its_output_and_exit_code_come_back(box: Sandbox) -> None:
    run = asyncio.run(box.run("import sys; print(int(input()) + 1); sys.stderr.write('e'); sys.exit(3)", "41\n"))
    assert (run.stdout, run.stderr, run.exit_code, run.ending) == ("42\n", "e", 3, "exited")
    assert not run.succeeded
    assert asyncio.run(box.run("print('ünï')")).stdout == "ünï\n"


@pytest.mark.parametrize(
    ("code", "endings", "in_stderr"),
    [
        ("while True: pass", {"timeout"}, ""),
        (FORK_BOMB, {"timeout"}, ""),
        ("bytearray(100 * 2**30)", {"exited"}, "MemoryError"),
        ("while True: print('x' * 10**5)", {"output_limit"}, ""),
        ("import time; print('early', flush=True); time.sleep(60)", {"timeout"}, ""),
        ("f = open('a', 'wb')\nwhile True: f.write(b'x' * 10**6)", {"exited"}, "OSError"),
        ("import ctypes; ctypes.string_at(0)", {"exited"}, ""),
        ("import os; os.kill(os.getpid(), 9)", {"exited"}, ""),
        (LEAVE, {"exited", "timeout"}, ""),
        (DEEP, {"exited"}, ""),
        ("import os; os.mkdir('a'); os.mkdir('a/b'); os.symlink('/', 'a/l'); os.chmod('a', 0)", {"exited"}, ""),
    ],
    ids=["loop", "fork_bomb", "memory", "output", "sleep", "file", "segfault", "suicide", "leave", "deep", "closed"],
)
def test_hostile_code_ends_and_leaves_nothing_behind(
    box: Sandbox, leftovers: Callable[[], set[str]], code: str, endings: set[str], in_stderr: str
) -> None:
    run = asyncio.run(box.run(code))
    assert run.ending in endings
    assert in_stderr in run.stderr
    harmless = code == LEAVE or "mkdir" in code
    assert run.succeeded == (harmless and run.ending == "exited")
    assert leftovers() == set()


def test_output_before_a_timeout_is_kept_and_output_is_bounded(box: Sandbox) -> None:
    run = asyncio.run(box.run("import time; print('early', flush=True); time.sleep(60)"))
    assert run.stdout == "early\n"
    run = asyncio.run(box.run("while True: print('x' * 10**5)"))
    assert len(run.stdout) + len(run.stderr) <= SMALL.output_bytes


def test_many_files_are_limited_too(walled: Sandbox) -> None:
    run = asyncio.run(walled.run("i = 0\nwhile True:\n    open(str(i), 'wb').write(b'x' * 10**6); i += 1"))
    assert "No space left" in run.stderr


def test_all_that_can_be_written_to_has_a_size(walled: Sandbox) -> None:
    mounts = asyncio.run(walled.run("print(open('/proc/self/mounts').read())")).stdout.splitlines()
    written = {}
    for _, where, kind, options, *_ in map(str.split, filter(None, mounts)):
        if kind == "tmpfs" and "rw" in options.split(","):
            written[where] = "size=" in options
    assert written == {"/scratch": True}


def test_code_that_feigns_a_broken_sandbox_is_code_that_failed(box: Sandbox) -> None:
    run = asyncio.run(box.run("import sys; sys.stderr.write('bwrap: no permission'); sys.exit(1)"))
    assert (run.exit_code, run.ending, run.stderr) == (1, "exited", "bwrap: no permission")


def test_a_sandbox_that_is_not_made_is_no_failure_of_the_code(
    box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "entry.py"
    broken.write_text("raise SystemExit('no such limit')")
    monkeypatch.setattr(sandbox_module, "ENTRY", broken)
    with pytest.raises(SandboxUnavailable, match="no such limit"):
        asyncio.run(box.run("print(1)"))


def test_the_network_is_not_there(walled: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
        assert "refused" in asyncio.run(walled.run(code)).stderr


def test_files_environment_and_processes_of_the_parent_are_not_there(
    walled: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    secret.chmod(0o644)
    monkeypatch.setenv("ASYNCRL_REDIS_PASSWORD", "password")
    for code in (
        f"print(open({str(secret)!r}).read())",
        "import os; print(os.environ)",
        "import glob; print([open(p, 'rb').read() for p in glob.glob('/proc/[0-9]*/environ')])",
        f"print(open('/proc/{os.getpid()}/environ').read())",
        "import os; print(os.listdir('/etc'))",
        "import os; os.setuid(0); print('password')",
    ):
        assert "password" not in asyncio.run(walled.run(code)).stdout


def test_runs_do_not_share_files_or_limits(box: Sandbox) -> None:
    async def both() -> list[str]:
        write = (
            "import os, time\nopen('shared', 'w').write('x')\nfor _ in range(3):\n    if os.fork() == 0: time.sleep(1)"
        )
        read = "import os\nprint(os.path.exists('shared'))\nfor _ in range(3):\n    if os.fork() == 0: break"
        return [run.stdout for run in await asyncio.gather(*[box.run(code) for code in (write, read) * 2])]

    outputs = asyncio.run(both())
    assert "True" not in "".join(outputs)
    assert outputs[1].startswith("False")


def test_a_cancelled_run_really_stops(box: Sandbox, leftovers: Callable[[], set[str]]) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(box.run("while True: pass"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert leftovers() == set()


def test_the_probe_accepts_a_sandbox_that_holds_and_refuses_one_that_does_not(
    box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(probe(box))
    lax = tmp_path / "entry.py"
    lines = sandbox_module.ENTRY.read_text().splitlines()
    lax.write_text("\n".join(line for line in lines if "RLIMIT_NPROC" not in line))
    monkeypatch.setattr(sandbox_module, "ENTRY", lax)
    with pytest.raises(SandboxUnavailable, match="does not limit processes"):
        asyncio.run(probe(box))


def test_bubblewrap_that_is_missing_is_named_with_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="install the package bubblewrap"):
        Sandbox("bubblewrap")


def test_limits_are_positive() -> None:
    with pytest.raises(ValueError, match="wall_s=0"):
        Limits(wall_s=0)
