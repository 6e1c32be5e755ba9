"""A line that comes again at every look is told once in a while: roles look many times a second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_SECONDS = 10.0
_MOST_LINES = 1000  # remembered; beyond that all are told anew


class Repeats(logging.Filter):
    """Lets the same line through once in `seconds`. Safe from many threads: at worst one is told twice."""

    def __init__(self, seconds: float = _SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._clock = clock
        self._told_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is told."""
        text, now = record.getMessage(), self._clock()
        if now - self._told_at.get(text, -self._seconds) < self._seconds:
            return False
        if len(self._told_at) >= _MOST_LINES:
            self._told_at.clear()
        self._told_at[text] = now
        return True
