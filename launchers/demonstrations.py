"""asyncrl-demonstrations: writes the demonstrations that the learner warm-starts from."""

from pathlib import Path

from absl import flags as absl_flags

from asyncrl_jax import flags
from asyncrl_jax.lifetime import die_with_parent

_OUTPUT = absl_flags.DEFINE_string("output", None, "Avro file to write.", required=True)


def main() -> int:
    """Writes the file."""
    die_with_parent()
    config = flags.config_from_flags()
    from asyncrl_jax.actor.demonstrations import write_demonstrations

    try:
        write_demonstrations(config, Path(_OUTPUT.value))
    except ValueError as error:
        flags.exit_with(str(error))
    return 0


def run() -> None:
    """Console entry point."""
    flags.run(main)


if __name__ == "__main__":
    run()
