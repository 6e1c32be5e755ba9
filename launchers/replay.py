"""asyncrl-replay: trains again from the archive of a run, and compares the weights with those it published."""

import dataclasses
import json
import os
from pathlib import Path

from absl import flags as absl_flags

from asyncrl_jax import flags
from asyncrl_jax.config_file import read_config
from asyncrl_jax.exit_codes import FAILED, FINISHED
from asyncrl_jax.local.environment import child_environment

_RUN = absl_flags.DEFINE_string("run", None, "Directory of the run, as runs/latest.", required=True)
_NUM_UPDATES = absl_flags.DEFINE_integer("num_updates", None, "Updates to make again; by default all of them.")


def main() -> int:
    """Replays the run and prints one JSON line; exit code 1 if a published version differs."""
    run_dir = Path(_RUN.value).resolve()
    try:
        config = read_config(run_dir / "config.json")
        os.environ.update(child_environment(os.environ))  # platform and threads as the learner of a local run has them
        from asyncrl_jax.learner.replay import replay  # imports JAX: only after the flags are known to be right

        replayed = replay(config, run_dir, _NUM_UPDATES.value)
    except (ValueError, FileNotFoundError) as error:
        flags.exit_with(str(error))
    print(json.dumps(dataclasses.asdict(replayed)))
    return FAILED if replayed.differing else FINISHED


def run() -> None:
    """Console entry point."""
    flags.run(main)


if __name__ == "__main__":
    run()
