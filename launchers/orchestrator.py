"""asyncrl-orchestrator: issues tickets under the lag bound and requests evaluations. It needs no accelerator."""

import redis

from asyncrl_jax import flags
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.wrong_types import explained

from . import role


def main() -> int:
    """Runs the orchestrator until the run ends or SIGTERM asks it to close."""
    given = role.start()
    from asyncrl_jax.orchestrator.loop import run_orchestrator

    try:
        return run_orchestrator(given.config, given.run_dir, given.password, given.stop)
    except redis.ResponseError as error:
        client = connect(given.config.redis, given.password)
        if why := explained(error, client, Keys(given.config.redis.namespace)):
            flags.exit_with(why)
        raise


def run() -> None:
    """Console entry point."""
    flags.run(main)


if __name__ == "__main__":
    run()
