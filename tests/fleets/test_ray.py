"""Actors on a real Ray cluster of two nodes on loopback."""

import os
import signal
import time

import psutil
import pytest
from fleet_contract import FleetContract, until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::FutureWarning:ray")]
ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

from ray_cluster import ENVIRONMENT, RayCluster  # noqa: E402

from asyncrl_jax.config import Config, override  # noqa: E402
from asyncrl_jax.orchestrator.fleets import ray as module  # noqa: E402
from asyncrl_jax.orchestrator.fleets.base import FleetUnavailable  # noqa: E402
from asyncrl_jax.orchestrator.fleets.ray import RayFleet  # noqa: E402


@pytest.fixture(scope="module")
def cluster():
    patch = pytest.MonkeyPatch()
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    made = RayCluster({"PYTHONPATH": os.path.dirname(__file__)})
    made.start("head", {"cheap": 2}, head=True)
    made.start("dear", {"dear": 1, "cheap": 1})
    yield made
    ray.shutdown()
    made.close()
    patch.undo()


class World:
    def __init__(self, cluster, run_dir):
        self.run_dir = run_dir
        changes = {"orchestrator.fleet.kind": "ray", "orchestrator.fleet.classes": ("cheap", "dear")}
        changes |= {"orchestrator.fleet.ray_address": cluster.address, "orchestrator.fleet.ray_cpus": 0.1}
        self.config = override(Config(), changes)
        self.fleet = None

    def another(self):
        """As another process would open it: the connection before is gone."""
        ray.shutdown()
        deadline = time.monotonic() + 60
        while True:
            try:
                self.fleet = RayFleet(self.config, self.run_dir, actor_module="sleeping_actor")
                return self.fleet
            except FleetUnavailable:  # the head starts
                assert time.monotonic() < deadline
                time.sleep(0.5)

    def running(self):
        notes = self.run_dir.glob("pids/[a-z]*")
        pids = {}
        for note in notes:
            try:
                pid = int(note.read_text())
            except FileNotFoundError:
                continue
            if psutil.pid_exists(pid):
                pids[note.name] = pid
        return pids

    def kill(self, name):
        os.kill(self.running()[name], signal.SIGKILL)

    def tick(self):
        pass


@pytest.fixture
def world(cluster, tmp_path):
    made = World(cluster, tmp_path)
    yield made
    if made.fleet is not None:
        made.fleet.resize({"cheap": 0, "dear": 0})
        until(lambda: not made.running(), "all have ended", 30)
        ray.shutdown()


@pytest.fixture
def fleet(world):
    return world.another()


class TestRayFleet(FleetContract):
    limit_s = 60.0


def test_a_member_whose_node_dies_comes_back_on_another(cluster, world, fleet):
    cluster.start("short-lived", {"cheap": 8})
    fleet.resize({"cheap": 1})
    until(lambda: sum(node["Alive"] for node in ray.nodes()) == 3, "the node is there", 60)
    fleet.resize({"cheap": 5})
    until(lambda: len(world.running()) == 5, "five run", 60)
    cluster.kill("short-lived")
    cluster.start("instead", {"cheap": 8})
    until(lambda: len(world.running()) == 5, "five run again", 90)
    assert fleet.sizes()["cheap"] == 5


def test_a_class_reserves_what_its_settings_say(world, fleet):
    settings = ("dear.ray_cpus=0.5", "dear.slots=8")
    world.config = override(world.config, {"orchestrator.fleet.class_settings": settings})
    fleet = world.another()
    fleet.resize({"cheap": 1, "dear": 1})
    until(lambda: world.running().keys() == {"cheap-0", "dear-0"}, "both run", 60)
    taken = ray.cluster_resources()["CPU"] - 0.1 - 0.5
    until(lambda: abs(ray.available_resources()["CPU"] - taken) < 1e-6, "so much is taken", 30)


def test_one_that_finds_no_room_is_still_taken_away(world, fleet, monkeypatch):
    monkeypatch.setattr(module, "_GONE_S", 0.1)
    fleet.resize({"cheap": 0, "dear": 3})
    assert fleet.sizes()["dear"] == 3
    until(lambda: "dear-0" in world.running(), "that with room runs", 60)

    def gone():
        fleet.resize({"dear": 0})
        return not ray.util.list_named_actors()

    until(gone, "all are gone", 30)


def test_no_cluster_is_named(world):
    ray.shutdown()
    config = override(world.config, {"orchestrator.fleet.ray_address": "127.0.0.2:1"})
    with pytest.raises(FleetUnavailable, match=r"fleet\.ray_address=127\.0\.0\.2:1"):
        RayFleet(config, world.run_dir)
