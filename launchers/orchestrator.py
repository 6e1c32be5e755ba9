"""asyncrl-orchestrator: issues tickets under the lag bound and requests evaluations. It needs no accelerator."""

from asyncrl_jax import flags

from . import role
from .playing import play


def main() -> int:
    """Runs the orchestrator until the run ends or SIGTERM asks it to close."""
    given = role.start("orchestrator")
    from asyncrl_jax.orchestrator.loop import run_orchestrator

    return play(given, lambda: run_orchestrator(given.config, given.run_dir, given.password, given.stop))


def run() -> None:
    """Console entry point."""
    flags.run(main)


if __name__ == "__main__":
    run()
