"""How many episodes a host plays at once: as many as keep its engine busy while environments think, and no more."""

from __future__ import annotations

import math

WINDOW_S = 0.5  # over which demand is averaged, and between two rises


class Concurrency:
    """Decides how many more episodes may start.

        demand     sessions that want tokens now: sampling, or waiting for a slot
        share      demand ÷ episodes, averaged: the part of its time in which an episode wants tokens
        target     demand that keeps the slots full: slots × (1 + queue_share)

    An episode in which the environment thinks costs the engine nothing, so what is counted is demand and the tokens of
    its sequences, not episodes: as many run as make the target, target ÷ share. In one window their number rises by
    half the slots at most, since those that have just started all want tokens.

    Invariants:
      * Never more than `most` episodes; as many as there are slots are always allowed, unless memory is short.
      * None starts while the sequences that want tokens hold `kv_tokens` or more.
    """

    def __init__(self, num_slots: int, most: int, *, queue_share: float, kv_tokens: int = 0) -> None:
        """Args:
        num_slots: of the engine.
        most: episodes at once.
        queue_share: sessions that may wait for a slot, as a share of the slots.
        kv_tokens: tokens of all sequences that want tokens, above which no episode starts; 0 for no limit.
        """
        self.share = 1.0
        self._num_slots = num_slots
        self._most = max(most, num_slots)
        self._target = num_slots * (1 + queue_share)
        self._kv_tokens = kv_tokens
        self._seen_at: float | None = None
        self._window_at = -math.inf
        self._num_then = 0  # episodes when this window began

    def room(self, now: float, num_episodes: int, demand: int, tokens: int) -> int:
        """Episodes that may start now.

        Args:
          now: monotonic seconds.
          num_episodes: that are under way.
          demand: sessions that want tokens.
          tokens: of the sequences of these.
        """
        self._average(now, num_episodes, demand)
        if self._kv_tokens and tokens >= self._kv_tokens:
            return 0
        free = self._num_slots - num_episodes
        if self._most > self._num_slots and num_episodes >= self._num_slots:
            if now - self._window_at >= WINDOW_S:
                self._window_at, self._num_then = now, num_episodes
            wanted = math.floor(self._target / max(self.share, 1 / self._num_slots)) - num_episodes
            free = min(wanted, self._num_then + max(self._num_slots // 2, 1) - num_episodes)
        return max(min(free, self._most - num_episodes), 0)

    def _average(self, now: float, num_episodes: int, demand: int) -> None:
        since = 0.0 if self._seen_at is None else now - self._seen_at
        self._seen_at = now
        weight = 1 - math.exp(-since / WINDOW_S)
        if num_episodes:
            self.share += weight * (demand / num_episodes - self.share)
