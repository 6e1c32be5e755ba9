import threading
import time

import pytest
from fleet_contract import until

from asyncrl_jax.config import Config, override
from asyncrl_jax.orchestrator.fleets.base import FleetUnavailable
from asyncrl_jax.orchestrator.fleets.keeper import FleetKeeper
from asyncrl_jax.orchestrator.fleets.opening import check_installed


class Recorded:
    def __init__(self):
        self.resized, self.opened, self.failing, self.closed = [], 0, False, False

    def __call__(self):
        self.opened += 1
        if self.failing:
            raise FleetUnavailable("no answer")
        return self

    def resize(self, members):
        if self.failing:
            raise FleetUnavailable("no answer")
        self.resized.append(dict(members))

    def sizes(self):
        return self.resized[-1]

    def close(self):
        self.closed = True


@pytest.fixture
def fleet():
    return Recorded()


@pytest.fixture
def keeper(fleet):
    made = FleetKeeper(fleet, every_s=0.05)
    yield made
    made.close()


def test_what_was_asked_for_is_applied_at_once_and_again(fleet, keeper):
    time.sleep(0.15)
    assert fleet.opened == 0, "nothing before something was asked for"
    keeper.ask({"actor": 3})
    until(lambda: len(fleet.resized) >= 3, "it is applied again", 5)
    assert fleet.resized[-1] == {"actor": 3}
    assert fleet.opened == 1


def test_a_standby_leaves_the_fleet_alone(fleet, keeper):
    keeper.ask({"actor": 3})
    until(lambda: fleet.resized, "it is applied", 5)
    keeper.rest()
    time.sleep(0.1)
    count = len(fleet.resized)
    time.sleep(0.2)
    assert len(fleet.resized) == count
    keeper.ask({"actor": 3})
    until(lambda: len(fleet.resized) > count, "it is applied when it leads again", 5)


def test_a_cluster_that_does_not_answer_is_named_once_and_asked_again(fleet, keeper, caplog):
    fleet.failing = True
    keeper.ask({"actor": 1})
    until(lambda: fleet.opened >= 3, "it is opened again", 5)
    fleet.failing = False
    until(lambda: fleet.resized, "it is applied", 5)
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [
        "the fleet cannot be made to have {'actor': 1}: no answer"
    ]


def test_the_last_request_is_applied_before_it_closes(fleet):
    keeper = FleetKeeper(fleet, every_s=60.0)
    keeper.ask({"actor": 0})
    keeper.close()
    assert fleet.resized[-1] == {"actor": 0}
    assert fleet.closed
    assert "fleet" not in {thread.name for thread in threading.enumerate()}


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = override(Config(), {"orchestrator.fleet.kind": "ray"})
    with pytest.raises(ValueError, match=r"fleet\.kind=ray: needs pip install 'asyncrl-jax\[ray\]'"):
        check_installed(config.orchestrator.fleet)
    check_installed(Config().orchestrator.fleet)


def test_what_nobody_asks_for_any_more_is_not_applied(fleet):
    """A leader that waits for Redis has a thread that does not: another may lead, and ask for something else."""
    now = [0.0]
    keeper = FleetKeeper(fleet, every_s=0.01, valid_s=4.0, clock=lambda: now[0])
    keeper.ask({"actor": 8})
    until(lambda: len(fleet.resized) > 2, "it is applied again and again")
    now[0] = 5.0
    time.sleep(0.05)
    applied = len(fleet.resized)
    time.sleep(0.05)
    assert len(fleet.resized) == applied
    keeper.ask({"actor": 8})
    until(lambda: len(fleet.resized) > applied, "it is applied again")
    keeper.close()
