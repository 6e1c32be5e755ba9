"""A leader that writes without looking back, in a process that a test can stop and continue. Says what became of it."""

from __future__ import annotations

import os
import sys
import time

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.fencing import Deposed, Leadership
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger


def main(url: str, namespace: str, lease_s: str) -> None:
    client, keys = connect(RedisConfig(url=url), os.environ.get("PASSWORD")), Keys(namespace)
    fence = Leadership(client, keys, f"paused/{os.getpid()}").acquire(float(lease_s))
    assert fence is not None
    ledger = Ledger(client, keys, fence)
    print("leads", flush=True)
    while True:  # it never asks whether it still leads: only the fence can stop it
        try:
            ledger.next_ticket_ids(1)
        except Deposed:
            print("refused", flush=True)
            return
        print("wrote", flush=True)
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
