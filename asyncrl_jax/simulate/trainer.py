"""The learner as far as time and lag are concerned: a pool, updates, and exact counts of what they trained on."""

from __future__ import annotations

import collections
from itertools import chain

import numpy as np

from asyncrl_jax.config import Config
from asyncrl_jax.learner.progress import Pace
from asyncrl_jax.simulate.fleet import Flight, Versions


class Rates(Pace):
    """What the learner says in its heartbeat."""

    def __init__(self) -> None:
        super().__init__()
        self.service_s = 0.0

    def served(self, seconds: float) -> None:
        self.service_s = seconds if self.service_s == 0 else 0.9 * self.service_s + 0.1 * seconds

    def told(self) -> dict[str, float]:
        return super().told() | {"service_s": self.service_s}


class Trainer:
    """Invariants:

    * With deadlines, no token enters an update when more than N updates (of its ticket) separate it from its weights.
    * A group is trained on at most `replay_ratio` times.

    Groups are drawn by deadline, as `pool.draw = fifo` does. Cost of an update: O(pooled groups × log), and
    O(members × versions they span) for the lags.
    """

    def __init__(self, config: Config, versions: Versions, deadlines: bool):
        self.pool: list[Flight] = []
        self.batch: list[Flight] = []  # of the update under way
        self.lags: collections.Counter[int] = collections.Counter()  # trained tokens by lag
        self.newest_lags: dict[int, float] = {}  # of the last update
        self.over_lag_tokens = 0.0
        self.masked_tokens = 0.0
        self._settings = config.learner
        self._most = config.most_token_updates
        self._mask = config.lag.straggler_policy == "mask"
        self._whole_episodes = config.actor.swap_at == "episode"
        self._versions = versions
        self._deadlines = deadlines

    @property
    def backlog(self) -> int:
        """Groups that wait for the learner, those of the update under way included."""
        return len(self.pool) + sum(flight.uses + 1 >= self._settings.replay_ratio for flight in self.batch)

    def add(self, flight: Flight, update: int) -> bool:
        """Pools a group that has arrived; False, and not pooled, if it is past its bound already."""
        last = max(flight.starts if self._whole_episodes else flight.ends)
        flight.oldest = self._versions.at(min(flight.starts))
        flight.newest = self._versions.at(last)
        if self._deadlines and self._is_unusable(flight, update):
            return False
        flight.state = "pooled"
        self.pool.append(flight)
        return True

    def unusable(self, update: int) -> list[Flight]:
        """Takes out the pooled groups that are past their bound after `update` updates."""
        if not self._deadlines:
            return []
        taken = [flight for flight in self.pool if self._is_unusable(flight, update)]
        if taken:
            self.pool = [flight for flight in self.pool if not self._is_unusable(flight, update)]
        return taken

    def _is_unusable(self, flight: Flight, update: int) -> bool:
        return update - (flight.newest if self._mask else flight.oldest) > min(flight.bound, self._most)

    def begin(self, update: int) -> None:
        """Takes the batch of the next update, and counts the lags of its tokens."""
        self.pool.sort(key=lambda flight: (flight.deadline, flight.number))
        count = self._settings.groups_per_update
        self.batch = self.pool[:count]
        again = [flight for flight in self.batch if flight.uses + 1 < self._settings.replay_ratio]
        self.pool = again + self.pool[count:]
        self._count_lags(update)

    def end(self) -> list[Flight]:
        """The update is done. Returns the groups that have no use left."""
        for flight in self.batch:
            flight.uses += 1
        done = [flight for flight in self.batch if flight.uses >= self._settings.replay_ratio]
        self.batch = []
        return done

    def _count_lags(self, update: int) -> None:
        batch, versions = self.batch, self._versions
        sizes = [len(flight.starts) for flight in batch]
        starts = np.fromiter(chain.from_iterable(flight.starts for flight in batch), np.float64, sum(sizes))
        ends = np.fromiter(chain.from_iterable(flight.ends for flight in batch), np.float64, sum(sizes))
        tokens = np.fromiter(chain.from_iterable(flight.tokens for flight in batch), np.float64, sum(sizes))
        bounds = np.repeat([min(flight.bound, self._most) for flight in batch], sizes)
        visible = np.asarray([*versions.visible_at, np.inf])
        if self._whole_episodes:
            ends = starts + 1e-9
        first = int(np.searchsorted(visible, starts.min(), side="right")) - 1
        last = int(np.searchsorted(visible, ends.max(), side="right"))
        self.newest_lags = {}
        for index in range(first, min(last, len(versions.updates))):
            inside = np.minimum(ends, visible[index + 1]) - np.maximum(starts, visible[index])
            share = np.clip(inside, 0.0, None) / (ends - starts) * tokens
            lag = update - versions.updates[index]
            over = float(share[lag > bounds].sum())
            count = float(share.sum())
            if self._mask and self._deadlines:
                self.masked_tokens += over
                count -= over
            else:
                self.over_lag_tokens += over
            if count > 0:
                self.lags[lag] += round(count)
                self.newest_lags[lag] = count
