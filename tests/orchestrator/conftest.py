"""One real Redis for the orchestrator's tests, and a namespace for each."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator

import pytest
import redis

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.server import Server, start_server
from asyncrl_jax.transport.steering import Steering


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = start_server(tmp_path_factory.mktemp("redis"), RedisConfig())
    yield started
    started.stop()


@dataclasses.dataclass
class Namespace:
    """A run's own corner of the server."""

    client: redis.Redis
    keys: Keys

    def __post_init__(self) -> None:
        self.control = Control(self.client, self.keys)
        self.ledger = Ledger(self.client, self.keys)
        self.steering = Steering(self.client, self.keys)
        self.control.ensure_epoch()


@pytest.fixture
def space(server: Server) -> Iterator[Namespace]:
    client = connect(RedisConfig(url=server.url, outage_s=10), server.password)
    yield Namespace(client, Keys(uuid.uuid4().hex))
    client.close()
