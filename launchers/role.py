"""What the learner, an actor and the orchestrator start from when they are processes of their own."""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import signal
import threading
from pathlib import Path
from types import FrameType

from asyncrl_jax.config import Config
from asyncrl_jax.flags import config_from_flags, exit_with
from asyncrl_jax.local.child import die_with_parent
from asyncrl_jax.local.environment import redis_password


@dataclasses.dataclass(frozen=True)
class Role:
    """A role's settings and surroundings."""

    config: Config
    run_dir: Path
    password: str | None  # of Redis
    stop: threading.Event  # set by SIGTERM or Ctrl-C: close cleanly


def start() -> Role:
    """Reads the flags and prepares the process; a mistake ends it with one line and exit code 2."""
    die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 prints what every thread is doing
    logging.getLogger("asyncrl_jax").setLevel(logging.INFO)
    config = config_from_flags()
    if not config.run_dir:
        exit_with("--config.run_dir: name the directory of the run, on this machine")
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        password = redis_password(config.redis)
    except (OSError, ValueError) as error:
        exit_with(str(error))
    return Role(config, run_dir, password, _stop_on_signals())


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # asked a second time, it ends at once

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return stop
