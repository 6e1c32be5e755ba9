"""An actor host: everything it does at once, on one event loop beside the engine.

    part         waits for                                 unblocked by
    engine       a session that wants tokens; fresh        sampler, evaluator; refresher
    refresher    a newer version (polls)                   the learner's announcement
    sampler      processes of environments (once);         their start
                 free slots; a ticket; weights as new      episodes that end; the orchestrator;
                 as the ticket asks                        the refresher
    evaluator    a request (polls)                         the orchestrator
    pulse        the next heartbeat                        time
    loop watch   the next look at the loop's lag           time
    watch        the end of the run (polls); SIGTERM       the orchestrator; the launcher

Calls that may block (Redis, reading weights, proving them) run on threads, so no part holds up another. The first part
to end ends the process: `watch` in peace, any other with its traceback. Tickets under way are then given back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from asyncrl_jax.actor.concurrency import Concurrency
from asyncrl_jax.actor.engines.base import Engine
from asyncrl_jax.actor.engines.registry import check_installed, make_engine
from asyncrl_jax.actor.envs.registry import make_environments
from asyncrl_jax.actor.episode import EpisodeConfig
from asyncrl_jax.actor.evaluator import Evaluator
from asyncrl_jax.actor.exploration import Explorer
from asyncrl_jax.actor.loop_watch import LoopWatch
from asyncrl_jax.actor.process_rewards.registry import make_process_scorer
from asyncrl_jax.actor.pulse import Pulse
from asyncrl_jax.actor.refresh import Loader, Refresher
from asyncrl_jax.actor.sampler import Sampler
from asyncrl_jax.actor.services import Services
from asyncrl_jax.actor.tally import Tally, WatchedEngine
from asyncrl_jax.config import Config
from asyncrl_jax.exit_codes import Mistake, Unreachable
from asyncrl_jax.observe.metrics import Metrics
from asyncrl_jax.transport.codec import Limits
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.groups import GroupWriter
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.payloads import PayloadStore
from asyncrl_jax.transport.steering import Steering
from asyncrl_jax.transport.tasks import TaskStream

log = logging.getLogger(__name__)

_WATCH_S = 0.2  # between looks for the end of the run


def run_actor(config: Config, run_dir: Path, redis_password: str | None, actor_id: str, stop: threading.Event) -> int:
    """Samples until the run is over or `stop` is set.

    Args:
      config: of the run; the settings of this host's class apply.
      run_dir: where weights (unless the config says otherwise) and metrics are.
      redis_password: of the queue, None without one.
      actor_id: stable name of this host, its own among all actors.
      stop: set to end the process cleanly.

    Returns:
      The process's exit status.

    Raises:
      Mistake: if environment, engine or process reward model can't be had here, or do not fit the model.
      Unreachable: if a server that one of them needs is not there.
      RedisUnavailable: if Redis stays away longer than `redis.outage_s`.
      WeightsRefused: if version after version fails its proof.
    """
    try:
        host = _Host(config.as_seen_by(actor_id), run_dir, redis_password, actor_id)
    except Unreachable:
        raise
    except ValueError as error:
        raise Mistake(str(error)) from error
    try:
        asyncio.run(host.run(stop))
    finally:
        host.metrics.close()
    return 0


class _Host:
    """What the parts of one actor share, and the parts made of it."""

    def __init__(self, config: Config, run_dir: Path, redis_password: str | None, actor_id: str):
        self._config, self._actor_id = config, actor_id
        self._services = Services(config.environment)
        check_installed(config)
        self._environments = make_environments(config, self._services)
        self._redis, self._keys = connect(config.redis, redis_password), Keys(config.redis.namespace)
        self._control = Control(self._redis, self._keys)
        self._weights = config.weights.directory or str(run_dir / "weights")
        self._payloads = PayloadStore(config.redis.payload_directory or run_dir / "payloads")
        process = make_process_scorer(config, self._environments.text)
        if process is not None:
            self._services.closes(process.close)
        self._episodes = EpisodeConfig(config.environment, config.reward, process)
        self.metrics = Metrics(run_dir, actor_id, config.observe)

    async def run(self, stop: threading.Event) -> None:
        """Plays until the run is over or `stop` is set, and closes what environments and scorers hold."""
        try:
            with LoopWatch() as loop_watch:
                await self._play(loop_watch, stop)
        finally:
            await self._services.close()

    async def _play(self, loop_watch: LoopWatch, stop: threading.Event) -> None:
        config = self._config
        engine = make_engine(config, num_sessions=config.actor.episodes)
        evaluation_engine = make_engine(config, number=1)
        refresher = Refresher(
            engine,
            self._loader(engine, self._actor_id),
            self._control,
            poll_interval_s=config.weights.poll_interval_s,
            max_behind=config.effective_lag.actor_updates,
        )
        tally = Tally(self._actor_id, self._environments.name, self._services.tool_outcomes)
        watched = WatchedEngine(engine)
        sampler = self._sampler(watched, evaluation_engine, refresher, tally)
        evaluator = self._evaluator(evaluation_engine)
        pulse = Pulse(
            self._actor_id,
            config.actor,
            self._control,
            self.metrics,
            engine,
            evaluation_engine,
            refresher,
            sampler,
            evaluator,
            Steering(self._redis, self._keys),
            tally,
            watched,
            loop_watch,
            self._services,
        )
        ready = asyncio.create_task(self._services.start(), name="start of environments")
        await _first_to_end(
            {
                "engine": engine.run(),
                "evaluation engine": evaluation_engine.run(),
                "refresher": refresher.run(),
                "sampler": _once(ready, sampler.run()),
                "evaluator": _once(ready, evaluator.run()),
                "pulse": pulse.run(),
                "loop watch": loop_watch.run(),
                "watch": _watch(self._control, stop),
            }
        )

    def _loader(self, engine: Engine, holder: str) -> Loader:
        return Loader(engine, self._control, self._weights, holder, self._config.weights)

    def _sampler(self, watched: WatchedEngine, other: Engine, refresher: Refresher, tally: Tally) -> Sampler:
        """Samples with the watched engine, and explores with the other one."""
        config = self._config
        return Sampler(
            watched,
            Explorer(config.actor.exploration, watched, other, config.model.vocab_size),
            refresher,
            TaskStream(self._redis, self._keys, self._actor_id, config.redis),
            GroupWriter(self._redis, self._keys, config.redis, Limits.from_config(config), self._payloads),
            self._environments,
            self._episodes,
            actor_id=self._actor_id,
            concurrency=Concurrency(
                config.actor.slots,
                config.actor.episodes,
                queue_share=config.actor.queue_share,
                kv_tokens=config.actor.kv_tokens,
            ),
            group_size=config.learner.group_size,
            max_attempts=config.actor.max_attempts,
            tally=tally,
        )

    def _evaluator(self, engine: Engine) -> Evaluator:
        return Evaluator(
            engine,
            self._loader(engine, f"{self._actor_id}/evaluation"),
            self._control,
            self._environments,
            dataclasses.replace(self._episodes, process=None),  # an evaluation depends on no other model
            holder=self._actor_id,
            temperature=self._config.actor.temperature,
            max_attempts=self._config.actor.max_attempts,
        )


async def _first_to_end(parts: dict[str, Coroutine[Any, Any, None]]) -> None:
    """Runs all parts until one ends, then cancels the others and waits for them.

    Raises:
      Exception: whatever ended the first part to end.
    """
    tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in done:
        log.info("%s ended", task.get_name())
        task.result()


async def _once(ready: asyncio.Task[None], part: Coroutine[Any, Any, None]) -> None:
    """Runs a part from when `ready` has ended."""
    try:
        await asyncio.shield(ready)
    except BaseException:  # a cancellation among them
        part.close()
        ready.cancel()
        raise
    await part


async def _watch(control: Control, stop: threading.Event) -> None:
    """Returns when the run is over or `stop` is set."""
    while not stop.is_set():
        if await asyncio.to_thread(control.phase) in ("finished", "stopping"):
            return
        await asyncio.sleep(_WATCH_S)
