"""Many episodes whose environment is slow, on one actor host: are its slots busy, and its event loop free?

    python -m benchmarks.episodes [--episodes 1000] [--slots 64] [--seconds 30]

The real actor process (`asyncrl-actor`) with the built-in engine and the default model, a real Redis and real tickets.
An episode has four turns of 16 tokens. Three parts: as many episodes as slots with an environment that answers at
once, which gives the engine's time for a turn; then `--episodes` at a time with a delay per turn that is lognormal, its
median five times that and its 99th percentile ten times the median; and the same with the host's own choice of how many
episodes it plays (`own_choice`). One JSON line last:

    slots_busy        mean share of the slots that hold a session which wants tokens: for a prompt or a decode step
    rows_busy         rows of the decode steps that fed a token, by the engine's own count; the rest had ended, or
                      waited for a prompt
    demand            sessions that wanted tokens (sampling or waiting for a slot), mean, as a multiple of the slots
    tokens_to_no_delay  sampled tokens per second against the first part: what feeding sequences anew costs
    loop_lag_p99_ms   of the actor's event loop
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl_jax.config import Config, override
from asyncrl_jax.config_file import write_config
from asyncrl_jax.learner.convert import publish_weights
from asyncrl_jax.local.environment import PASSWORD_VARIABLE, child_environment
from asyncrl_jax.models import init_params
from asyncrl_jax.transport.codec import Limits
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.groups import GroupReader
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.server import Server, start_server
from asyncrl_jax.types import Group, LearnerState, Task, Ticket
from benchmarks._slow_environment import MEDIAN_VARIABLE, SLOW

GROUP_SIZE = 4
DELAY_TURNS = 5.0  # median delay, in turns of the engine
START_LIMIT_S = 120.0
SETTLE_S = 10.0  # from the first groups to the steady state
BUSY, LAG_MS = 0.9, 100.0  # the targets
_QUEUED_TICKETS = 200  # beyond those being played


class Host:
    """An actor process and everything around it: Redis, one version of weights, tickets without end."""

    def __init__(
        self, directory: Path, server: Server, slots: int, episodes: int, queue_share: float, delay_s: float
    ) -> None:
        self.directory = directory
        self._issued, self._taken, self._wanted = 0, 0, episodes // GROUP_SIZE + _QUEUED_TICKETS
        self._config = override(
            Config(),
            {
                "run_dir": str(directory),
                "redis.url": server.url,
                "redis.namespace": directory.name,
                "environment.name": SLOW.name,
                "environment.level_weights": (1.0,),
                "environment.demonstrated_levels": (1,),
                "environment.turn_tokens": 16,
                "environment.max_tokens": 192,
                "environment.call_timeout_s": 3600.0,
                "model.max_positions": 192,
                "model.vocab_size": 258,
                "learner.pack_tokens": 192,
                "learner.group_size": GROUP_SIZE,
                "warm_start.num_steps": 0,
                "actor.num_hosts": 1,
                "actor.slots": slots,
                "actor.episodes": episodes if episodes > slots else 0,
                "actor.queue_share": queue_share,
            },
        )
        client, keys = connect(self._config.redis, server.password), Keys(self._config.redis.namespace)
        self._control, self._ledger = Control(client, keys), Ledger(client, keys)
        self._control.ensure_epoch()
        self._reader = GroupReader(client, keys, "learner", self._config.redis)
        self._control.announce(
            publish_weights(directory / "weights", self._config.model, init_params(self._config.model, 0))
        )
        self._control.set_learner(LearnerState(line=0, update=0, version=0, phase="training"))
        write_config(directory / "config.json", self._config)
        self._environment = child_environment(os.environ) | {
            PASSWORD_VARIABLE: server.password or "",
            MEDIAN_VARIABLE: repr(delay_s),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """The actor, from start to end."""
        command = [sys.executable, "-m", "asyncrl_jax.launchers.actor", "--actor_id=actor-0"]
        with (self.directory / "actor.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, f"--config_file={self.directory / 'config.json'}"], env=self._environment, stderr=log
            )
            try:
                yield
                if process.poll() is not None:
                    raise RuntimeError(f"the actor ended: {(self.directory / 'actor.log').read_text()[-2000:]}")
            finally:
                process.terminate()
                process.wait(30)

    def serve(self) -> list[Group]:
        """Keeps tickets there to claim, and takes the groups that came."""
        if self._issued - self._taken < self._wanted:
            ids = self._ledger.next_ticket_ids(_QUEUED_TICKETS)
            self._ledger.issue([self._ticket(ticket_id, self._issued + i) for i, ticket_id in enumerate(ids)])
            self._issued += len(ids)
        limits = Limits.from_config(self._config)
        groups = [entry.decode(limits) for entry in self._reader.read(64, 200)]
        self._taken += len(groups)
        return groups

    def _ticket(self, ticket_id: str, index: int) -> Ticket:
        task = Task(SLOW.name, "train", 1, index)
        return Ticket(ticket_id, task, GROUP_SIZE, 0, 0, 10**6, temperature=1.0, seed=index, issued_at=time.time())

    def beat(self) -> dict[str, Any]:
        """The actor's last heartbeat, empty before the first."""
        return self._control.heartbeats().get(("actor", "actor-0"), {})


def turn_seconds(groups: list[Group]) -> float:
    """Mean time of a turn, in s."""
    members = [member for group in groups for member in group.trajectories]
    seconds = sum(member.sampling_ended_at - member.sampling_started_at for member in members)
    return seconds / sum(member.num_turns for member in members)


def observe(host: Host, seconds: float) -> tuple[list[dict[str, Any]], list[Group]]:
    """(the actor's heartbeats of so many seconds, the groups that came in them)."""
    beats: list[dict[str, Any]] = []
    groups: list[Group] = []
    since = time.monotonic()
    while time.monotonic() - since < seconds:
        groups += host.serve()
        beat = host.beat()
        if not beats or beat != beats[-1]:
            beats.append(beat)
    return beats[1:], groups  # the first one tells of the time before


def until(host: Host, reached: Callable[[dict[str, Any]], bool]) -> None:
    """Serves the actor until its heartbeat is as wanted and groups come.

    Raises:
      RuntimeError: if that takes too long.
    """
    deadline = time.monotonic() + START_LIMIT_S
    groups: list[Group] = []
    while not groups or not reached(host.beat()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not in {START_LIMIT_S:g} s; the last heartbeat is {host.beat()}")
        groups += host.serve()


def mean(beats: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of a value over heartbeats."""
    return statistics.mean(beat[name] for beat in beats)


def phase(root: Path, name: str, server: Server, given: argparse.Namespace, **kwargs: Any) -> tuple[Any, Any]:
    """(heartbeats, groups) of one part of the benchmark, in its steady state."""
    (root / name).mkdir()
    host = Host(root / name, server, given.slots, **kwargs)
    everything = kwargs["episodes"] - GROUP_SIZE
    with host.running():
        # A host that decides for itself how many episodes it plays is given time to.
        until(host, lambda beat: beat.get("running", 0) >= (everything if kwargs["queue_share"] >= 1 else 1))
        observe(host, SETTLE_S)
        return observe(host, given.seconds)


def main() -> None:
    """Prints the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        server = start_server(root / "redis", Config().redis)
        try:
            quick, groups = phase(root, "quick", server, given, episodes=given.slots, queue_share=1.0, delay_s=0.0)
            turn_s, without_delay = turn_seconds(groups), mean(quick, "tokens_per_s")
            print(f"a turn takes {turn_s:.3f} s; {without_delay:.0f} tokens/s without delay", flush=True)
            slow = {"episodes": given.episodes, "delay_s": DELAY_TURNS * turn_s}
            beats, _ = phase(root, "all", server, given, **slow, queue_share=given.episodes / given.slots)
            own, _ = phase(root, "own", server, given, **slow, queue_share=0.25)
        finally:
            server.stop()
    result = {
        "episodes": round(mean(beats, "running")),
        "slots": given.slots,
        "turn_s": round(turn_s, 4),
        "delay_median_s": round(DELAY_TURNS * turn_s, 3),
        **figures(beats, given.slots, without_delay),
        "own_choice": {"episodes": round(mean(own, "running")), **figures(own, given.slots, without_delay)},
    }
    result["holds"] = bool(result["slots_busy"] >= BUSY and result["loop_lag_p99_ms"] <= LAG_MS)
    print(json.dumps(result))


def figures(beats: Sequence[Mapping[str, Any]], slots: int, without_delay: float) -> dict[str, float]:
    """What the module's docstring lists."""
    return {
        "slots_busy": round(mean(beats, "slots_busy"), 4),
        "rows_busy": round(mean(beats, "busy"), 4),
        "demand": round(mean(beats, "generating") / slots, 2),
        "tokens_to_no_delay": round(mean(beats, "tokens_per_s") / without_delay, 3),
        "loop_lag_p99_ms": round(1000 * max(beat["loop_lag_p99_s"] for beat in beats), 1),
        "loop_lag_worst_ms": round(1000 * max(beat["loop_lag_s"] for beat in beats), 1),
    }


if __name__ == "__main__":
    main()
