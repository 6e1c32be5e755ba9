"""One part of a small run, made to be killed. argv: role, name, url, password file, namespace."""

import pathlib
import random
import sys
import time

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.groups import GroupReader, GroupWriter
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.tasks import TaskStream
from asyncrl_jax.types import Outcome, Task, Ticket

role, name, url, password_file, namespace = sys.argv[1:]
config = RedisConfig(url=url, claim_idle_s=0.3, outage_s=30, max_deliveries=100)
client = connect(config, pathlib.Path(password_file).read_text())
keys = Keys(namespace)
control, ledger = Control(client, keys), Ledger(client, keys)
rng = random.Random(name)


def issue() -> None:
    while control.phase() == "running":
        tickets = [
            Ticket(ticket_id, Task("arithmetic", "train", 1, 0), 2, 0, 0, 4, 1.0, 0, time.time())
            for ticket_id in ledger.next_ticket_ids(4)
        ]
        ledger.issue(tickets)
        time.sleep(0.01)


def act() -> None:
    tasks, writer = TaskStream(client, keys, name, config), GroupWriter(client, keys, config, limits=None)
    while control.phase() != "finished":
        for delivery in tasks.claim(3, 50):
            match rng.randrange(10):
                case 0:
                    tasks.release(delivery)
                case 1:
                    tasks.fail(delivery, "chaos")
                case 2:
                    pass  # forgotten: comes back when idle
                case _:
                    writer.submit_encoded(delivery, b"group")


def learn() -> None:
    reader = GroupReader(client, keys, name, config)
    while control.phase() != "finished":
        entries = reader.read(8, 50)
        bad = entries[:1] if rng.randrange(5) == 0 else []
        for entry in bad:
            reader.dead_letter(entry, "chaos", "")
        good = [(entry, entry.ticket.ticket_id) for entry in entries[len(bad) :]]
        reader.complete(good, Outcome.TRAINED, 1)


{"issuer": issue, "actor": act, "learner": learn}[role]()
