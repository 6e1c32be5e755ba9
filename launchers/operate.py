"""asyncrl: looks into a run and steers it while it runs. `asyncrl --help` names the commands."""

import sys
from pathlib import Path

from absl import app
from absl import flags as absl_flags

from asyncrl_jax.config_file import read_config
from asyncrl_jax.flags import exit_with
from asyncrl_jax.local.environment import redis_password
from asyncrl_jax.orchestrator import console
from asyncrl_jax.transport.connection import RedisUnavailable, connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.steering import Steering

_RUN_DIR = absl_flags.DEFINE_string("run_dir", "runs/latest", "Directory of the run, with its config.json.")


def main(argv: list[str]) -> int:
    """Carries out one command."""
    try:
        config = read_config(Path(_RUN_DIR.value) / "config.json")
        client = connect(config.redis, redis_password(config.redis))
        keys = Keys(config.redis.namespace)
        parts = Control(client, keys), Ledger(client, keys), Steering(client, keys)
        print(console.run_command(argv[1:], config, *parts))
    except (ValueError, OSError, RedisUnavailable) as error:
        exit_with(str(error))
    return 0


def run() -> None:
    """Console entry point."""
    sys.modules["__main__"].__doc__ = f"{__doc__}\n{console.__doc__}"
    app.run(main)


if __name__ == "__main__":
    run()
