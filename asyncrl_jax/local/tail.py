"""The end of a log file."""

from __future__ import annotations

from pathlib import Path

_BLOCK_BYTES = 16_384


def last_lines(path: Path, count: int = 15) -> list[str]:
    """Last lines of a file, of its last 16 KiB at most; none if there is no file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _BLOCK_BYTES))
        return file.read().decode(errors="replace").splitlines()[-count:]
