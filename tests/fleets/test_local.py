import os
import signal

import pytest
from fleet_contract import FleetContract

from asyncrl_jax.local.fleet import LocalFleet
from asyncrl_jax.local.supervisor import Part, Supervisor, spawn


class Processes:
    """Actors that only sleep, under a real supervisor."""

    def __init__(self, directory):
        self.supervisor = Supervisor(notify=lambda message: None)
        self.directory = directory
        self.fleet = LocalFleet(self.supervisor, self.part)

    def part(self, name):
        log = self.directory / f"{name}.log"
        return Part(name, lambda: spawn(["sleep", "60"], os.environ, log), log)

    def running(self):
        parts = self.supervisor._running.values()
        return {one.part.name: one.process.pid for one in parts if one.process.poll() is None}

    def kill(self, name):
        os.kill(self.supervisor.process(name).pid, signal.SIGKILL)

    def another(self):
        return self.fleet  # it is the launcher's, whoever leads

    def tick(self):
        assert self.supervisor.poll(ending=False) is None


class TestLocalFleet(FleetContract):
    @pytest.fixture
    def world(self, tmp_path):
        made = Processes(tmp_path)
        yield made
        made.supervisor.stop(timeout_s=0.2)

    @pytest.fixture
    def fleet(self, world):
        return world.fleet
