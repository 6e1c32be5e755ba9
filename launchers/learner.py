"""asyncrl-learner: takes trajectory groups from the queue, trains on them, and publishes weight versions."""

from asyncrl_jax import flags

from . import role


def main() -> int:
    """Runs the learner until the run ends or SIGTERM asks it to close."""
    given = role.start()
    from asyncrl_jax.learner.loop import run_learner  # imports JAX: only after the flags are known to be right

    return run_learner(given.config, given.run_dir, given.password, given.stop)


def run() -> None:
    """Console entry point."""
    flags.run(main)


if __name__ == "__main__":
    run()
