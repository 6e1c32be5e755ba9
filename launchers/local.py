"""asyncrl-local: a whole run on this machine: Redis, learner, actors and orchestrator as processes of their own."""

from pathlib import Path

from absl import flags as absl_flags

from asyncrl_jax import flags

_RESUME = absl_flags.DEFINE_string("resume", None, "Directory of a run to go on with, as runs/latest.")
_DRY_RUN = absl_flags.DEFINE_boolean("dry_run", False, "Check settings and surroundings, start nothing.")

_RESUMABLE = {"learner.num_updates"}  # the one setting that may change between the sessions of a run


def main() -> int:
    """Starts or resumes a run, shows it until it ends, and leaves its report in the run directory."""
    from asyncrl_jax.local import run as local_run

    config = flags.config_from_flags()
    if _RESUME.value is None:
        return local_run.new_run(config, dry_run=_DRY_RUN.value)
    changes = flags.changes()
    refused = sorted(changes.keys() - _RESUMABLE)
    if refused or absl_flags.FLAGS.preset or absl_flags.FLAGS.config_file:
        name = f"--config.{refused[0]}" if refused else "--preset and --config_file"
        flags.exit_with(f"{name}: a resumed run keeps its settings; only --config.learner.num_updates may change")
    return local_run.resume_run(Path(_RESUME.value), changes, dry_run=_DRY_RUN.value)


def run() -> None:
    """Console entry point."""
    flags.run(main)


if __name__ == "__main__":
    run()
