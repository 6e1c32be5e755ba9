"""What the learner, an actor and the orchestrator start from when they are processes of their own."""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import signal
import threading
from pathlib import Path

from absl import flags
from absl import logging as absl_logging

from asyncrl_jax import exit_codes
from asyncrl_jax.config import Config
from asyncrl_jax.flags import config_from_flags, exit_with
from asyncrl_jax.lifetime import die_with_parent, stop_on_signals
from asyncrl_jax.local.environment import take_redis_password
from asyncrl_jax.transport.connection import RedisUnavailable, connect


@dataclasses.dataclass(frozen=True)
class Role:
    """A role's settings and surroundings."""

    name: str  # learner, actor or orchestrator
    config: Config
    run_dir: Path
    password: str | None  # of Redis
    stop: threading.Event  # set by SIGTERM or Ctrl-C: close cleanly


def start(name: str) -> Role:
    """Reads the flags and prepares the process of a role; a mistake, or no Redis, ends it with one line."""
    die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 prints what every thread is doing
    if not flags.FLAGS["verbosity"].present:
        absl_logging.set_verbosity(absl_logging.WARNING)  # Orbax tells every step of every save
    logging.getLogger("asyncrl_jax").setLevel(logging.INFO)
    config = config_from_flags()
    if not config.run_dir:
        exit_with("--config.run_dir: name the directory of the run, on this machine")
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        password = take_redis_password(config.redis)
        connect(config.redis, password).close()
    except (OSError, ValueError) as error:
        exit_with(str(error))
    except RedisUnavailable as error:
        exit_with(str(error), exit_codes.FAILED)  # it may be there at the next try
    return Role(name, config, run_dir, password, stop_on_signals())
