"""A task whose need for actors changes: the last digit of a number, shown after as many seconds as a file says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

DELAY_FILE = "VARYING_TASK_DELAY"  # variable that names it


def last_digit(seed: int, level: int) -> tuple[str, Callable[[str], float]]:
    """A question, and what scores its answer."""
    time.sleep(float(Path(os.environ[DELAY_FILE]).read_text()))
    wanted = "0123456789"[seed % 10]
    return str(seed % 10**10), lambda answer: float(answer[:1] == wanted)
