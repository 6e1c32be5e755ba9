"""Keeps an engine's weights as fresh as the lag bound asks.

Invariants:
  * An actor more than A updates behind the learner samples nothing until it is refreshed.
  * A version that was not read, verified and proven whole never samples; the version before goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time

from asyncrl_jax.actor.engines.base import Engine
from asyncrl_jax.actor.renewal import renewed
from asyncrl_jax.config import WeightsConfig
from asyncrl_jax.transport.control import Control
from asyncrl_jax.types import LearnerState, Line, Ticket, WeightVersion, update_distance
from asyncrl_jax.weights.manifest import VersionGone, WeightsMismatch

log = logging.getLogger(__name__)

MAX_REFUSALS = 5  # in a row, before the process gives up
_RETRY_S = 1.0  # before a version that failed to load is tried again, when no other one has come
_PATIENCE_S = 10.0  # between log lines of one wait


class WeightsRefused(RuntimeError):
    """Too many versions in a row failed their proof: this host cannot be trusted to sample."""


class Loader:
    """Reads announced versions into one engine, under a lease, and counts the refusals."""

    def __init__(self, engine: Engine, control: Control, directory: str, holder: str, config: WeightsConfig) -> None:
        """Args: holder: name of the leases, of this loader alone."""
        self.num_refused = 0  # since the start
        self._refused_in_a_row = 0
        self._engine = engine
        self._control = control
        self._directory = directory
        self._holder = holder
        self._config = config

    async def load(self, version: WeightVersion) -> bool:
        """Makes the engine sample with `version`. False if it stays with what it has.

        Raises:
          WeightsRefused: after MAX_REFUSALS failures in a row.
        """
        try:
            async with renewed(lambda: self._lease(version), self._config.lease_s / 3):
                await self._engine.load(self._directory, version)
        except VersionGone as error:
            log.info("v%d went before it was read: %s", version.number, error)
            return False
        except WeightsMismatch as error:
            self._refuse(version, error)
            return False
        finally:
            await asyncio.to_thread(self._control.release, version.number, self._holder)
        self._refused_in_a_row = 0
        return True

    def _lease(self, version: WeightVersion) -> None:
        self._control.lease(version.number, self._holder, self._config.lease_s)

    def _refuse(self, version: WeightVersion, error: WeightsMismatch) -> None:
        self.num_refused += 1
        self._refused_in_a_row += 1
        kept = "nothing" if self._engine.version is None else f"v{self._engine.version}"
        log.error(
            "REFUSED weights v%d: %s. Still sampling with %s (refusal %d of %d in a row)",
            version.number,
            error,
            kept,
            self._refused_in_a_row,
            MAX_REFUSALS,
        )
        if self._refused_in_a_row >= MAX_REFUSALS:
            raise WeightsRefused(f"{MAX_REFUSALS} loads in a row refused, the last of v{version.number}") from error


class Refresher:
    """Follows announced versions, and pauses the engine when it falls too far behind."""

    def __init__(
        self, engine: Engine, loader: Loader, control: Control, *, poll_interval_s: float, max_behind: int
    ) -> None:
        """Args: max_behind: A, in optimizer updates."""
        self.version: WeightVersion | None = None  # that samples now
        self.paused_since: float | None = None  # unix seconds, while too far behind
        self._engine = engine
        self._loader = loader
        self._control = control
        self._poll_interval_s = poll_interval_s
        self._max_behind = max_behind
        self._failed: tuple[int, float] | None = None  # version number, and when it may be tried again (monotonic)
        self._loaded = asyncio.Condition()

    async def run(self) -> None:
        """Polls for as long as it is not cancelled."""
        while True:
            latest, learner, lines = await asyncio.to_thread(self._look)
            await self._judge(learner, lines)
            if latest is not None and self._wants(latest):
                await self._refresh(latest)
                await self._judge(learner, lines)
            await asyncio.sleep(self._poll_interval_s)

    def serves(self, ticket: Ticket) -> bool:
        """Whether the loaded weights are fresh enough for the ticket. A newer line is fresher than any older one."""
        version = self.version
        return version is not None and (version.line, version.update) >= (ticket.line, ticket.min_update)

    @property
    def num_refused(self) -> int:
        """Loads that failed their proof since the process started."""
        return self._loader.num_refused

    async def until_serves(self, ticket: Ticket) -> None:
        """Waits for weights that the ticket may be sampled with; whoever settles the ticket cancels the wait."""
        started_at = time.monotonic()
        told = False
        async with self._loaded:
            while not self.serves(ticket):
                try:
                    async with asyncio.timeout(_PATIENCE_S):
                        await self._loaded.wait()
                except TimeoutError:
                    told = True
                    log.warning(
                        "ticket %s has waited %.0f s for weights of update %d on line %d; loaded is %s",
                        ticket.ticket_id,
                        time.monotonic() - started_at,
                        ticket.min_update,
                        ticket.line,
                        self.version,
                    )

        if told:
            log.warning("ticket %s goes on after %.0f s", ticket.ticket_id, time.monotonic() - started_at)

    async def until_loaded(self) -> None:
        """Waits for the first weights: the learner may still be warming up."""
        async with self._loaded:
            await self._loaded.wait_for(lambda: self.version is not None)

    def _look(self) -> tuple[WeightVersion | None, LearnerState | None, dict[int, Line]]:
        learner, latest = self._control.learner(), self._control.latest()
        return latest, learner, self._control.lines()  # lines last: they then hold those of the other two

    def _wants(self, latest: WeightVersion) -> bool:
        if self.version is not None and latest.number == self.version.number:
            return False
        if self._failed is None:
            return True
        number, retry_at = self._failed
        return latest.number != number or time.monotonic() >= retry_at

    async def _refresh(self, latest: WeightVersion) -> None:
        if await self._loader.load(latest):
            self._failed = None
            async with self._loaded:
                self.version = latest
                self._loaded.notify_all()
        else:
            self._failed = (latest.number, time.monotonic() + _RETRY_S)

    async def _judge(self, learner: LearnerState | None, lines: dict[int, Line]) -> None:
        """Pauses or resumes the engine by its distance from the learner."""
        if learner is None or self.version is None:
            return
        behind = update_distance(self.version, learner.line, learner.update, lines)
        if behind > self._max_behind and self.paused_since is None:
            self.paused_since = time.time()
            await self._engine.pause()
            log.warning(
                "paused: v%d is %d updates behind update %d, more than %d; waiting for a newer version",
                self.version.number,
                behind,
                learner.update,
                self._max_behind,
            )
        elif behind <= self._max_behind and self.paused_since is not None:
            log.warning("resumed with v%d after %.1f s", self.version.number, time.time() - self.paused_since)
            self.paused_since = None
            await self._engine.resume()
