"""How an actor's process is: how late its event loop is and what held it up, what it takes of the machine."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import numpy as np

from asyncrl_jax.actor.usage import usage_of

log = logging.getLogger(__name__)

TICK_S = 0.01  # between two looks
WINDOW_S = 30.0  # over which the percentile is taken
BLOCKED_S = 1.0  # without a turn, after which it is said what the loop is doing


class LoopWatch:
    """Measures an event loop's lag: how much later than asked for it wakes a task. Use as a context manager.

    Invariant: code that holds the loop up for longer than BLOCKED_S is named in the log while it does, once each time.
    """

    def __init__(self) -> None:
        self.num_blocked = 0  # times that the loop stood still for longer than BLOCKED_S
        self._lags: collections.deque[float] = collections.deque(maxlen=int(WINDOW_S / TICK_S))
        self._worst_s = 0.0  # since it was last asked for
        self._turned_at = time.monotonic()
        self._loop_thread = threading.get_ident()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._guard, name="loop watch", daemon=True)

    def __enter__(self) -> Self:
        """To be called on the loop's thread."""
        self._loop_thread, self._turned_at = threading.get_ident(), time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closed.set()
        self._thread.join(timeout=5.0)

    async def run(self) -> None:
        """Looks for as long as it is not cancelled."""
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._turned_at = time.monotonic()
            lag = max(self._turned_at - due, 0.0)
            self._lags.append(lag)
            self._worst_s = max(self._worst_s, lag)

    @property
    def p99_s(self) -> float:
        """99th percentile of the lag, of the last WINDOW_S of an idle loop and longer of a busy one."""
        return float(np.percentile(self._lags, 99)) if self._lags else 0.0

    def take_worst_s(self) -> float:
        """The largest lag since the last call."""
        worst, self._worst_s = self._worst_s, 0.0
        return worst

    def values(self) -> Mapping[str, float]:
        """For a heartbeat; the worst lag is that since the last call."""
        used = usage_of(os.getpid())
        values = {
            "loop_lag_s": self.take_worst_s(),
            "loop_lag_p99_s": self.p99_s,
            "loop_blocked": self.num_blocked,
        }
        return values | (dataclasses.asdict(used) if used is not None else {})

    def _guard(self) -> None:
        told = False
        while not self._closed.wait(BLOCKED_S / 4):
            blocked = time.monotonic() - self._turned_at > BLOCKED_S
            if blocked and not told:
                self.num_blocked += 1
                frame = sys._current_frames().get(self._loop_thread)
                stack = "".join(traceback.format_stack(frame)[-4:]) if frame is not None else "(gone)"
                log.error("the event loop has stood still for more than %g s, in:\n%s", BLOCKED_S, stack)
            told = blocked
