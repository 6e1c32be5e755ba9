"""A real Ray cluster on loopback: its nodes are processes of this machine, with little memory and no dashboard."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

_LOOPBACK = "127.0.0."  # each node has an address of its own; 127.0.0.1 Ray would replace by one that others reach
START_LIMIT_S = 60.0
OBJECT_STORE_BYTES = 80 * 2**20
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
}


class RayCluster:
    """A head and any number of further nodes, each with the class resources that it is given."""

    def __init__(self, environment: dict[str, str] | None = None):
        self._directory = Path(tempfile.mkdtemp(prefix="ray-"))  # short: names of sockets are at most 107 long
        self._environment = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self._started: list[str] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"{_LOOPBACK}2:{free_port()}"

    def start(self, name: str, resources: dict[str, int], *, head: bool = False) -> None:
        """Starts a node; the head listens then, others come later."""
        where = ["--head", f"--port={self.address.split(':')[1]}"] if head else [f"--address={self.address}"]
        if head:
            where += ["--include-dashboard=false", f"--temp-dir={self._directory / 'ray'}"]
        address = f"{_LOOPBACK}{2 + len(self._started)}"
        self._started.append(name)
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *where,
            f"--node-ip-address={address}",
            "--num-cpus=4",
            f"--resources={json.dumps(resources)}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--disable-usage-stats",
            "--block",
        ]
        log = (self._directory / f"{name}.log").open("wb")
        process = subprocess.Popen(
            command, env=self._environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        log.close()
        self._processes[name] = process
        if head:
            self._until_it_listens()

    def _until_it_listens(self) -> None:
        host, port = self.address.split(":")
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    return
            assert time.monotonic() < deadline, (self._directory / "head.log").read_text()
            time.sleep(0.1)

    def kill(self, name: str) -> None:
        """The node and all that runs on it end as if its power had failed."""
        process = self._processes.pop(name)
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(10)
        psutil.wait_procs(family, timeout=10)

    def close(self) -> None:
        for name in reversed(list(self._processes)):
            self.kill(name)
        shutil.rmtree(self._directory, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((f"{_LOOPBACK}2", 0))
        return int(probe.getsockname()[1])
