"""Reads groups until it is killed. argv: url, password file, namespace, how it ends.

"trains": completes each group it reads, one by one, and prints its ticket. "holds": completes the first it reads and
kills itself with the rest in hand. "decodes": kills itself when it meets a group whose bytes are b"poison".
"""

import os
import pathlib
import signal
import sys

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.groups import GroupReader
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.types import Outcome

url, password_file, namespace, ending = sys.argv[1:]
config = RedisConfig(url=url, max_deliveries=3)
client = connect(config, pathlib.Path(password_file).read_text())
reader = GroupReader(client, Keys(namespace), "learner-0", config)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


while entries := reader.read(8, 200):
    for entry in entries:
        if entry.data == b"poison" and ending == "decodes":
            die()
        reader.complete([(entry, entry.ticket.ticket_id)], Outcome.TRAINED, 1)
        print(entry.ticket.ticket_id, flush=True)
        if ending == "holds":
            die()
