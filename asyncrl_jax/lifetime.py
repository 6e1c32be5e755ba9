"""A child's side of being a process: it ends with the process that started it, and closes cleanly when asked to."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType

PARENT_VARIABLE = "ASYNCRL_PARENT_PID"  # set for children: they end when this process does

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def die_with_parent() -> None:
    """Makes this process end with the one named in `PARENT_VARIABLE`, however that one ends; without it, does nothing.

    Set by the child rather than between fork and exec, where Python must not run code if other threads exist.
    """
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))
    if not parent:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent watch", daemon=True).start()
    if os.getppid() != parent:  # it ended before the line above took effect
        os.kill(os.getpid(), signal.SIGKILL)


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and Ctrl-C set; a second one ends the process at once."""
    stop = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return stop


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
