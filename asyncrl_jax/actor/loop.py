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
from asyncrl_jax.actor.engines.registry import make_engine
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
      ValueError: if environment and model do not fit.
      RedisUnavailable: if Redis stays away longer than `redis.outage_s`.
      WeightsRefused: if version after version fails its proof.
    """
    config = config.as_seen_by(actor_id)
    services = Services(config.environment)
    environments = make_environments(config, services)
    redis, keys = connect(config.redis, redis_password), Keys(config.redis.namespace)
    control = Control(redis, keys)
    directory = config.weights.directory or str(run_dir / "weights")
    payloads = PayloadStore(config.redis.payload_directory or run_dir / "payloads")
    process = make_process_scorer(config, environments.text)
    if process is not None:
        services.closes(process.close)
    episodes = EpisodeConfig(config.environment, config.reward, process)
    metrics = Metrics(run_dir, actor_id, config.observe)

    async def run() -> None:
        try:
            with LoopWatch() as loop_watch:
                await play(loop_watch)
        finally:
            await services.close()

    async def play(loop_watch: LoopWatch) -> None:
        engine = make_engine(config, num_sessions=config.actor.episodes)
        evaluation_engine = make_engine(config, number=1)
        refresher = Refresher(
            engine,
            Loader(engine, control, directory, actor_id, config.weights),
            control,
            poll_interval_s=config.weights.poll_interval_s,
            max_behind=config.effective_lag.actor_updates,
        )
        tally, watched = Tally(actor_id), WatchedEngine(engine)
        sampler = Sampler(
            watched,
            Explorer(config.actor.exploration, watched, evaluation_engine, config.model.vocab_size),
            refresher,
            TaskStream(redis, keys, actor_id, config.redis),
            GroupWriter(redis, keys, config.redis, Limits.from_config(config), payloads),
            environments,
            episodes,
            actor_id=actor_id,
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
        evaluator = Evaluator(
            evaluation_engine,
            Loader(evaluation_engine, control, directory, f"{actor_id}/evaluation", config.weights),
            control,
            environments,
            dataclasses.replace(episodes, process=None),  # an evaluation depends on no other model
            holder=actor_id,
            temperature=config.actor.temperature,
            max_attempts=config.actor.max_attempts,
        )
        pulse = Pulse(
            actor_id,
            config.actor,
            control,
            metrics,
            engine,
            evaluation_engine,
            refresher,
            sampler,
            evaluator,
            Steering(redis, keys),
            tally,
            watched,
            loop_watch,
            services,
        )
        ready = asyncio.create_task(services.start(), name="start of environments")
        await _first_to_end(
            {
                "engine": engine.run(),
                "evaluation engine": evaluation_engine.run(),
                "refresher": refresher.run(),
                "sampler": _once(ready, sampler.run()),
                "evaluator": _once(ready, evaluator.run()),
                "pulse": pulse.run(),
                "loop watch": loop_watch.run(),
                "watch": _watch(control, stop),
            }
        )

    try:
        asyncio.run(run())
    finally:
        metrics.close()
    return 0


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
