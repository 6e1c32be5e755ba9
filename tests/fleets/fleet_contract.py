"""What every fleet keeps, tried on each: `FleetContract` is told how to look at its members from outside."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str, limit_s: float = 60.0, tick: Callable[[], object] = lambda: None):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"in {limit_s:.0f} s it did not come true that {what}"
        tick()
        time.sleep(0.05)


class FleetContract:
    """A subclass has the fixtures `fleet` (with classes `cheap` and `dear`) and `world`:

    * `world.running()`: {name: what changes when the member is started again}
    * `world.kill(name)`: ends a member as a crash would
    * `world.another()`: the same fleet, as the next leader opens it
    * `world.tick()`: lets the world go on
    """

    limit_s = 20.0

    def _until(self, world, condition, what):
        until(condition, what, self.limit_s, world.tick)

    def _becomes(self, world, names):
        self._until(world, lambda: world.running().keys() == names, f"{sorted(names)} run")

    def test_it_grows_and_shrinks_from_the_end_and_leaves_alone_who_stays(self, fleet, world):
        fleet.resize({"cheap": 1, "dear": 0})
        self._becomes(world, {"cheap-0"})
        first = world.running()["cheap-0"]
        fleet.resize({"cheap": 2, "dear": 1})
        self._becomes(world, {"cheap-0", "cheap-1", "dear-0"})
        fleet.resize({"cheap": 2, "dear": 1})
        assert fleet.sizes() == {"cheap": 2, "dear": 1}
        fleet.resize({"cheap": 1, "dear": 0})
        assert fleet.sizes() == {"cheap": 1, "dear": 0}
        self._becomes(world, {"cheap-0"})
        assert world.running()["cheap-0"] == first, "who stays is not touched"

    def test_a_member_that_dies_comes_back_under_its_name(self, fleet, world):
        fleet.resize({"cheap": 2, "dear": 0})
        self._becomes(world, {"cheap-0", "cheap-1"})
        before = world.running()
        world.kill("cheap-0")
        self._until(world, lambda: world.running().get("cheap-0") not in (None, before["cheap-0"]), "it is back")
        assert world.running()["cheap-1"] == before["cheap-1"]

    def test_the_next_leader_finds_it_as_it_is(self, fleet, world):
        fleet.resize({"cheap": 2, "dear": 0})
        self._becomes(world, {"cheap-0", "cheap-1"})
        before = world.running()
        successor = world.another()
        assert successor.sizes() == {"cheap": 2, "dear": 0}
        successor.resize({"cheap": 2, "dear": 0})
        time.sleep(0.2)
        assert world.running() == before
        successor.resize({"cheap": 0, "dear": 0})
        self._becomes(world, set())
