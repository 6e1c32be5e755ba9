"""asyncrl-replay: trains again from the archive of a run, and compares the weights with those it published."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from absl import flags as absl_flags

from asyncrl_jax import flags
from asyncrl_jax.config_file import read_config
from asyncrl_jax.exit_codes import FAILED, FINISHED
from asyncrl_jax.local.environment import child_environment

_RUN = absl_flags.DEFINE_string("run", None, "Directory of the run, as runs/latest.", required=True)
_NUM_UPDATES = absl_flags.DEFINE_integer("num_updates", None, "Updates to make again; by default all of them.")


class _Progress:
    """A line every few seconds, on standard error: standard output has the result alone."""

    _EVERY_S = 5.0

    def __init__(self) -> None:
        self._told_at = time.monotonic()

    def __call__(self, done: int, last: int) -> None:
        if time.monotonic() - self._told_at >= self._EVERY_S:
            self._told_at = time.monotonic()
            print(f"asyncrl-replay: update {done} of {last}", file=sys.stderr)


def main() -> int:
    """Replays the run and prints one JSON line; exit code 1 if a published version differs."""
    run_dir = Path(_RUN.value).resolve()
    try:
        config = read_config(run_dir / "config.json")
        os.environ.update(child_environment(os.environ))  # platform and threads as the learner of a local run has them
        from asyncrl_jax.learner.replay import replay  # imports JAX: only after the flags are known to be right

        replayed = replay(config, run_dir, _NUM_UPDATES.value, _Progress())
    except (ValueError, FileNotFoundError) as error:
        flags.exit_with(str(error))
    print(json.dumps(dataclasses.asdict(replayed)))
    return FAILED if replayed.differing else FINISHED


def run() -> None:
    """Console entry point."""
    flags.run(main)


if __name__ == "__main__":
    run()
