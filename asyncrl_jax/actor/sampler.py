"""Turns tickets into groups: claims as slots free up, plays all members of a group, submits one message a group."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import time
from collections.abc import Collection
from typing import Any

from asyncrl_jax.actor.concurrency import Concurrency
from asyncrl_jax.actor.envs.base import EnvironmentMaker
from asyncrl_jax.actor.envs.isolated import EnvironmentDied
from asyncrl_jax.actor.episode import EpisodeConfig, EpisodeFailed, run_episode
from asyncrl_jax.actor.exploration import Explorer
from asyncrl_jax.actor.refresh import Refresher
from asyncrl_jax.actor.rewards import without_lone_steps, without_steps
from asyncrl_jax.actor.tally import Tally, WatchedEngine
from asyncrl_jax.seeds import member_seed
from asyncrl_jax.transport.codec import InvalidGroup
from asyncrl_jax.transport.groups import GroupWriter
from asyncrl_jax.transport.steering import ActorOrder
from asyncrl_jax.transport.tasks import Delivery, TaskStream
from asyncrl_jax.types import Group, Ticket, Trajectory

log = logging.getLogger(__name__)

_CLAIM_BLOCK_MS = 100
_ORDERED_S = 0.1  # between looks while the orchestrator lets nothing be claimed
_FULL_S = 0.1  # between looks at a full host, whose demand falls when environments are slow
_LEAST_MEMBERS = 2  # of a partial group: advantages compare members
RETRY_SHARE = 0.2  # of the episodes that may be tried again, beside `RETRY_BURST` at once
RETRY_BURST = 32.0
MAX_LOST = 10  # times that an episode is played again because another one's environment took its process with it


@dataclasses.dataclass
class SamplerCounters:
    """What became of the tickets and episodes of this process."""

    groups_submitted: int = 0
    groups_wasted: int = 0  # came after their ticket was settled, or queued by someone else
    tickets_failed: int = 0
    tickets_cancelled: int = 0  # settled or claimed by someone else while they were being sampled
    groups_partial: int = 0  # submitted without members that came too late
    episodes_lost: int = 0  # to another episode's environment; played again, and no fault of their own
    retries_refused: int = 0  # the budget for second attempts was used up
    episodes_failed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # by stage


class Sampler:
    """Plays the members of several groups at once, as many episodes as keep the engine's slots busy.

    Invariants:
      * No token of a ticket is sampled with weights of fewer updates than its `min_update`.
      * A fault of an environment costs its episode; an episode that fails again and again its ticket; nothing more.
      * A ticket that was settled meanwhile stops costing slots at the next `keep_alive`.
    """

    def __init__(
        self,
        engine: WatchedEngine,
        explorer: Explorer,
        refresher: Refresher,
        tasks: TaskStream,
        writer: GroupWriter,
        environments: EnvironmentMaker,
        config: EpisodeConfig,
        *,
        actor_id: str,
        concurrency: Concurrency,
        group_size: int,
        max_attempts: int,
        tally: Tally,
    ) -> None:
        """Args: group_size: expected, to claim no more than there is room for; each ticket states its own."""
        self.counters = SamplerCounters()
        self.order = ActorOrder()  # of the orchestrator, as of the last heartbeat
        self.steps_held_out: Collection[str] = ()  # buckets, as of the same
        self._tally = tally
        self._retries = RETRY_BURST  # that may be made now
        self._cut: dict[str, asyncio.Event] = {}  # set when the members under way are no longer waited for
        self._engine = engine
        self._explorer = explorer
        self._refresher = refresher
        self._tasks = tasks
        self._writer = writer
        self._environments = environments
        self._config = config
        self._actor_id = actor_id
        self._concurrency = concurrency
        self._group_size = group_size
        self._max_attempts = max_attempts
        self._room = asyncio.Event()
        self._playing: dict[str, tuple[Delivery, asyncio.Task[None]]] = {}  # by ticket id
        self._unfinished: collections.Counter[str] = collections.Counter()  # members by ticket id

    @property
    def num_episodes(self) -> int:
        """Episodes running, or waiting for a slot or for weights."""
        return self._unfinished.total()

    async def run(self) -> None:
        """Claims and plays for as long as it is not cancelled; then gives back what it holds."""
        await self._refresher.until_loaded()
        try:
            async with asyncio.TaskGroup() as serving:
                while True:
                    free = self._free()
                    if free <= 0:
                        await self._until_room()
                        continue
                    if self.order.pause or self.order.drain or (self.order.probe and self._playing):
                        await asyncio.sleep(_ORDERED_S)
                        continue
                    count = 1 if self.order.probe else max(1, free // self._group_size)
                    for delivery in await asyncio.to_thread(self._tasks.claim, count, _CLAIM_BLOCK_MS):
                        self._unfinished[delivery.ticket.ticket_id] = delivery.ticket.group_size
                        task = serving.create_task(self._serve(delivery), name=f"ticket {delivery.ticket.ticket_id}")
                        self._playing[delivery.ticket.ticket_id] = (delivery, task)
        finally:
            held = [delivery for delivery, _ in self._playing.values()]
            self._playing.clear()
            await asyncio.to_thread(lambda: [self._tasks.release(delivery) for delivery in held])

    @property
    def drained(self) -> bool:
        """Whether it was told to drain and nothing is left."""
        return self.order.drain and not self._playing

    @property
    def tickets(self) -> list[str]:
        """Ids of the tickets being played."""
        return list(self._playing)

    def cut(self, ticket_ids: Collection[str]) -> None:
        """Waits no longer for members of these tickets: what is there is submitted as a partial group."""
        for ticket_id in ticket_ids:
            if ticket_id in self._cut:
                self._cut[ticket_id].set()

    async def keep_alive(self) -> None:
        """Holds the tickets being played, and cancels those that are no longer this host's."""
        deliveries = [delivery for delivery, _ in self._playing.values()]
        held = {d.ticket.ticket_id for d in await asyncio.to_thread(self._tasks.keep_alive, deliveries)}
        for delivery in deliveries:
            ticket_id = delivery.ticket.ticket_id
            if ticket_id not in held and ticket_id in self._playing:  # not submitted meanwhile
                self.counters.tickets_cancelled += 1
                log.info("ticket %s was settled or claimed by someone else: cancelled", ticket_id)
                self._playing.pop(ticket_id)[1].cancel()

    def _free(self) -> int:
        """Episodes that may start now."""
        engine = self._engine
        return self._concurrency.room(
            time.monotonic(), self.num_episodes, engine.num_generating, engine.num_generating_tokens
        )

    async def _until_room(self) -> None:
        """Waits until an episode ends, or a moment."""
        self._room.clear()
        try:
            async with asyncio.timeout(_FULL_S):
                await self._room.wait()
        except TimeoutError:
            return

    async def _serve(self, delivery: Delivery) -> None:
        ticket = delivery.ticket
        try:
            await self._refresher.until_serves(ticket)
            trajectories = self._rewarded(ticket, await self._play(ticket))
            self._playing.pop(ticket.ticket_id)
            partial = len(trajectories) < ticket.group_size
            group = Group(ticket=ticket, trajectories=trajectories, actor_id=self._actor_id, partial=partial)
            self.counters.groups_partial += partial
            if await asyncio.to_thread(self._writer.submit, delivery, group):
                self.counters.groups_submitted += 1
            else:
                self.counters.groups_wasted += 1
        except (EpisodeFailed, InvalidGroup) as error:
            self._playing.pop(ticket.ticket_id, None)
            self.counters.tickets_failed += 1
            if isinstance(error, InvalidGroup):
                self._tally.own_fault(error)
            log.error("ticket %s failed: %s", ticket.ticket_id, error)
            await asyncio.to_thread(self._tasks.fail, delivery, str(error))
        finally:
            del self._unfinished[ticket.ticket_id]
            self._room.set()

    def _rewarded(self, ticket: Ticket, members: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        """The members with what counts of their scored steps. Counted as scored, also where that is held out."""
        members = without_lone_steps(members, self._config.reward)
        own = [member for member in members if member.exploration is None]
        if own:  # what another policy sampled says nothing of this one
            self._tally.group(ticket, own)
        if f"{ticket.task.environment}/{ticket.task.level}" in self.steps_held_out:
            return without_steps(members, self._config.reward)
        return members

    async def _play(self, ticket: Ticket) -> tuple[Trajectory, ...]:
        """All members of the group, in order; fewer once `cut` has named the ticket.

        Raises:
          EpisodeFailed: if a member failed `max_attempts` times; the others are cancelled.
        """
        members = [asyncio.create_task(self._play_member(ticket, i)) for i in range(ticket.group_size)]
        everyone: asyncio.Future[Any] = asyncio.gather(*members)
        everyone.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, also when cut short
        cut = self._cut[ticket.ticket_id] = asyncio.Event()
        cutting: asyncio.Future[Any] = asyncio.create_task(cut.wait())
        try:
            await asyncio.wait({everyone, cutting}, return_when=asyncio.FIRST_COMPLETED)
            if everyone.done():
                return tuple(everyone.result())
            there = tuple(member.result() for member in members if member.done() and not member.exception())
            if len(there) >= _LEAST_MEMBERS:
                log.warning("ticket %s: %d of %d members in time", ticket.ticket_id, len(there), ticket.group_size)
                return there
            raise EpisodeFailed("cut", f"only {len(there)} of {ticket.group_size} members in time")
        finally:
            del self._cut[ticket.ticket_id]
            for member in members:
                member.cancel()
            cutting.cancel()
            everyone.cancel()

    async def _play_member(self, ticket: Ticket, member: int) -> Trajectory:
        try:
            return await self._attempt(ticket, member)
        finally:  # makes room at once, not only when the slowest member is done
            if ticket.ticket_id in self._unfinished:
                self._unfinished[ticket.ticket_id] -= 1
                self._room.set()

    def _may_retry(self) -> bool:
        """Takes one second attempt from the budget, if it has one: retries must not double the load of what fails."""
        if self._retries < 1:
            self.counters.retries_refused += 1
            return False
        self._retries -= 1
        return True

    async def _attempt(self, ticket: Ticket, member: int) -> Trajectory:
        self._retries = min(self._retries + RETRY_SHARE, RETRY_BURST)
        attempt, lost = 1, 0
        choice = self._explorer.choose(ticket, member)
        while True:
            try:
                trajectory = await run_episode(
                    choice.source,
                    self._environments(),
                    ticket.task,
                    seed=member_seed(ticket.seed, member, attempt),
                    temperature=choice.temperature or ticket.temperature,
                    config=self._config,
                )
                return dataclasses.replace(trajectory, temperature=choice.temperature, exploration=choice.exploration)
            except EpisodeFailed as error:
                if _lost_to_another(error) and lost < MAX_LOST:
                    lost += 1
                    self.counters.episodes_lost += 1
                    continue
                self.counters.episodes_failed[error.stage] += 1
                self._tally.fault(ticket.task.environment, error)
                log.warning("ticket %s, member %d, attempt %d: %s", ticket.ticket_id, member, attempt, error)
                if attempt == self._max_attempts or not self._may_retry():
                    raise
                attempt += 1


def _lost_to_another(error: EpisodeFailed) -> bool:
    """Whether it ended because another episode's environment took the process that they shared with it."""
    return isinstance(error.__cause__, EnvironmentDied) and not error.__cause__.culprit
