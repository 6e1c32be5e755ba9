"""The embedded server: private, durable, and gone with its parent."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import stat
import subprocess
import sys
import time

import psutil
import pytest

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport.connection import parse_version
from asyncrl_jax.transport.server import find_server, start_server


def test_the_server_is_private(launch, dial, tmp_path):
    server = launch()
    client = dial(server)
    assert stat.S_IMODE((tmp_path / "redis.password").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "redis.conf").stat().st_mode) == 0o600
    assert (tmp_path / "redis.password").read_text() == server.password
    assert len(server.password) >= 32
    process = psutil.Process(server.process.pid)
    command = " ".join(process.cmdline())
    assert "redis-server" in command
    assert server.password not in command
    assert server.password not in str(process.environ())
    assert {connection.laddr.ip for connection in process.net_connections("tcp")} == {"127.0.0.1"}
    assert client.config_get("appendfsync")["appendfsync"] == "always"
    assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
    assert server.password not in (tmp_path / "redis.log").read_text()


def test_q_13_a_killed_server_comes_back_with_everything_it_acknowledged(launch, dial):
    server = launch()
    client = dial(server)
    before = (server.url, server.password)
    for n in range(50):
        client.rpush("list", n)
    server.process.kill()
    server.process.wait()
    server = launch()
    assert (server.url, server.password) == before
    assert client.lrange("list", 0, -1) == [str(n).encode() for n in range(50)]


def test_a_port_in_use_is_named(binary, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"redis.port={port}"):
            start_server(tmp_path, RedisConfig(server=binary, port=port))


def test_a_port_can_be_chosen(launch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert launch(port).url == f"redis://127.0.0.1:{port}/0"


def test_a_server_that_does_not_start_shows_its_last_lines(binary, tmp_path):
    old_layout = parse_version(find_server(binary)[1]) < (7,)
    # 6.2 cannot load the file; 7 finds a file where it needs a folder.
    (tmp_path / ("appendonly.aof" if old_layout else "appendonlydir")).write_bytes(b"not an append-only file")
    with pytest.raises(ValueError, match=r"(?s)redis-server ended with .*redis\.log says:\n.*append"):
        start_server(tmp_path, RedisConfig(server=binary))


def test_data_of_a_newer_server_is_not_silently_ignored(tmp_path):
    (tmp_path / "appendonlydir").mkdir()
    with pytest.raises(ValueError, match="Redis 7"):
        start_server(tmp_path, RedisConfig(server="wheel"))


def test_no_server_or_one_too_old_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="system: none"):
        find_server("system")
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho Redis server v=5.0.7 sha=0\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(ValueError, match=r"redis-server 5\.0\.7"):
        find_server("system")
    assert find_server("auto")[0] != old  # the wheel's


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_the_server_dies_with_its_parent(binary, tmp_path):
    parent = (
        "import os, signal, sys\n"
        "from asyncrl_jax.config import RedisConfig\n"
        "from asyncrl_jax.transport.server import start_server\n"
        "print(start_server(sys.argv[1], RedisConfig(server=sys.argv[2])).process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent, str(tmp_path), binary], check=False, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_stopping_twice_is_stopping_once(launch):
    server = launch()
    server.stop()
    server.stop()
    assert server.process.returncode is not None


def test_ctrl_c_does_not_reach_the_server(launch):
    assert os.getsid(launch().process.pid) != os.getsid(0)


def test_only_the_wheels_binary_is_used(tmp_path):
    path, version = find_server("wheel")
    assert isinstance(path, pathlib.Path)
    assert version.startswith("6.2")
