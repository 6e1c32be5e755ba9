"""Parts and Redis are killed at any moment; the ledger still balances and nothing is left behind."""

from __future__ import annotations

import pathlib
import random
import shutil
import subprocess
import sys
import time

import pytest

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.groups import GroupReader
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger, recompute
from asyncrl_jax.transport.tasks import TaskStream
from asyncrl_jax.types import Outcome

PART = pathlib.Path(__file__).with_name("chaos_part.py")
PARTS = {"issuer-0": "issuer", "actor-0": "actor", "actor-1": "actor", "learner-0": "learner"}


def test_nothing_is_lost_or_settled_twice_when_parts_and_redis_are_killed(launch, dial, tmp_path):
    rng = random.Random(5)
    server = launch()
    client = dial(server, outage_s=30)
    keys = Keys("chaos")
    control, ledger = Control(client, keys), Ledger(client, keys)
    control.ensure_epoch()

    def start(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(PART), PARTS[name], name, server.url, str(tmp_path / "redis.password"), "chaos"]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)

    parts = {name: start(name) for name in PARTS}
    try:
        _wait_for(lambda: ledger.counts()["trained"] > 0)
        for round_ in range(10):
            time.sleep(rng.uniform(0.05, 0.3))
            if round_ % 4 == 1:
                server.process.kill()
                server.process.wait()
                server = launch()
            name = rng.choice(list(PARTS))
            parts[name].kill()
            parts[name].wait()
            parts[name] = start(name)
        trained = ledger.counts()["trained"]
        _wait_for(lambda: ledger.counts()["trained"] > trained)
        control.set_phase("finishing")
        assert parts["issuer-0"].wait(20) == 0
        _wait_for(lambda: not ledger.live())
        control.set_phase("finished")
        assert [part.wait(20) for part in parts.values()] == [0] * len(parts)
    finally:
        for part in parts.values():
            part.kill()
            part.wait()
    counts = recompute(ledger.events(count=1_000_000))
    assert counts.balances
    assert counts.pending == 0
    assert min(counts.issued // 50, *(counts.outcomes[o] for o in (Outcome.TRAINED, Outcome.FAILED))) > 0
    assert counts.outcomes[Outcome.QUARANTINED] == client.xlen(keys.dead)
    assert [client.xlen(stream) for stream in (keys.tasks, keys.groups(0), keys.groups(1))] == [0, 0, 0]


def _wait_for(condition, limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_q_13_a_reset_of_redis_is_seen_and_survived(launch, dial, tmp_path, make_ticket):
    """Everything in Redis is gone: the epoch says so, old work is refused, and new work goes through."""
    server = launch()
    redis_config = RedisConfig(url=server.url, outage_s=30)
    client = dial(server, outage_s=30)
    keys = Keys("reset")
    control, ledger = Control(client, keys), Ledger(client, keys)
    assert control.ensure_epoch() == (1, True)
    tasks, reader = TaskStream(client, keys, "actor-0", redis_config), GroupReader(client, keys, "l", redis_config)
    lost = [make_ticket(ticket_id) for ticket_id in ledger.next_ticket_ids(2)]
    ledger.issue(lost)
    (held, _) = tasks.claim(2, 0)
    server.process.kill()
    server.process.wait()
    for name in ("appendonlydir", "appendonly.aof"):
        path = tmp_path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    launch()
    assert control.epoch() is None
    with pytest.raises(RuntimeError, match="reset"):
        ledger.next_ticket_ids(1)
    assert ledger.issue(lost) == 0
    assert not tasks.fail(held, "gone")
    assert tasks.keep_alive([held]) == []
    assert reader.read(1, 0) == []
    assert control.ensure_epoch(at_least=2) == (2, True)
    again = [make_ticket(ticket_id) for ticket_id in ledger.next_ticket_ids(2)]
    assert [ticket.ticket_id for ticket in again] == ["2-1", "2-2"]
    ledger.issue(again)
    assert [delivery.ticket for delivery in tasks.claim(5, 0)] == again
