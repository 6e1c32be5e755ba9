"""asyncrl-learner: takes trajectory groups from the queue, trains on them, and publishes weight versions."""

from pathlib import Path

from asyncrl_jax import flags
from asyncrl_jax.config_file import write_config

from . import role
from .playing import play


def main() -> int:
    """Runs the learner until the run ends or SIGTERM asks it to close."""
    given = role.start("learner")
    settings, checkpoints = given.config.warm_start, given.run_dir / "checkpoints"
    demonstrations = Path(settings.demonstrations or given.run_dir / "demonstrations.avro")
    if settings.num_steps and not checkpoints.is_dir() and not demonstrations.is_file():
        flags.exit_with(
            f"--config.warm_start.demonstrations={demonstrations}: no such file; asyncrl-demonstrations writes one"
        )
    if given.config.distributed.process_id == 0 and not (given.run_dir / "config.json").exists():
        write_config(given.run_dir / "config.json", given.config)  # the audit and a resume read it
    from asyncrl_jax.learner.loop import run_learner  # imports JAX: only after the flags are known to be right

    return play(given, lambda: run_learner(given.config, given.run_dir, given.password, given.stop))


def run() -> None:
    """Console entry point."""
    flags.run(main)


if __name__ == "__main__":
    run()
