"""Actors on the nodes of a Ray cluster: each is a process of its own under a Ray actor that holds its place.

A class of hosts is a Ray resource of its name, of which an actor takes 1, so `ray start --resources='{"cheap": 4}'`
makes room for four. A Ray actor is detached and named: it outlives the orchestrator that made it, the next one finds
it, and Ray starts it again, on another node if its own is gone. No data goes through Ray.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from asyncrl_jax.config import Config
from asyncrl_jax.lifetime import PARENT_VARIABLE
from asyncrl_jax.orchestrator.fleets.base import FleetUnavailable

_CLOSING_S = 6.5  # for an actor process to close after SIGTERM
_GONE_S = 15.0  # for a Ray actor that was asked to end; then Ray ends it
_ANSWER_S = 5.0  # of the cluster's head
_BACKOFF_S = 1.0  # before Ray may start again what ended by itself


class ActorHost:
    """What Ray places: it runs one actor process, and ends when that one fails, so that Ray starts both again."""

    def __init__(self, module: str, name: str, config_file: str, log_file: str):
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        with Path(log_file).open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, f"--config_file={config_file}", f"--actor_id={name}"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        threading.Thread(target=self._watch, name="actor process", daemon=True).start()

    def end(self) -> None:
        """Closes the process, which gives its tickets back, and then this Ray actor for good."""
        self._process.terminate()
        try:
            self._process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        ray.actor.exit_actor()

    def _watch(self) -> None:
        code = self._process.wait()
        if code not in (0, -15):  # 0: the run is over; SIGTERM: it was asked to end
            time.sleep(_BACKOFF_S)
            os._exit(1)


class RayFleet:
    """A `Fleet` (base.py)."""

    def __init__(self, config: Config, run_dir: Path, actor_module: str = "asyncrl_jax.launchers.actor"):
        """Connects. Args: run_dir: that all nodes see. Raises: FleetUnavailable: if no cluster answers."""
        self._actor_module = actor_module
        self._settings = config.orchestrator.fleet
        self._run_dir = run_dir
        self._ending: dict[str, float] = {}  # since when, by name
        run = f"{config.redis.url} {config.redis.namespace} {run_dir}"
        namespace = f"asyncrl-{hashlib.sha256(run.encode()).hexdigest()[:16]}"  # of this run alone
        address = self._settings.ray_address
        try:
            _look_for_head(address)
            ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
        except (OSError, RuntimeError, ray.exceptions.RayError) as error:
            raise FleetUnavailable(f"--config.orchestrator.fleet.ray_address={address}: {error}") from error

    def resize(self, members: Mapping[str, int]) -> None:
        try:
            there = self._names()
            for kind, size in members.items():
                wanted = {f"{kind}-{number}" for number in range(size)}
                for name in sorted(wanted - there, key=_number):
                    self._start(name, kind)
                for name in sorted(n for n in there - wanted if n.rpartition("-")[0] == kind):
                    self._end(name)
        except (ray.exceptions.RayError, ConnectionError) as error:
            self.close()
            raise FleetUnavailable(f"Ray: {error}") from error

    def sizes(self) -> dict[str, int]:
        try:
            names = [name for name in self._names() if name not in self._ending]
        except (ray.exceptions.RayError, ConnectionError) as error:
            self.close()
            raise FleetUnavailable(f"Ray: {error}") from error
        counts = dict.fromkeys((one.name for one in self._settings.host_classes), 0)
        for name in names:
            counts[name.rpartition("-")[0]] = counts.get(name.rpartition("-")[0], 0) + 1
        return counts

    def close(self) -> None:
        ray.shutdown()

    def _names(self) -> set[str]:
        names = set(ray.util.list_named_actors())
        self._ending = {name: since for name, since in self._ending.items() if name in names}
        return names

    def _start(self, name: str, kind: str) -> None:
        (host_class,) = (one for one in self._settings.host_classes if one.name == kind)
        options: dict[str, Any] = {
            "name": name,
            "lifetime": "detached",
            "max_restarts": -1,
            "num_cpus": host_class.ray_cpus,
            "num_gpus": host_class.ray_gpus,
            "resources": {kind: 1},
        }
        config_file, log_file = self._run_dir / "config.json", self._run_dir / "logs" / f"{name}.log"
        ray.remote(ActorHost).options(**options).remote(self._actor_module, name, str(config_file), str(log_file))

    def _end(self, name: str) -> None:
        """Asks it to end; one that has been asked for long, as where no node has room for it, is ended by Ray."""
        since = self._ending.get(name)
        try:
            actor = ray.get_actor(name)
        except ValueError:  # it is gone
            return
        if since is None:
            self._ending[name] = time.monotonic()
            actor.end.remote()
        elif time.monotonic() - since > _GONE_S:
            ray.kill(actor, no_restart=True)


def _look_for_head(address: str) -> None:
    """Raises: OSError: if nothing listens there; Ray itself would look for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
