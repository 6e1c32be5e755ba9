"""Actors as far as time is concerned: slots, claims, weights that are fresh enough, crashes.

An actor claims a ticket whenever one of its slots is free, as the real sampler does; members beyond its free slots wait
for the next ones. All times of a group follow at its claim, so a group costs two events whatever its length.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections import deque
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    """One ticket on its way. Times are simulated seconds."""

    number: int
    bucket: str
    min_update: int
    deadline: int
    seconds: list[float]  # that each member takes, faults included
    tokens: list[float]  # that each member samples
    issued_at: float
    failing: int | None = None  # the member that fails every attempt
    faults: int = 0  # attempts that the environment fails
    state: str = "queued"  # queued, running, sent (partial, on its way), pooled, training, ended
    stamp: int = 0  # of the newest claim or cut: an event of an older one is void
    deliveries: int = 0
    actor: int = -1
    starts: list[float] = dataclasses.field(default_factory=list)
    ends: list[float] = dataclasses.field(default_factory=list)
    oldest: int = 0  # update count of the oldest version that sampled it
    newest: int = 0
    uses: int = 0  # updates that trained on it
    partial: bool = False

    @property
    def bound(self) -> int:
        """N when it was issued."""
        return self.deadline - self.min_update

    def sampled(self, now: float) -> float:
        """Tokens sampled until `now`; they come evenly over a member's time."""
        total = 0.0
        for start, end, tokens in zip(self.starts, self.ends, self.tokens, strict=True):
            total += tokens if end <= now else tokens * max(now - start, 0.0) / (end - start)
        return total

    def occupied(self, now: float) -> float:
        """Slot seconds until `now`."""
        return sum(max(min(end, now) - start, 0.0) for start, end in zip(self.starts, self.ends, strict=True))


@dataclasses.dataclass(slots=True)
class _Actor:
    slots: list[float]  # heap: when each slot is free
    unfinished: list[float]  # heap: ends of members that may still run
    factor: float  # on the time of every episode
    num_slots: int
    up: bool = True
    draining: bool = False  # claims nothing
    stamp: int = 0  # its newest readiness; older ones are void
    flights: dict[int, Flight] = dataclasses.field(default_factory=dict)


class Versions:
    """When which weights are in the actors' hands.

    * A version is announced `publish_s` after its update, one after the other, and sampled with `swap_s` later.
    * Those before an update are known at its end, so whoever waits for one knows until when.
    """

    def __init__(self, publish_s: float, swap_s: float):
        self.updates = [0]  # of each version, rising
        self.visible_at = [0.0]
        self.announced_at = 0.0  # the newest
        self._publish_s, self._swap_s = publish_s, swap_s

    def publish(self, update: int, now: float) -> None:
        self.announced_at = now + self._publish_s
        self.updates.append(update)
        self.visible_at.append(self.announced_at + self._swap_s)

    def at(self, now: float) -> int:
        """Update count of the version sampled with at a moment."""
        return self.updates[bisect.bisect_right(self.visible_at, now) - 1]

    def since(self, update: int) -> float:
        """When a version of at least `update` updates is sampled with."""
        return self.visible_at[bisect.bisect_left(self.updates, update)]


class Fleet:
    """All actors. Cost: O(log slots) a member, O(1) a claim; O(members of the actor) for a cancellation or crash."""

    def __init__(
        self,
        factors: list[float],
        slots: Callable[[int], int],
        dispatch_s: float,
        versions: Versions,
        most_behind: int,
    ):
        """Args: factors: one an actor; slots: of the actor at a place; most_behind: A, in updates."""
        self.queue: deque[Flight] = deque()  # issued, not claimed
        self.ready: deque[tuple[int, int]] = deque((index, 0) for index in range(len(factors)))
        self.slot_seconds = 0.0  # used by members that are over
        self._actors = [_Actor([0.0] * slots(place), [], factor, slots(place)) for place, factor in enumerate(factors)]
        self._size = len(factors)  # that exist, in order: later ones have been removed
        self._num_slots = sum(actor.num_slots for actor in self._actors)  # of those that exist
        self._existed_s = 0.0  # slot seconds until `_sized_at`
        self._sized_at = 0.0
        self._slots = slots
        self._dispatch_s = dispatch_s
        self._versions = versions
        self._most_behind = most_behind

    @property
    def size(self) -> int:
        """Actors that exist."""
        return self._size

    def slot_seconds_there(self, now: float) -> float:
        """Slots that were there until `now`, each for as long as it was."""
        return self._existed_s + self._num_slots * (now - self._sized_at)

    def resize(self, size: int, now: float, factor: float) -> list[tuple[Flight, int]]:
        """Adds actors at the end, or removes from there. Returns what the removed ones had under way, to be claimed."""
        self._existed_s += self._num_slots * (now - self._sized_at)
        self._sized_at = now
        lost = []
        for index in range(size, self._size):
            lost += [(flight, index) for flight in self.crash(index, now)]
            self._num_slots -= self._actors[index].num_slots
        for index in range(self._size, size):
            if index == len(self._actors):
                self._actors.append(_Actor([now] * self._slots(index), [], factor, self._slots(index)))
                self.ready.append((index, 0))
            else:
                self.restart(index, now)
            self._num_slots += self._actors[index].num_slots
        self._size = size
        return lost

    def drain(self, target: int, now: float) -> list[tuple[float, tuple[int, int]]]:
        """Actors from `target` on claim nothing. Returns (when it has a free slot, its mark) of those that do again."""
        marks = []
        for index, actor in enumerate(self._actors[: self._size]):
            if actor.draining and index < target and actor.up:
                self._rebuild(actor, now)
                actor.stamp += 1
                marks.append((self._ready_at(actor, now), (index, actor.stamp)))
            actor.draining = index >= target
        return marks

    def beats(self, now: float) -> dict[str, dict[str, Any]]:
        """What the heartbeats of all that are up would say of their load. Cost: O(members under way)."""
        beats: dict[str, dict[str, Any]] = {}
        for index, actor in enumerate(self._actors[: self._size]):
            if actor.up:
                ends = [(s, e) for f in actor.flights.values() for s, e in zip(f.starts, f.ends, strict=True)]
                running = sum(start <= now < end for start, end in ends)
                beats[f"actor-{index}"] = {"running": running, "drained": actor.draining and not actor.flights}
        return beats

    def claims(
        self, now: float, update: int, pace: float, prepare: Callable[[Flight], None]
    ) -> list[tuple[Flight, float, tuple[int, int] | None]]:
        """Gives queued tickets to actors with a free slot, one each in turn.

        Args:
          pace: factor on the time of every episode.
          prepare: settles what a group meets, before its times are.

        Returns:
          (flight, when the actor has a free slot again, its mark if that is later than now) of each claim.
        """
        made: list[tuple[Flight, float, tuple[int, int] | None]] = []
        while self.queue and self.ready:
            if self.queue[0].state != "queued":
                self.queue.popleft()
                continue
            index, stamp = self.ready.popleft()
            actor = self._actors[index]
            if stamp != actor.stamp or not actor.up or actor.draining:
                continue
            flight = self.queue.popleft()
            prepare(flight)
            ready_at = self._claim(flight, index, now, update, pace)
            if ready_at <= now:
                self.ready.append((index, stamp))
                made.append((flight, now, None))
            else:
                actor.stamp += 1
                made.append((flight, ready_at, (index, actor.stamp)))
        return made

    def becomes_ready(self, mark: tuple[int, int]) -> None:
        """An actor has a free slot again; a mark that is no longer its newest is void."""
        index, stamp = mark
        if self._actors[index].stamp == stamp and self._actors[index].up:
            self.ready.append(mark)

    def _claim(self, flight: Flight, index: int, now: float, update: int, pace: float) -> float:
        """Sets all times of a group. Returns when the actor has a free slot again."""
        actor, versions = self._actors[index], self._versions
        begin = max(now + self._dispatch_s, versions.since(flight.min_update))
        if update - versions.at(begin) > self._most_behind:  # the actor is paused until it is fresh enough
            begin = max(begin, versions.since(update - self._most_behind))
        starts, ends = [], []
        for seconds in flight.seconds:
            start = max(begin, actor.slots[0])
            end = start + max(seconds * actor.factor * pace, 1e-6)
            heapq.heapreplace(actor.slots, end)
            heapq.heappush(actor.unfinished, end)
            starts.append(start)
            ends.append(end)
        flight.starts, flight.ends = starts, ends
        flight.state, flight.actor = "running", index
        flight.stamp += 1
        flight.deliveries += 1
        actor.flights[flight.number] = flight
        return self._ready_at(actor, now)

    def _ready_at(self, actor: _Actor, now: float) -> float:
        ready_at = now
        while len(actor.unfinished) >= actor.num_slots:
            ready_at = max(ready_at, heapq.heappop(actor.unfinished))
        return ready_at

    def leave(self, flight: Flight, now: float) -> tuple[float, tuple[int, int]] | None:
        """A running group is over, whole or not.

        Returns:
          If that frees slots before their time: when the actor has one, and its mark.
        """
        actor = self._actors[flight.actor]
        del actor.flights[flight.number]
        self.slot_seconds += flight.occupied(now)
        if max(flight.ends) <= now:
            return None
        self._rebuild(actor, now)
        actor.stamp += 1
        return self._ready_at(actor, now), (flight.actor, actor.stamp)

    def _rebuild(self, actor: _Actor, now: float) -> None:
        """Slots and members as the groups that are left say."""
        left = [end for flight in actor.flights.values() for end in flight.ends if end > now]
        actor.unfinished = left
        heapq.heapify(actor.unfinished)
        actor.slots = [*heapq.nlargest(actor.num_slots, left), *[now] * (actor.num_slots - len(left))]
        heapq.heapify(actor.slots)

    def crash(self, index: int, now: float) -> list[Flight]:
        """An actor dies with all it has under way."""
        actor = self._actors[index]
        lost = list(actor.flights.values())
        for flight in lost:
            self.slot_seconds += flight.occupied(now)
        actor.flights.clear()
        actor.up = False
        actor.stamp += 1
        return lost

    def restart(self, index: int, now: float) -> None:
        """It is back, empty."""
        actor = self._actors[index]
        actor.up, actor.draining = True, False
        self._rebuild(actor, now)
        self.ready.append((index, actor.stamp))

    def under_way(self, begin: float, end: float) -> float:
        """Episodes that are claimed already and under way between two moments, on average. Cost: O(their number)."""
        seconds = sum(
            max(min(end, stop) - max(begin, start), 0.0)
            for flight in self.running()
            for start, stop in zip(flight.starts, flight.ends, strict=True)
        )
        return seconds / max(end - begin, 1e-9)

    def running(self) -> list[Flight]:
        """All groups under way."""
        return [flight for actor in self._actors for flight in actor.flights.values()]
