"""Publishing a version and reading it verified, as a ratio to a raw write + fsync + read of the same bytes.

    python -m benchmarks.weights [MEGABYTES]

Repeats interleave the two, and the medians are compared: one run's ratio, since a machine's clock and disk are noisy.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from asyncrl_jax.weights.manifest import Canary
from asyncrl_jax.weights.publish import publish, retain
from asyncrl_jax.weights.read import read

LEAVES = 24
REPEATS = 7


def raw(directory: Path, arrays: dict[str, np.ndarray]) -> float:
    """Seconds for one file per array, each synced, and reading them back."""
    started = time.perf_counter()
    for name, array in arrays.items():
        with open(directory / name, "wb") as file:
            file.write(array.data)
            file.flush()
            os.fsync(file.fileno())
    for name, array in arrays.items():
        np.fromfile(directory / name, array.dtype)
    return time.perf_counter() - started


def main(megabytes: float) -> None:
    """Prints seconds and the ratio."""
    rng = np.random.default_rng(0)
    size = int(megabytes * 2**20 / 4 / LEAVES)
    arrays = {f"leaf_{i:02d}": rng.standard_normal(size, dtype=np.float32) for i in range(LEAVES)}
    canary = Canary(np.zeros((1, 2), np.int32), np.zeros((1, 1), np.float32))
    publish_s, read_s, raw_s = [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        (directory / "raw").mkdir()
        for number in range(REPEATS + 1):  # the first warms up
            started = time.perf_counter()
            version = publish(
                directory / "weights", arrays, number=number, parent=None, line=0, update=number, canary=canary
            )
            published = time.perf_counter()
            read(directory / "weights", version)
            publish_s.append(published - started)
            read_s.append(time.perf_counter() - published)
            raw_s.append(raw(directory / "raw", arrays))
            retain(directory / "weights", 1, set())
    medians = [statistics.median(times[1:]) for times in (publish_s, read_s, raw_s)]
    ratio = (medians[0] + medians[1]) / medians[2]
    names = ("publish_s", "read_s", "raw_s")
    values = dict(zip(names, (round(m, 4) for m in medians), strict=True))
    print(json.dumps({"megabytes": megabytes, **values, "ratio_to_raw": round(ratio, 2)}))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
