"""Ends this process when the orchestrator asks for another in its place, even if its event loop stands still."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from asyncrl_jax import exit_codes
from asyncrl_jax.transport.steering import ActorOrder, Steering

log = logging.getLogger(__name__)


class Watchdog:
    """A thread that reads this actor's orders. Use as a context manager.

    An order to replace is numbered; only one that is newer than this process ends it.
    """

    def __init__(
        self, steering: Steering, actor_id: str, every_s: float, end: Callable[[int], object] = os._exit
    ) -> None:
        """Args: end: ends the process with this exit code, without asking anyone."""
        self._steering = steering
        self._actor_id = actor_id
        self._every_s = every_s
        self._end = end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closed.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        known = self._order().replace
        while not self._closed.wait(self._every_s):
            if self._order().replace > known:
                log.error("%s is to be replaced: it made no progress. This process ends at once", self._actor_id)
                logging.shutdown()
                self._end(exit_codes.FAILED)
                return

    def _order(self) -> ActorOrder:
        return self._steering.directives().actors.get(self._actor_id, ActorOrder())
