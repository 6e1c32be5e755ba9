"""The learner's pulse: beats on a thread of its own, so that a long compile or update does not look like death."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from asyncrl_jax.config import ActorConfig
from asyncrl_jax.transport.control import Control


class Vitals:
    """Beats every `heartbeat_s`. An error of the thread surfaces in `check`, which the loop calls."""

    def __init__(self, control: Control, config: ActorConfig, payload: Callable[[], dict[str, Any]]):
        self._control = control
        self._config = config
        self._payload = payload
        self._shown: dict[str, Any] = {}
        self._closed = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="vitals", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def show(self, values: dict[str, Any]) -> None:
        """Adds the newest update's values to what is shown; what the payload states wins."""
        self._shown = values

    def check(self) -> None:
        """Raises what ended the thread, if anything did."""
        if self._error is not None:
            raise RuntimeError("the learner's heartbeat thread died") from self._error

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            while not self._closed.wait(self._config.heartbeat_s):
                self._control.beat("learner", "0", self._shown | self._payload(), self._config.heartbeat_timeout_s)
        except BaseException as error:  # noqa: BLE001  kept for `check`
            self._error = error
