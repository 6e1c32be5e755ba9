"""asyncrl: looks into a run and steers it while it runs. `asyncrl --help` names the commands."""

import dataclasses
import sys
from pathlib import Path

import redis
from absl import flags as absl_flags

from asyncrl_jax.config_file import read_config
from asyncrl_jax.flags import exit_with, run_words
from asyncrl_jax.local.environment import redis_password
from asyncrl_jax.orchestrator import console
from asyncrl_jax.transport.connection import RedisUnavailable, connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.shared_settings import SharedSettings
from asyncrl_jax.transport.steering import Steering
from asyncrl_jax.transport.wrong_types import explained

_PATIENCE_S = 3.0  # somebody waits at a terminal
_RUN_DIR = absl_flags.DEFINE_string("run_dir", "runs/latest", "Directory of the run, with its config.json.")


def main(argv: list[str]) -> int:
    """Carries out one command."""
    run_dir = Path(_RUN_DIR.value)
    try:
        config = read_config(run_dir / "config.json")
        console.check_command(argv[1:], config)
        client = connect(dataclasses.replace(config.redis, outage_s=_PATIENCE_S), redis_password(config.redis))
        keys = Keys(config.redis.namespace)
        parts = Control(client, keys), Ledger(client, keys), Steering(client, keys), SharedSettings(client, keys)
        try:
            print(console.run_command(argv[1:], config, *parts))
        except redis.ResponseError as error:
            exit_with(explained(error, client, keys) or f"Redis refuses: {error}")
    except RedisUnavailable as error:
        own = f"; a run that has ended is gone on with by asyncrl-local --resume={run_dir}"
        exit_with(f"{str(error).rstrip('.')}{own if (run_dir / 'redis').is_dir() else ''}")
    except (ValueError, OSError) as error:
        exit_with(str(error))
    return 0


def run() -> None:
    """Console entry point."""
    sys.modules["__main__"].__doc__ = f"{__doc__}\n{console.__doc__}"
    run_words(main)


if __name__ == "__main__":
    run()
