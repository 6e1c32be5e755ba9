"""Keeps a fleet as the leading orchestrator asked for it, beside its loop, which waits for no cluster."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from asyncrl_jax.orchestrator.fleets.base import Fleet, FleetUnavailable

log = logging.getLogger(__name__)

_CLOSING_LIMIT_S = 20.0


class FleetKeeper:
    """Invariants:

    * What was asked for last is applied at once, and again every `every_s`: what a cluster lost comes back.
    * Nothing is applied before something was asked for, nor after `rest`, nor once nobody has asked for `valid_s`: a
      standby leaves the fleet alone, and so does a leader that waits for Redis while another may lead.
    * A cluster that cannot be reached is named once and asked again; it never ends the orchestrator.
    """

    def __init__(
        self,
        connect: Callable[[], Fleet],
        every_s: float,
        valid_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Args: connect: opens the fleet, when it is needed first and after a failure."""
        self._connect = connect
        self._every_s = every_s
        self._valid_s = valid_s
        self._clock = clock
        self._asked_at = clock()
        self._members: dict[str, int] | None = None
        self._asked = threading.Event()
        self._stopping = False
        self._failed = ""
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()

    def ask(self, members: Mapping[str, int]) -> None:
        """The fleet is to have so many members of each class."""
        self._asked_at = self._clock()
        if members != self._members:
            self._members = dict(members)
            self._asked.set()

    def rest(self) -> None:
        """Applies nothing until asked again: another orchestrator leads."""
        self._members = None

    def close(self) -> None:
        """Applies what was asked for last, then ends the thread; the members stay."""
        self._stopping = True
        self._asked.set()
        self._thread.join(_CLOSING_LIMIT_S)
        if self._thread.is_alive():
            log.error("the fleet did not answer within %.0f s and is left as it is", _CLOSING_LIMIT_S)

    def _run(self) -> None:
        fleet: Fleet | None = None
        stopping = False
        while not stopping:
            self._asked.wait(self._every_s)
            self._asked.clear()
            stopping, members = self._stopping, self._members
            if members is not None and self._clock() - self._asked_at <= self._valid_s:
                fleet = self._apply(fleet, members)
        if fleet is not None:
            fleet.close()

    def _apply(self, fleet: Fleet | None, members: Mapping[str, int]) -> Fleet | None:
        """The fleet, or None if it has to be opened anew."""
        try:
            fleet = fleet or self._connect()
            fleet.resize(members)
        except FleetUnavailable as error:
            if str(error) != self._failed:
                log.error("the fleet cannot be made to have %s: %s", members, error)
            self._failed = str(error)
            return None
        if self._failed:
            log.warning("the fleet answers again and is to have %s", members)
        self._failed = ""
        return fleet
