"""One simulated run: a heap of events around controller, fleet and trainer.

    event      happens when                                what follows
    ready      an actor has a free slot again              claims
    arrive     a group's last token has reached the pool   an update, if the pool holds one
    receive    a partial group has reached the pool        the same
    waited     an update has waited for stragglers         that update
    updated    an update ends                              publish, expiry, admission, the next update
    round      every `policy_interval_s`                   all policies, admission
    beat       every `heartbeat_s`                         what the orchestrator knows of the learner
    admit      a ticket ended without being trained        another in its place
    crash      an actor dies; it is back later             its tickets are delivered again

Invariants, tested on random runs:
  * With deadlines no token is trained on past its ticket's N.
  * issued = trained + expired + filtered + failed + pending, at any moment.
  * A ticket has one outcome, and trains at most `replay_ratio` updates.

Cost: O(events × log events). A group makes two or three events whatever its members and its length, so events grow
with groups and not with actors × time; a member costs O(log slots).

Left out: evaluations, breakers of single actors (no actor reports on itself), a pause in the middle of an episode of an
actor that falls behind (it is paused at its next claim), and what the learner takes from actors on its machine.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import math
from collections.abc import Mapping
from typing import Any

from asyncrl_jax.config import Config
from asyncrl_jax.simulate.controller import Controller, Order, Tallies
from asyncrl_jax.simulate.fleet import Fleet, Flight, Versions
from asyncrl_jax.simulate.inputs import Draws, Inputs
from asyncrl_jax.simulate.outcome import Outcome, Spent, summarise
from asyncrl_jax.simulate.trainer import Rates, Trainer

_FAULTS, _CRASHES, _VARIANCE, _SPEED = 1, 2, 3, 4  # streams of random numbers
_PARTIAL_BEATS = 3  # heartbeats that late groups have to send what is there
_LEAST_MEMBERS = 2  # of a partial group


def simulate(config: Config, inputs: Inputs) -> Outcome:
    """Runs until `learner.num_updates` or `duration_s`, whichever comes first. The same seed gives the same run."""
    run = Simulation(config, inputs)
    run.finish()
    return run.outcome()


class Simulation:
    """See the module. `now` is in seconds from the first ticket."""

    def __init__(self, config: Config, inputs: Inputs):
        self.now = 0.0
        self.update = 0
        self.most_actors = config.actor.num_hosts  # that existed at once
        self.num_events = 0
        self.ledger: collections.Counter[str] = collections.Counter()
        self.trained: collections.Counter[str] = collections.Counter()  # groups, by bucket
        self.ended: collections.Counter[str] = collections.Counter()  # groups, by bucket
        self.spent = Spent()
        self.controller = Controller(config)
        self.versions = Versions(inputs.publish_s, inputs.swap_s)
        self.trainer = Trainer(config, self.versions, inputs.deadlines)
        self.rates = Rates()
        self._config, self._inputs, self._lag = config, inputs, config.effective_lag
        self._settings = config.learner
        self._draws = Draws(inputs, config.seed, config.learner.group_size, config.environment.turn_delay_s)
        self._speeds = self._draws.chances(_SPEED, 0)
        factors = [self._factor() for _ in range(config.actor.num_hosts)]
        self.fleet = Fleet(factors, self._slots_at, inputs.dispatch_s, self.versions, self._lag.actor_updates)
        self._chances = [self._draws.chances(_CRASHES, index) for index in range(len(factors))]
        self._filtering = self._draws.chances(_VARIANCE, 0)
        self._tallies = Tallies()
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = itertools.count()
        self._beat: Mapping[str, Any] = {}
        self._live: dict[int, dict[int, Flight]] = collections.defaultdict(dict)  # not arrived, by deadline and number
        self._tickets = self._uses = 0  # outstanding
        self._due: collections.deque[Flight] = collections.deque()  # in the order of issue, for `ticket_timeout_s`
        self._collecting_since = 0.0
        self._enough_at: float | None = None  # when the pool came to hold an update
        self._finished_at = 0.0  # the last update
        self._refilled = 0
        self._cut = False
        self._waited_for = -1  # update whose wait for stragglers has an end
        self._admits = False  # a look of admission is on its way
        self._begin()

    def finish(self) -> None:
        """All events until the end."""
        while self.step():
            pass

    def step(self) -> bool:
        """One event. False once the run is over."""
        limit = self._inputs.duration_s
        if self.update >= self._settings.num_updates or not self._events:
            return False
        if limit and self._events[0][0] > limit:
            self.now = limit
            return False
        self.now, _, kind, what = heapq.heappop(self._events)
        self.num_events += 1
        getattr(self, f"_on_{kind}")(what)
        return True

    @property
    def num_pending(self) -> int:
        """Tickets without an outcome, counted one by one."""
        waiting = sum(map(len, self._live.values()))
        return waiting + len({flight.number for flight in (*self.trainer.pool, *self.trainer.batch)})

    def outcome(self) -> Outcome:
        """The figures so far."""
        return summarise(self)

    def _at(self, when: float, kind: str, what: Any = None) -> None:
        heapq.heappush(self._events, (when, next(self._order), kind, what))

    def _begin(self) -> None:
        self._at(0.0, "round")
        self._at(0.0, "beat")
        if self._inputs.crash_every_h:
            for index in range(len(self._chances)):
                self._at(self._uptime(index), "crash", index)

    # -- orchestrator ------------------------------------------------------------------------------------------------

    def _on_round(self, _: Any) -> None:
        self._give_up_overdue()
        by_lag = {
            str(lag): [count, math.exp(-2 * lag * self._inputs.kl_per_update), lag * self._inputs.kl_per_update]
            for lag, count in self.trainer.newest_lags.items()
        }  # the effective sample size of log-normal ratios is exp(-variance), and their KL half the variance
        beat = {**self._beat, "by_lag": by_lag}
        scales = self._config.orchestrator.autoscale.enabled
        seen = self.fleet.beats(self.now) if scales else {}
        self.controller.round(self.now, self.update, beat, self.trainer.backlog, self._tallies, seen)
        if scales:
            self._scale()
        self._at(self.now + self._config.orchestrator.policy_interval_s, "round")
        self._admit()

    def _slots_at(self, place: int) -> int:
        """Of the actor at a place in the fleet's order."""
        fleet = self._config.orchestrator.fleet
        return self._config.actor_of(fleet.class_at(place)).slots if fleet.class_settings else self._config.actor.slots

    def _scale(self) -> None:
        """The fleet follows at once, as if hosts were there and warm."""
        size, target = self.controller.fleet
        self.most_actors = max(self.most_actors, size)
        while self.fleet.size < size:
            self.fleet.resize(self.fleet.size + 1, self.now, self._factor())
        for flight, _ in self.fleet.resize(size, self.now, 1.0):  # given back at once by those that had not drained
            flight.stamp += 1
            flight.state = "queued"
            self.fleet.queue.appendleft(flight)
        for ready_at, mark in self.fleet.drain(target, self.now):
            self._at(max(ready_at, self.now), "ready", mark)
        self._claim()

    def _factor(self) -> float:
        return self._inputs.slow_factor if self._speeds() < self._inputs.slow_share else 1.0

    def _on_beat(self, _: Any) -> None:
        self._beat = self.rates.told()
        self._at(self.now + self._config.actor.heartbeat_s, "beat")
        self._admit()

    def _give_up_overdue(self) -> None:
        limit = self._lag.ticket_timeout_s
        while self._due and (self._due[0].state not in ("queued", "running") or self._overdue(self._due[0], limit)):
            flight = self._due.popleft()
            if flight.state in ("queued", "running"):
                self._drop(flight, "failed")

    def _overdue(self, flight: Flight, limit_s: float) -> bool:
        return limit_s > 0 and self.now - flight.issued_at > limit_s

    def _admit(self) -> None:
        orders = self.controller.admit(self.update, self._tickets, self._uses, self._beat)
        for order in orders:
            self._issue(order)
        if orders:
            self._claim()

    def _issue(self, order: Order) -> None:
        seconds, tokens = self._draws.episodes(order.number, order.level)
        flight = Flight(
            order.number, order.bucket, order.min_update, order.deadline, list(seconds), list(tokens), self.now
        )
        self._tickets += 1
        self._uses += self._settings.replay_ratio
        self._live[flight.deadline][flight.number] = flight
        self._due.append(flight)
        self.fleet.queue.append(flight)

    # -- actors ------------------------------------------------------------------------------------------------------

    def _on_ready(self, mark: tuple[int, int]) -> None:
        self.fleet.becomes_ready(mark)
        self._claim()

    def _claim(self) -> None:
        if not self.fleet.queue or not self.fleet.ready:
            return
        inputs = self._inputs
        between = self.rates.update_s * self._config.weights.publish_every_updates
        pace = 1.0 + inputs.swap_pause_s / max(between, inputs.swap_pause_s) if between else 1.0
        for flight, ready_at, mark in self.fleet.claims(self.now, self.update, pace, self._meet_faults):
            over = max(flight.ends) if flight.failing is None else flight.ends[flight.failing]
            self._at(over + inputs.handover_s, "arrive", (flight, flight.stamp))
            if mark is not None:
                self._at(ready_at, "ready", mark)

    def _meet_faults(self, flight: Flight) -> None:
        """Attempts that fail take a share of the episode's time; a member that fails them all fails the group."""
        if flight.faults or not (self._inputs.episode_fault_share or self._inputs.outage_s):
            return
        chance = self._draws.chances(_FAULTS, flight.number)
        share = 1.0 if self._inputs.failing(self.now) else self._inputs.episode_fault_share
        for member, seconds in enumerate(flight.seconds):
            wasted = 0.0
            for attempt in range(self._config.actor.max_attempts):
                if chance() >= share:
                    break
                wasted += seconds * chance()
                flight.faults += 1
                if attempt + 1 == self._config.actor.max_attempts:
                    flight.failing = member
                    flight.seconds[member] = wasted
                    return
            flight.seconds[member] += wasted

    def _on_arrive(self, what: tuple[Flight, int]) -> None:
        flight, stamp = what
        if flight.state != "running" or flight.stamp != stamp:
            return
        if flight.faults:
            self._tallies.faults(flight.bucket, flight.faults)
        if flight.failing is not None:
            self._drop(flight, "failed")
            return
        self._leave(flight)
        self._receive(flight)

    def _on_receive(self, flight: Flight) -> None:
        if flight.state == "sent":
            self._receive(flight)

    def _receive(self, flight: Flight) -> None:
        """The learner has read a group, whole or not."""
        del self._live[flight.deadline][flight.number]
        self.rates.served(self.now - min(flight.starts))
        seconds = sum(flight.ends) - sum(flight.starts)
        self._tallies.group(flight.bucket, seconds, sum(flight.tokens), len(flight.tokens))
        limit = self._config.pool.refill_groups_per_update
        if self._refilled < limit and self._filtering() < self._inputs.zero_variance_share:
            self._refilled += 1
            self._end(flight, "filtered")
        elif self.trainer.add(flight, self.update):
            self._try_update()
        else:
            self._expire(flight)

    def _leave(self, flight: Flight) -> None:
        freed = self.fleet.leave(flight, self.now)
        if freed is not None:
            self._at(max(freed[0], self.now), "ready", freed[1])

    def _on_crash(self, index: int) -> None:
        if index >= self.fleet.size:
            return
        lost = self.fleet.crash(index, self.now)
        for flight in lost:
            self.spent.wasted_tokens += flight.sampled(self.now)
            flight.stamp += 1
            flight.state = "lost"
            self._at(self.now + self._config.redis.claim_idle_s, "redeliver", flight)
        self.spent.crashes += 1
        self._at(self.now + self._inputs.restart_s, "restart", index)

    def _on_restart(self, index: int) -> None:
        if index >= self.fleet.size:
            return
        self.fleet.restart(index, self.now)
        self._at(self.now + self._uptime(index), "crash", index)
        self._claim()

    def _uptime(self, index: int) -> float:
        return -math.log(1.0 - self._chances[index]()) * 3600.0 * self._inputs.crash_every_h

    def _on_redeliver(self, flight: Flight) -> None:
        if flight.state != "lost":
            return
        flight.state = "queued"
        if flight.deliveries >= self._config.redis.max_deliveries:
            self._drop(flight, "failed")
            return
        self.fleet.queue.appendleft(flight)
        self._claim()

    # -- learner -----------------------------------------------------------------------------------------------------

    def _try_update(self) -> None:
        """Begins the next update once the pool holds it and no running ticket is due, or they were waited for."""
        if self.trainer.batch or len(self.trainer.pool) < self._settings.groups_per_update:
            return
        if self._enough_at is None:
            self._enough_at = self.now
        if self._inputs.deadlines and any(flights for due, flights in self._live.items() if due <= self.update):
            waited = self.now - self._enough_at
            patience = self._lag.straggler_wait_s
            if self._lag.straggler_policy == "partial":
                if waited >= patience and not self._cut:
                    self._cut = True
                    self._give_up(due_by=self.update)
                patience += _PARTIAL_BEATS * self._config.actor.heartbeat_s
            if waited < patience - 1e-9:
                if self._waited_for != self.update:
                    self._waited_for = self.update
                    self._at(self._enough_at + self._lag.straggler_wait_s, "waited", self.update)
                return
        wait_s = self.now - self._collecting_since
        starved_s = self._enough_at - self._collecting_since
        self.spent.starved_s += starved_s
        self.spent.straggler_s += self.now - self._enough_at
        self._refilled = 0
        self.trainer.begin(self.update)
        if self._lag.straggler_lead_updates and self._inputs.deadlines:
            self._give_up(due_by=self.update + self._lag.straggler_lead_updates)
        seconds = self._draws.update_s(self.update, lambda ahead_s: self.fleet.under_way(self.now, self.now + ahead_s))
        ends = self.now + max(seconds, 1e-6)
        if (self.update + 1) % self._config.weights.publish_every_updates == 0:
            ends = max(ends, self.versions.announced_at)  # the version before is announced first
        self._at(ends, "updated", (self.now, wait_s, starved_s))

    def _on_waited(self, update: int) -> None:
        if update == self.update:
            self._try_update()
            if not self.trainer.batch and self._cut:
                self._at(self.now + _PARTIAL_BEATS * self._config.actor.heartbeat_s, "waited", update)

    def _give_up(self, due_by: int) -> None:
        """Late groups give up the members that are not done, at their actor's next heartbeat."""
        when = self.now + self._config.actor.heartbeat_s
        for due, flights in self._live.items():
            for flight in flights.values() if due <= due_by else ():
                if flight.state == "running" and flight.failing is None and max(flight.ends) > when:
                    self._at(when, "cut", (flight, flight.stamp))

    def _on_cut(self, what: tuple[Flight, int]) -> None:
        flight, stamp = what
        if flight.state != "running" or flight.stamp != stamp:
            return
        whole = [member for member, end in enumerate(flight.ends) if end <= self.now]
        if len(whole) < _LEAST_MEMBERS:
            self._drop(flight, "failed")
            return
        late = sum(flight.tokens) - sum(flight.tokens[member] for member in whole)
        self.spent.wasted_tokens += min(max(flight.sampled(self.now) - sum(flight.tokens) + late, 0.0), late)
        self._leave(flight)
        flight.partial = True
        self.spent.partial_groups += 1
        for name in ("starts", "ends", "tokens"):
            setattr(flight, name, [getattr(flight, name)[member] for member in whole])
        flight.state = "sent"
        self._at(self.now + self._inputs.handover_s, "receive", flight)

    def _on_updated(self, what: tuple[float, float, float]) -> None:
        began, wait_s, starved_s = what
        self.update += 1
        self.spent.busy_s += self.now - began
        self.spent.wait_s += wait_s
        seconds = self.now - self._finished_at
        self.rates.updated(seconds, seconds - wait_s, wait_s, starved_s)
        self._finished_at = self._collecting_since = self.now
        self._enough_at, self._cut = None, False
        self._uses -= len(self.trainer.batch)
        for flight in self.trainer.end():
            self._end(flight, "trained")
        if self.update % self._config.weights.publish_every_updates == 0:
            self.versions.publish(self.update, self.now)
        self._expire_pool()
        self._expire_running()
        self._admit()
        self._try_update()

    def _expire_pool(self) -> None:
        for flight in self.trainer.unusable(self.update):
            if flight.uses:
                self._end(flight, "trained")
            else:
                self._expire(flight)

    def _expire(self, flight: Flight) -> None:
        self.spent.wasted_tokens += sum(flight.tokens)
        self._end(flight, "expired")

    def _expire_running(self) -> None:
        """Ends tickets that no update can train on any more."""
        mask = self._lag.straggler_policy == "mask"
        for due in sorted(self._live) if self._inputs.deadlines else ():
            flights = self._live[due]
            if due >= self.update:
                break
            for flight in list(flights.values()):
                if due + (flight.bound if mask else 0) < self.update:
                    self._drop(flight, "expired")
            if not flights:
                del self._live[due]

    # -- ledger ------------------------------------------------------------------------------------------------------

    def _drop(self, flight: Flight, outcome: str) -> None:
        """Ends a ticket that has not arrived."""
        if flight.state == "running":
            self.spent.wasted_tokens += flight.sampled(self.now)
            self._leave(flight)
        elif flight.state == "sent":
            self.spent.wasted_tokens += sum(flight.tokens)
        del self._live[flight.deadline][flight.number]
        self._end(flight, outcome)
        self._try_update()

    def _on_admit(self, _: Any) -> None:
        self._admits = False
        self._admit()

    def _end(self, flight: Flight, outcome: str) -> None:
        self._tickets -= 1
        self._uses -= self._settings.replay_ratio - flight.uses
        flight.state = "ended"
        self.ledger[outcome] += 1
        self.ended[flight.bucket] += 1
        if outcome == "trained":
            self.trained[flight.bucket] += 1
        elif not self._admits:  # makes room for another: one look for all that end at this moment
            self._admits = True
            self._at(self.now, "admit")
