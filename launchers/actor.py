"""asyncrl-actor: samples trajectory groups with the newest weights. Start as many as there are machines for them."""

import socket

from absl import flags as absl_flags

from asyncrl_jax import flags

from . import role

_ACTOR_ID = absl_flags.DEFINE_string(
    "actor_id", socket.gethostname(), "Name of this actor, its own among all actors and the same after a restart."
)


def main() -> int:
    """Runs an actor until the run ends or SIGTERM asks it to close."""
    given = role.start()
    from asyncrl_jax.actor.loop import run_actor  # imports the engine: only after the flags are known to be right

    return run_actor(given.config, given.run_dir, given.password, _ACTOR_ID.value, given.stop)


def run() -> None:
    """Console entry point."""
    flags.run(main)


if __name__ == "__main__":
    run()
