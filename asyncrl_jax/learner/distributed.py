"""A learner that is several processes, joined by `jax.distributed`: process 0 leads, the others follow.

    process 0   the whole learner: pool, ledger, publishing, checkpoints. Before anything that its devices do together
                with the others', it writes an *order*: the call, and for an update the global batch plan
    others      take the orders one by one, fetch the groups whose rows they feed, and make the same call

Only process 0 writes to Redis, but for nothing: the others read orders and groups. All see the same run directory.
When a process dies, `jax.distributed` ends the others, and a restart of all resumes as one process does.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from asyncrl_jax.config import Config
from asyncrl_jax.config_distributed import AUTO, DistributedConfig
from asyncrl_jax.learner.batch_plan import BatchPlan
from asyncrl_jax.learner.trainer import Trainer
from asyncrl_jax.transport.orders import Orders
from asyncrl_jax.types import Group

log = logging.getLogger(__name__)

NAMED_WAIT_S = 60.0  # a wait longer than this says what it waits for
BLOCK_MS = 1000


def join(config: DistributedConfig) -> bool:
    """Joins the other processes; False if the learner is one process. Call it before anything touches a device."""
    if not config.coordinator:
        return False
    if config.coordinator == AUTO:
        jax.distributed.initialize()
    else:
        jax.distributed.initialize(config.coordinator, config.num_processes, config.process_id)
    log.info("process %d of %d, %d devices in all", jax.process_index(), jax.process_count(), jax.device_count())
    return True


def agreed_name() -> str:
    """A name for this start of the learner, drawn by process 0 and the same in all."""
    drawn = np.frombuffer(secrets.token_bytes(16), np.uint8).astype(np.int32)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(drawn)).astype(np.uint8)).hex()


def follow(trainer: Trainer, orders: Orders, fetch: Callable[[Sequence[str]], list[Group]], config: Config) -> int:
    """Does what process 0 orders until it closes.

    Args:
      trainer: of this process.
      orders: of this start of the learner.
      fetch: groups by ticket id, in the same order.
      config: the learner's.

    Returns:
      The process's exit status, that of process 0.

    Raises:
      TimeoutError: if no order comes for `distributed.order_wait_s`.
    """
    while True:
        order = _next_order(orders, config.distributed.order_wait_s)
        call, arguments = order["call"], order["arguments"]
        if call == "close":
            return int(arguments["status"])
        if call == "apply_plan":
            plan = BatchPlan.from_json(arguments["plan"])
            numbers = plan.groups_of(trainer.own_rows)
            found = fetch([plan.ticket_ids[number] for number in numbers])
            trainer.apply_plan(plan, dict(zip(numbers, found, strict=True)))
        elif call in Trainer.ORDERED:
            getattr(trainer, call)(**arguments)
        else:
            raise RuntimeError(f"order {call!r} is unknown: all processes must run the same release")


def _next_order(orders: Orders, limit_s: float) -> dict[str, Any]:
    since = told_at = time.monotonic()
    while (order := orders.take(BLOCK_MS)) is None:
        now = time.monotonic()
        if now - since > limit_s:
            raise TimeoutError(f"no order from process 0 for {limit_s:g} s")
        if now - told_at > NAMED_WAIT_S:
            log.info("waits for an order of process 0 since %.0f s", now - since)
            told_at = now
    return order
