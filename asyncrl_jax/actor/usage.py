"""What a process takes of its machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Of one process; processes are its children and theirs, itself left out."""

    rss_bytes: int
    open_files: int
    processes: int


def usage_of(pid: int) -> Usage | None:
    """Usage of a process of this user; None if it is gone, or where there is no /proc."""
    root = Path("/proc") / str(pid)
    try:
        rss = int((root / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Usage(rss, len(os.listdir(root / "fd")), _descendants(root))
    except (OSError, ValueError, IndexError):
        return None


def _descendants(root: Path) -> int:
    count = 0
    for task in (root / "task").iterdir():
        with contextlib.suppress(OSError):  # a thread may have ended
            children = (task / "children").read_text().split()
            count += len(children)
            for child in children:
                with contextlib.suppress(OSError):
                    count += _descendants(root.parent / child)
    return count
