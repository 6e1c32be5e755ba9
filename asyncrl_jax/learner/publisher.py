"""Publishes weight versions beside the training step: save, commit, announce, retire the old ones, in that order."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import time

import numpy as np

from asyncrl_jax.config import WeightsConfig
from asyncrl_jax.transport.control import Control
from asyncrl_jax.types import WeightVersion
from asyncrl_jax.weights.manifest import Canary
from asyncrl_jax.weights.publish import VersionWriter, retain

log = logging.getLogger(__name__)


class Publisher:
    """One version at a time, in order, on one thread. An error surfaces at the next call.

    Invariant: a version is announced only after it is committed, and deleted only when neither kept, leased nor asked
    for by a pending evaluation.
    """

    def __init__(self, directory: str, config: WeightsConfig, control: Control):
        self._directory = directory
        far = "://" in directory  # there bytes cost time; on a local disk a delta is no faster than the whole
        self._writer = VersionWriter(directory, deltas=config.deltas == "always" or (config.deltas == "auto" and far))
        self.seconds = 0.0  # from the start of the newest announced version's publication to its announcement
        self._config = config
        self._control = control
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._running: concurrent.futures.Future[WeightVersion] | None = None

    def start(
        self, params: dict[str, np.ndarray], *, number: int, parent: int | None, line: int, update: int, canary: Canary
    ) -> None:
        """Begins to publish host copies of the weights.

        Raises:
          RuntimeError: if the version before was not waited for.
        """
        if self._running is not None:
            raise RuntimeError(f"v{number}: the version before is still being published; wait for it first")
        self._running = self._thread.submit(self._publish, params, number, parent, line, update, canary)

    def wait(self) -> WeightVersion | None:
        """The version being published, once it is announced; None if there is none."""
        if self._running is None:
            return None
        running, self._running = self._running, None
        return running.result()

    def done(self) -> bool:
        return self._running is None or self._running.done()

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()

    def _publish(
        self,
        params: dict[str, np.ndarray],
        number: int,
        parent: int | None,
        line: int,
        update: int,
        canary: Canary,
    ) -> WeightVersion:
        started = time.monotonic()
        version = self._writer.publish(params, number=number, parent=parent, line=line, update=update, canary=canary)
        version = dataclasses.replace(version, announced_at=time.time())
        self._control.announce(version)
        self.seconds = time.monotonic() - started
        protected = self._control.leased() | {request.version for request in self._control.pending_evaluations()}
        removed = retain(self._directory, self._config.keep_versions, protected)
        if removed:
            log.debug("retired versions %s", removed)
        return version
