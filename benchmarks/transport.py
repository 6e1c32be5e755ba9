"""Groups through the stream, as a ratio to raw pipelined redis-py that moves the same bytes. One process each side.

    python -m benchmarks.transport [--redis_server system|wheel] [--batch 8] [--repeats 5]

`ratio_to_raw` is on a server as the launcher starts it, where every write is on disk before its reply;
`ratio_to_raw_in_memory` on one that writes nothing to disk, where Python's time per group is all there is to see.

Ours is the production path: `GroupWriter` checks, encodes and queues a group and ends its task in one atomic step;
`GroupReader` reads it, fetches and decodes it, checks it against the ledger, and settles its ticket. Raw is XADD of the
encoded bytes, XREADGROUP, XACK and XDEL with a client as redis-py makes it, pipelined in batches of the same size. Two
threads submit, as an actor host's do: one encodes while the other sends. Raw has nothing to encode, and sends from one.
The two take turns on one server over TCP, and medians are compared, since a machine's clock is noisy.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import redis

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport.codec import Limits, encode_group
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.groups import GroupReader, GroupWriter
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.server import start_server
from asyncrl_jax.transport.tasks import TaskStream
from asyncrl_jax.types import FinishReason, Group, Outcome, Task, Ticket, Trajectory

GROUP_SIZE = 8
WRITING_THREADS = 2
BYTES_PER_TOKEN = 13  # of all token columns
VOCAB = 32_000
LIMITS = Limits(max_message_bytes=1 << 26, max_tokens=1 << 20, vocab_size=VOCAB, max_group_size=GROUP_SIZE)
SIZES = {"4KB": 4096, "32KB": 32768}  # bytes of one trajectory
COUNTS = {"4KB": (240, 1500), "32KB": (120, 240)}  # groups of one run: (every write on disk, in memory)


def make_ticket(ticket_id: str) -> Ticket:
    """A ticket of GROUP_SIZE trajectories."""
    task = Task("arithmetic", "train", 2, 11)
    return Ticket(ticket_id, task, GROUP_SIZE, 0, 4, 8, temperature=1.0, seed=17, issued_at=1.7e9)


def make_group(ticket: Ticket, trajectory_bytes: int) -> Group:
    """A group of random tokens; two thirds of them sampled."""
    rng = np.random.default_rng(0)
    length = trajectory_bytes // BYTES_PER_TOKEN
    members = []
    for _ in range(GROUP_SIZE):
        mask_T = (np.arange(length) % 3 > 0).astype(np.uint8)
        members.append(
            Trajectory(
                tokens=rng.integers(0, VOCAB, length, dtype=np.int32),
                loss_mask=mask_T,
                behaviour_logprobs=np.where(mask_T, -rng.random(length), 0).astype(np.float32),
                policy_versions=np.where(mask_T, 5, -1).astype(np.int32),
                reward=float(rng.random()),
                reward_parts=rng.random(4, np.float32),
                success=True,
                finish_reason=FinishReason.ANSWERED,
                num_turns=2,
                sampling_started_at=1.7e9,
                sampling_ended_at=1.7e9 + 1,
            )
        )
    return Group(ticket, tuple(members), "actor-0")


def batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    """Consecutive slices of at most `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))


@dataclasses.dataclass(frozen=True)
class Run:
    """One measured run: its own keys, `count` groups in batches."""

    config: RedisConfig
    password: str
    trajectory_bytes: int
    count: int
    batch: int
    ours: bool


def write_ours(run: Run, client: redis.Redis) -> Iterator[None]:
    """Issues and claims tickets; after the first `next`, submits a group for each."""
    keys = Keys(run.config.namespace)
    Control(client, keys).ensure_epoch()
    ledger = Ledger(client, keys)
    ledger.issue([make_ticket(ticket_id) for ticket_id in ledger.next_ticket_ids(run.count)])
    deliveries = []
    tasks = TaskStream(client, keys, "actor-0", run.config)
    while len(deliveries) < run.count:
        deliveries += tasks.claim(100, 1000)
    model = make_group(deliveries[0].ticket, run.trajectory_bytes)
    groups = [(delivery, dataclasses.replace(model, ticket=delivery.ticket)) for delivery in deliveries]
    writer = GroupWriter(client, keys, run.config, LIMITS)
    with ThreadPoolExecutor(WRITING_THREADS) as threads:
        yield
        assert all(map(all, threads.map(writer.submit_many, batches(groups, run.batch))))


def read_ours(run: Run, client: redis.Redis) -> Iterator[None]:
    """Reads, decodes and settles `count` groups."""
    reader = GroupReader(client, Keys(run.config.namespace), "learner-0", run.config)
    reader.read(1, 0)
    yield
    seen = 0
    while seen < run.count:
        entries = reader.read(run.batch, 1000)
        for entry in entries:
            assert len(entry.decode(LIMITS).trajectories) == GROUP_SIZE
        seen += reader.complete([(entry, entry.ticket.ticket_id) for entry in entries], Outcome.TRAINED, 1)


def write_raw(run: Run, client: redis.Redis) -> Iterator[None]:
    """Adds `count` entries that hold an encoded group."""
    data = encode_group(make_group(make_ticket("1-1"), run.trajectory_bytes), LIMITS)
    stream = f"{run.config.namespace}:raw"
    yield
    for batch in batches([data] * run.count, run.batch):
        with client.pipeline(transaction=False) as pipe:
            for payload in batch:
                pipe.xadd(stream, {"payload": payload})
            pipe.execute()


def read_raw(run: Run, client: redis.Redis) -> Iterator[None]:
    """Reads, acknowledges and deletes `count` entries."""
    stream = f"{run.config.namespace}:raw"
    client.xgroup_create(stream, "readers", id="0", mkstream=True)
    yield
    seen = 0
    while seen < run.count:
        answer: Any = client.xreadgroup("readers", "reader", {stream: ">"}, count=run.batch, block=1000)
        ids = [entry_id for _, entries in answer or [] for entry_id, _ in entries]
        if ids:
            with client.pipeline(transaction=False) as pipe:
                pipe.xack(stream, "readers", *ids)
                pipe.xdel(stream, *ids)
                pipe.execute()
        seen += len(ids)


SIDES = {(True, "write"): write_ours, (True, "read"): read_ours, (False, "write"): write_raw, (False, "read"): read_raw}


def work(side: str, pipe: Connection) -> None:
    """A worker process: prepares each run it is sent, waits for the start, runs it."""
    while (run := pipe.recv()) is not None:
        if run.ours:
            client = connect(run.config, run.password)
        else:
            client = redis.Redis.from_url(run.config.url, password=run.password)  # as it comes
        steps = SIDES[run.ours, side](run, client)
        next(steps)
        pipe.send("ready")
        pipe.recv()
        next(steps, None)
        pipe.send("done")
        client.close()


def measure(run: Run, workers: dict[str, Connection]) -> float:
    """Seconds from the first write to the last group settled."""
    for side in ("write", "read"):
        workers[side].send(run)
        workers[side].recv()
    started = time.perf_counter()
    for pipe in workers.values():
        pipe.send("start")
    for pipe in workers.values():
        pipe.recv()
    return time.perf_counter() - started


def ratio(base: RedisConfig, password: str, workers: dict[str, Connection], name: str, count: int, **how: int) -> Any:
    """(ratio to raw, groups/s, raw groups/s) for one size; medians of runs that take turns."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for repeat, ours in itertools.product(range(how["repeats"] + 1), (True, False)):  # the first warms up
        config = dataclasses.replace(base, namespace=uuid.uuid4().hex)
        spent = measure(Run(config, password, SIZES[name], count, how["batch"], ours), workers)
        if repeat:
            seconds[ours].append(spent)
        with connect(base, password) as client:
            client.flushall()
    medians = {ours: statistics.median(spent) for ours, spent in seconds.items()}
    return round(medians[False] / medians[True], 3), round(count / medians[True], 1), round(count / medians[False], 1)


def main(options: argparse.Namespace) -> None:
    """Prints groups/s of both and the ratios, by size."""
    context = multiprocessing.get_context("spawn")
    ends = {side: context.Pipe() for side in ("write", "read")}
    processes = [context.Process(target=work, args=(side, ends[side][1]), daemon=True) for side in ends]
    for process in processes:
        process.start()
    workers = {side: here for side, (here, _) in ends.items()}
    result: dict[str, Any] = {"batch": options.batch}
    with tempfile.TemporaryDirectory() as temporary:
        server = start_server(temporary, RedisConfig(server=options.redis_server))
        base = RedisConfig(url=server.url)
        result["redis"] = server.version
        for column, suffix in enumerate(("", "_in_memory")):
            if suffix:
                with connect(base, server.password) as client:
                    client.config_set("appendonly", "no")
            figures = {
                name: ratio(
                    base, server.password, workers, name, counts[column], batch=options.batch, repeats=options.repeats
                )
                for name, counts in COUNTS.items()
            }
            for at, what in enumerate(("ratio_to_raw", "groups_per_s", "raw_groups_per_s")):
                result[what + suffix] = {name: figure[at] for name, figure in figures.items()}
        for pipe in workers.values():
            pipe.send(None)
        for process in processes:
            process.join()
        server.stop()
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis_server", default="auto", choices=("auto", "system", "wheel"))
    parser.add_argument("--batch", type=int, default=8, help="groups in one round trip, for both")
    parser.add_argument("--repeats", type=int, default=5)
    main(parser.parse_args())
