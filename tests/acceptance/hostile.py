"""A host whose policy is scripted and whose everything else is real: Redis, tickets, environments, tools, sandboxes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from asyncrl_jax.actor import loop
from asyncrl_jax.actor.chat.tokenizer import ByteTokenizer
from asyncrl_jax.actor.engines.base import Completion, EngineCounters
from asyncrl_jax.config import Config, override
from asyncrl_jax.learner.convert import publish_weights
from asyncrl_jax.models import init_params
from asyncrl_jax.transport.codec import Limits
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.groups import GroupReader
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.server import Server
from asyncrl_jax.types import Group, LearnerState, Outcome, Task, Ticket

ROUGH = "text:rough:ROUGH"
SECRET = "the-parents-secret"
VARIABLE = "ASYNCRL_TEST_SECRET"

# What the policy runs for tasks of these indices; {…} is filled in by `programs`.
_PROGRAMS = {
    20: ("fork_bomb", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
    21: ("allocation", "bytearray(100 * 2**30)"),
    22: ("endless_output", "while True: print('x' * 10**5)"),
    23: ("disk_filling", "i = 0\nwhile True:\n    open(str(i), 'wb').write(b'x' * 10**6); i += 1"),
    24: ("network", "import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('connected')"),
    25: ("parents_file", "print(open('{file}').read())"),
    26: (
        "parents_environment",
        "import os, glob\nprint(os.environ)\nprint([open(p, 'rb').read() for p in glob.glob('/proc/[0-9]*/environ')])\n"
        "print(open('/proc/{pid}/environ').read())",
    ),
    27: ("never_returns", "import time\ntime.sleep(10**6)"),
}
_TASK = re.compile(r"user\n\S+ (\d+)")
FIRST_FINE = 100
FINE_PROGRAM = "print(6 * 7)"
EVERY = 10  # which of the fine episodes run a program too


def programs(**values: object) -> dict[int, tuple[str, str]]:
    """(kind, code) by task index."""
    filled = {}
    for index, (kind, code) in _PROGRAMS.items():
        for name, value in values.items():
            code = code.replace("{" + name + "}", str(value))
        filled[index] = (kind, code)
    return filled


class ScriptedEngine:
    """See `Engine`: calls the tool with the program of the task that the prompt names, then answers."""

    version, num_slots, num_busy_slots = 0, 64, 0

    def __init__(self, codes: dict[int, str]) -> None:
        self.counters = EngineCounters()
        self.codes = codes

    async def open(self, seed: int, temperature: float, *, routed_experts: bool = False) -> _Session:
        return _Session(self)

    async def load(self, directory: str, version: object) -> None:
        pass

    async def pause(self) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()


class _Session:
    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._index: int | None = None

    async def generate(self, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int) -> Completion:
        await asyncio.sleep(0.005)
        text = "right"
        if self._index is None:
            self._index = int(_TASK.findall(ByteTokenizer().decode(new_tokens))[-1])
            code = self._engine.codes.get(self._index)
            if code is None and self._index >= FIRST_FINE and self._index % EVERY == 0:
                code = FINE_PROGRAM
            if code is not None:
                call = json.dumps({"name": "python", "arguments": {"code": code}})
                text = f"<tool_call>{call}</tool_call>"
        tokens = np.array([*ByteTokenizer().encode(text), ByteTokenizer.TURN_END], np.int32)
        self._engine.counters.num_sampled_tokens += len(tokens)
        return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")

    def close(self) -> None:
        pass


@dataclasses.dataclass
class Played:
    """What came of a run of tasks."""

    groups: dict[int, Group]  # by task index
    failed: dict[int, str]  # reason in the ledger, by task index
    beat: dict[str, object]  # the host's last heartbeat
    worst_lag_p99_s: float
    seconds: float


def play(
    server: Server, directory: Path, monkeypatch: pytest.MonkeyPatch, indices: Sequence[int], limit_s: float
) -> Played:
    """Plays one episode of each task on one host with 64 slots, all at once as far as it takes them."""
    monkeypatch.setenv(VARIABLE, SECRET)
    secret = directory / "secret"
    secret.write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        filled = programs(port=listener.getsockname()[1], file=secret, pid=os.getpid())
        codes = {index: code for index, (_, code) in filled.items()}
        monkeypatch.setattr(loop, "make_engine", lambda config, **settings: ScriptedEngine(codes))
        return _Host(server, directory).play(indices, limit_s)


class _Host:
    def __init__(self, server: Server, directory: Path) -> None:
        self.config = override(
            Config(),
            {
                "redis.url": server.url,
                "redis.namespace": uuid.uuid4().hex,
                "environment.name": ROUGH,
                "environment.level_weights": (1.0,),
                "environment.demonstrated_levels": (1,),
                "environment.max_tokens": 8192,
                "environment.call_timeout_s": 3.0,
                "environment.processes": 2,
                "model.max_positions": 8192,
                "model.vocab_size": 258,
                "learner.pack_tokens": 8192,
                "learner.group_size": 2,  # of the config; the tickets have one member
                "tools.names": ("python",),
                "tools.sandbox_wall_s": 2.0,
                "warm_start.num_steps": 0,
                "actor.heartbeat_s": 0.2,
                "actor.max_attempts": 2,
            },
        )
        self._server, self._directory, self._after = server, directory, "0-0"
        client, keys = connect(self.config.redis, server.password), Keys(self.config.redis.namespace)
        self._control, self._ledger = Control(client, keys), Ledger(client, keys)
        self._control.ensure_epoch()
        self._reader = GroupReader(client, keys, "learner", self.config.redis)
        params = init_params(self.config.model, 0)
        self._control.announce(publish_weights(directory / "weights", self.config.model, params))
        self._control.set_learner(LearnerState(line=0, update=0, version=0, phase="training"))

    def _issue(self, indices: Sequence[int]) -> dict[str, int]:
        ids = self._ledger.next_ticket_ids(len(indices))
        tickets = [
            Ticket(ticket_id, Task(ROUGH, "train", 1, index), 1, 0, 0, 10**6, 1.0, index, time.time())
            for ticket_id, index in zip(ids, indices, strict=True)
        ]
        self._ledger.issue(tickets)
        return dict(zip(ids, indices, strict=True))

    def play(self, indices: Sequence[int], limit_s: float) -> Played:
        by_ticket = self._issue(indices)
        stop, limits = threading.Event(), Limits.from_config(self.config)
        ended: list[BaseException | int] = []

        def run() -> None:
            try:
                ended.append(loop.run_actor(self.config, self._directory, self._server.password, "actor-0", stop))
            except BaseException as error:  # noqa: BLE001  looked at below
                ended.append(error)

        groups: dict[int, Group] = {}
        failed: dict[int, str] = {}
        worst, beat, since = 0.0, {}, time.monotonic()
        thread = threading.Thread(target=run)
        thread.start()
        try:
            while len(groups) + len(failed) < len(indices):
                assert time.monotonic() - since < limit_s, f"{len(groups)} and {len(failed)} of {len(indices)}: {beat}"
                assert not ended, ended
                for entry in self._reader.read(64, 100):
                    group = entry.decode(limits)
                    groups[group.ticket.task.index] = group
                failed |= self._failed(by_ticket)
                beat = self._control.heartbeats().get(("actor", "actor-0"), {}) or beat
                worst = max(worst, beat.get("loop_lag_p99_s", 0.0))
            seconds = time.monotonic() - since
            time.sleep(0.5)  # for the last heartbeat
            beat = self._control.heartbeats()[("actor", "actor-0")]
        finally:
            stop.set()
            thread.join(60)
        assert ended == [0], ended
        return Played(groups, failed, beat, worst, seconds)

    def _failed(self, by_ticket: dict[str, int]) -> dict[int, str]:
        events = self._ledger.events(self._after)
        if events:
            self._after = events[-1].event_id
        return {by_ticket[event.ticket_id]: event.reason for event in events if event.outcome is Outcome.FAILED}
