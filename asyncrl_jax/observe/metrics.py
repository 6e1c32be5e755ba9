"""Time series of one role: JSON lines to compute with, and trackers to look at.

Imported by the roles, so it imports none of them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl_jax.config_data import ObserveConfig
from asyncrl_jax.observe.writers import open_writer


class Metrics:
    """Writer of `<run_dir>/metrics/<role>.jsonl`, and of the same numbers to the trackers in `observe.writers`.

    A process that starts again appends. Rows of steps that were undone by a kill stay; readers take the last row of a
    step (see `read_rows`).
    """

    def __init__(self, run_dir: Path, role: str, config: ObserveConfig | None = None):
        """Raises: ValueError: if the package of a tracker is not installed."""
        config = config or ObserveConfig()
        directory = run_dir / "metrics"
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{role}.jsonl"
        _end_torn_line(path)
        self._writers = [open_writer(name, run_dir, role, config.project) for name in config.writers]
        self._rows = path.open("a", buffering=1)  # by line: what is written survives a kill of this process

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one row; `time` (unix seconds) and `step` are added to it.

        Numbers go to the trackers under their key, mappings of numbers under `key/name`. Values that are not finite are
        written as null, since JSON has no name for them.
        """
        now = time.time()
        row = {"time": now, "step": step, **{key: _plain(value) for key, value in values.items()}}
        self._rows.write(json.dumps(row, allow_nan=False) + "\n")
        scalars = dict(_scalars(row))
        for writer in self._writers:
            writer.write(step, scalars, now)

    def close(self) -> None:
        """Flushes all."""
        self._rows.close()
        for writer in self._writers:
            writer.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file by rising step, the last one written for each step; none if there is no file.

    A last line that was cut off by a kill is left out.

    Raises:
      ValueError: for any other line that is not JSON.
    """
    if not path.exists():
        return []
    rows: dict[int, dict[str, Any]] = {}
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines, 1):
        if not line or line == _TORN:
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) or lines[number] == _TORN:
                continue
            raise ValueError(f"{path}:{number}: {error}") from error
        rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


_TORN = "#"  # a line of its own after one that a kill cut off


def _end_torn_line(path: Path) -> None:
    """Closes a line that a killed writer left unfinished, so that the next row is not glued to it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(f"\n{_TORN}\n".encode())


def _plain(value: Any) -> Any:
    """Python numbers for NumPy and JAX scalars; None for what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _scalars(row: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    scalars: list[tuple[str, float]] = []
    for key, value in row.items():
        if isinstance(value, Mapping):
            scalars += _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and prefix + key not in ("time", "step"):
            scalars.append((prefix + key, float(value)))
    return scalars
