"""Exit codes of every binary. 130 and 143 are what shells use for a process ended by SIGINT and SIGTERM."""

FINISHED = 0
FAILED = 1  # a part broke, or can't be kept running
USER_ERROR = 2  # a mistake in flags or surroundings: starting again would not help
INTERRUPTED = 130  # Ctrl-C; the run can be resumed
TERMINATED = 143  # SIGTERM, or one part was closed; the run can be resumed


class Mistake(ValueError):
    """A setting that can't be had where the process runs: it ends with `USER_ERROR`."""


class Unreachable(ValueError):
    """A server that a setting names is not there. It may be at the next start, so the process ends with `FAILED`."""
