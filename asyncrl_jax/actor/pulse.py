"""The actor's pulse: heartbeats, metrics, and the hold on its tickets."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from typing import Any

from asyncrl_jax.actor.engines.base import Engine, EngineCounters
from asyncrl_jax.actor.evaluator import Evaluator
from asyncrl_jax.actor.loop_watch import LoopWatch
from asyncrl_jax.actor.refresh import Refresher
from asyncrl_jax.actor.sampler import Sampler
from asyncrl_jax.actor.services import Services
from asyncrl_jax.actor.tally import Tally, WatchedEngine
from asyncrl_jax.config import ActorConfig
from asyncrl_jax.observe.metrics import Metrics
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.steering import ActorOrder, Steering

log = logging.getLogger(__name__)


class Pulse:
    """Once every `heartbeat_s`: tells the run how this host is and what it saw, holds its tickets, hears its orders.

    Invariant: it beats only while the event loop turns, so an actor that hangs is seen to be dead.
    """

    def __init__(
        self,
        actor_id: str,
        config: ActorConfig,
        control: Control,
        metrics: Metrics,
        engine: Engine,
        evaluation_engine: Engine,
        refresher: Refresher,
        sampler: Sampler,
        evaluator: Evaluator,
        steering: Steering,
        tally: Tally,
        watched: WatchedEngine,
        loop_watch: LoopWatch,
        services: Services,
    ) -> None:
        self._actor_id = actor_id
        self._config = config
        self._control = control
        self._metrics = metrics
        self._engine = engine
        self._evaluation_engine = evaluation_engine
        self._refresher = refresher
        self._sampler = sampler
        self._evaluator = evaluator
        self._steering = steering
        self._tally = tally
        self._watched = watched
        self._loop_watch = loop_watch
        self._services = services
        self._before = (time.monotonic(), EngineCounters(), 0.0)

    async def run(self) -> None:
        """Beats for as long as it is not cancelled."""
        while True:
            values = self._values()
            await asyncio.to_thread(
                self._control.beat, "actor", self._actor_id, values, self._config.heartbeat_timeout_s
            )
            if self._refresher.version is not None:
                self._metrics.write(self._refresher.version.update, values)
            await self._sampler.keep_alive()
            await self._exchange()
            await asyncio.sleep(self._config.heartbeat_s)

    async def _exchange(self) -> None:
        """Tells what was seen, and takes up what is ordered."""
        record = self._tally.take()
        if record is not None:
            await asyncio.to_thread(self._steering.observe, record)
        directives = await asyncio.to_thread(self._steering.directives)
        self._sampler.steps_held_out = directives.steps_held_out
        order = directives.actors.get(self._actor_id, ActorOrder())
        if order != self._sampler.order:
            log.warning("ordered: %s", order)
            self._sampler.order = order
            self._evaluator.draining = order.drain
        if self._sampler.tickets:
            self._sampler.cut(await asyncio.to_thread(self._steering.cut_among, self._sampler.tickets))

    def _values(self) -> dict[str, Any]:
        """The state of the host; rates are since the last beat, counts since the process started."""
        (then, before, computed_before), counters = self._before, dataclasses.replace(self._engine.counters)
        computed = counters.compute_s + self._evaluation_engine.counters.compute_s  # the host's accelerator has both
        now = time.monotonic()
        self._before = (now, counters, computed)
        seconds = max(now - then, 1e-9)
        slot_steps = max((counters.num_steps - before.num_steps) * self._engine.num_slots, 1)
        version, paused_since = self._refresher.version, self._refresher.paused_since
        groups = self._sampler.counters
        return {
            "version": None if version is None else version.number,
            "update": None if version is None else version.update,
            "tokens_per_s": (counters.num_sampled_tokens - before.num_sampled_tokens) / seconds,
            "steps_per_s": (counters.num_steps - before.num_steps) / seconds,
            "busy": (counters.num_fed_tokens - before.num_fed_tokens) / slot_steps,
            "accelerator_busy": min((computed - computed_before) / seconds, 1.0),
            "slots": self._engine.num_slots,
            "slots_busy": self._watched.take_slots_busy(),
            "running": self._sampler.num_episodes,
            "evaluating": self._evaluator.num_running,
            "generating": self._watched.num_generating,
            "drained": self._sampler.drained,
            "paused_s": 0.0 if paused_since is None else time.time() - paused_since,
            "tokens_sampled": counters.num_sampled_tokens,
            "weights_loaded": counters.num_loads,
            "swap_share": (counters.swap_s - before.swap_s) / seconds,  # of the time
            "proof_share": (counters.proof_s - before.proof_s) / seconds,
            "weights_refused": self._refresher.num_refused,
            **vars(groups),
            **self._loop_watch.values(),
            **self._services.values(),
        }
