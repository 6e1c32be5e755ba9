"""asyncrl-actor: samples trajectory groups with the newest weights. Start as many as there are machines for them."""

import functools
import socket

from absl import flags as absl_flags

from asyncrl_jax import flags
from asyncrl_jax.actor.watchdog import Watchdog
from asyncrl_jax.exit_codes import FAILED, Mistake, Unreachable
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.steering import Steering

from . import role
from .playing import play

_ACTOR_ID = absl_flags.DEFINE_string(
    "actor_id", socket.gethostname(), "Name of this actor, its own among all actors and the same after a restart."
)


def main() -> int:
    """Runs an actor until the run ends or SIGTERM asks it to close."""
    given = role.start("actor")
    from asyncrl_jax.actor.loop import run_actor  # imports the engine: only after the flags are known to be right

    settings = given.config
    steering = Steering(connect(settings.redis, given.password), Keys(settings.redis.namespace))
    try:
        with Watchdog(steering, _ACTOR_ID.value, settings.actor.heartbeat_s):
            run = functools.partial(run_actor, settings, given.run_dir, given.password, _ACTOR_ID.value, given.stop)
            return play(given, run)
    except Mistake as error:
        flags.exit_with(str(error))
    except Unreachable as error:
        flags.exit_with(str(error), FAILED)


def run() -> None:
    """Console entry point."""
    flags.run(main)


if __name__ == "__main__":
    run()
