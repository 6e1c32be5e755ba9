"""From publishing a version to the first token sampled with it, as a ratio to raw write + fsync + read of the bytes.

    python -m benchmarks.weights [--megabytes 500] [--repeats 9]

The clock starts when the learner's host weights are handed to the writer. It stops when another process, which imports
no JAX, has followed the announcement, read and verified every leaf into memory it keeps, copied the leaves that a step
needs into its model, and sampled a token with them: the argmax of a linear head over the mean of some rows of an
embedding, both leaves of the version; the token is checked against what the new weights must give. Raw is one file of
the same bytes, written, synced, and read into memory that was used before. Both keep the page cache. They take turns,
and medians are compared, since a machine's clock and disk are noisy. The first versions only warm up: a version is a
new directory, and until old ones are deleted the system gives it memory that nothing has touched yet (`first_ratio`).

`orbax_default_ratio` is Orbax as it comes, restored by Orbax. `delta_*` compare a delta with the whole version at bf16
after one step of 1e-6: its bytes, the seconds to publish and read it, and whether what arrives is equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from asyncrl_jax.types import WeightVersion
from asyncrl_jax.weights.manifest import Canary
from asyncrl_jax.weights.read import WeightsReader

NUM_LEAVES = 48
WIDTH = 1024
WARM_UPS = 3
EMBEDDING, HEAD = "leaf_00", "leaf_01"
LEARNING_RATE = 1e-6
CANARY = Canary(np.zeros((1, 2), np.int32), np.zeros((1, 1), np.float32))


def sample(embedding_VD: np.ndarray, head_VD: np.ndarray) -> int:
    """One greedy token after a prompt of four."""
    hidden_D = embedding_VD[[3, 1, 4, 1]].astype(np.float32).mean(axis=0)
    return int(np.argmax(head_VD.astype(np.float32) @ hidden_D))


def serve(directory: str, pipe: Connection) -> None:
    """An engine's process: for each announced version, the token that it samples first, and its bytes' checksum."""
    reader = WeightsReader(directory)
    while (request := pipe.recv()) is not None:
        version, with_checksum = request
        started = time.perf_counter()
        _, arrays = reader.read(version)
        model = {name: arrays[name].copy() for name in (EMBEDDING, HEAD)}
        token = sample(model[EMBEDDING], model[HEAD])
        spent = time.perf_counter() - started
        checksum = checksum_of(arrays) if with_checksum else 0
        pipe.send((token, spent, checksum))


def checksum_of(arrays: dict[str, np.ndarray]) -> int:
    """Of all bytes, in the order of names; not the checksum that manifests use."""
    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(arrays[name].reshape(-1).view(np.uint8).data, total)
    return total


class Raw:
    """The same bytes in one file per leaf."""

    def __init__(self, directory: Path, arrays: dict[str, np.ndarray]) -> None:
        self._directory = directory
        self._buffers = {name: np.empty_like(array) for name, array in arrays.items()}

    def seconds(self, arrays: dict[str, np.ndarray]) -> float:
        """Of writing, syncing and reading back."""
        started = time.perf_counter()
        for name, array in arrays.items():
            with open(self._directory / name, "wb") as file:
                file.write(array.reshape(-1).view(np.uint8).data)
                file.flush()
                os.fsync(file.fileno())
        for name, buffer in self._buffers.items():
            with open(self._directory / name, "rb", buffering=0) as file:
                view, at = memoryview(buffer.reshape(-1).view(np.uint8)), 0
                while at < len(view):
                    at += file.readinto(view[at:]) or 0
        return time.perf_counter() - started


def orbax_default(directory: Path, arrays: dict[str, np.ndarray]) -> float:
    """Seconds of Orbax as it comes: save, then restore."""
    import orbax.checkpoint as ocp

    path = directory / "default"
    started = time.perf_counter()
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, arrays, force=True)
        checkpointer.restore(path)
    return time.perf_counter() - started


def step(masters: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """One update of float32 masters in place, Adam's in size; returns them rounded to bf16."""
    for master in masters.values():
        np.add(master, np.float32(LEARNING_RATE) * np.sign(rng.standard_normal(master.shape, np.float32)), out=master)
    return {name: master.astype(ml_dtypes.bfloat16) for name, master in masters.items()}


class Bench:
    """A writer here, an engine's process there, and the raw bytes beside them."""

    def __init__(self, directory: Path, arrays: dict[str, np.ndarray], *, deltas: bool) -> None:
        from asyncrl_jax.weights.publish import VersionWriter

        (directory / "raw").mkdir(parents=True)
        self.directory = directory / "weights"
        self.raw = Raw(directory / "raw", arrays)
        self._writer = VersionWriter(self.directory, deltas=deltas)
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=serve, args=(str(self.directory), there), daemon=True)
        self._process.start()

    def round_trip(self, arrays: dict[str, np.ndarray], number: int, exact: bool = False) -> dict[str, Any]:
        """Seconds from publishing to the first token, of publishing, and of reading and sampling."""
        started = time.perf_counter()
        version: WeightVersion = self._writer.publish(
            arrays, number=number, parent=None, line=0, update=number, canary=CANARY
        )
        published = time.perf_counter()
        self._pipe.send((version, exact))
        token, read_s, checksum = self._pipe.recv()
        done = time.perf_counter()
        assert token == sample(arrays[EMBEDDING], arrays[HEAD]), "the token is not of the new weights"
        return {
            "total_s": done - started if not exact else published - started + read_s,
            "publish_s": published - started,
            "read_s": read_s,
            "exact": exact and checksum == checksum_of(arrays),
        }

    def close(self) -> None:
        """Ends the engine's process."""
        self._pipe.send(None)
        self._process.join()


def median(values: list[float]) -> float:
    """Rounded for print."""
    return round(statistics.median(values), 4)


def whole_versions(directory: Path, masters: dict[str, np.ndarray], repeats: int) -> dict[str, Any]:
    """Whole versions against the raw bytes and Orbax's default."""
    from asyncrl_jax.weights.publish import retain

    rng = np.random.default_rng(1)
    bench = Bench(directory, step(masters, rng), deltas=False)
    trips, raw_s, default_s = [], [], []
    for number in range(WARM_UPS + repeats):
        arrays = step(masters, rng)
        trips.append(bench.round_trip(arrays, number))
        raw_s.append(bench.raw.seconds(arrays))
        if number < 2:
            default_s.append(orbax_default(directory, arrays))
        retain(bench.directory, 1, set())
    bench.close()
    measured = trips[WARM_UPS:]
    total, raw = median([trip["total_s"] for trip in measured]), median(raw_s[WARM_UPS:])
    return {
        "ratio_to_raw": round(total / raw, 2),
        "first_ratio": round(trips[0]["total_s"] / raw_s[0], 2),
        "orbax_default_ratio": round(default_s[-1] / raw, 2),
        "raw_s": raw,
        "publish_s": median([trip["publish_s"] for trip in measured]),
        "read_and_sample_s": median([trip["read_s"] for trip in measured]),
    }


def delta_versions(directory: Path, masters: dict[str, np.ndarray]) -> dict[str, Any]:
    """One whole version, then deltas on it."""
    rng = np.random.default_rng(2)
    arrays = step(masters, rng)
    bench = Bench(directory, arrays, deltas=True)
    whole = bench.round_trip(arrays, 1, exact=True)
    trips = [whole]
    for number in (2, 3):
        arrays = step(masters, rng)
        trips.append(bench.round_trip(arrays, number, exact=True))
    bench.close()
    sizes = [
        sum(path.stat().st_size for path in (bench.directory / f"v{number:06d}").rglob("*") if path.is_file())
        for number in (1, 2, 3)
    ]
    return {
        "delta_bytes_ratio": round(sizes[0] / sizes[1], 1),
        "second_delta_bytes_ratio": round(sizes[0] / sizes[2], 1),
        "delta_exact": all(trip["exact"] for trip in trips),
        "delta_publish_s": round(trips[1]["publish_s"], 4),
        "delta_read_s": round(trips[1]["read_s"], 4),
    }


def main(options: argparse.Namespace) -> None:
    """Prints seconds and ratios."""
    rows = max(8, int(options.megabytes * 2**20 / 2 / NUM_LEAVES / WIDTH))
    rng = np.random.default_rng(0)
    masters = {
        f"leaf_{i:02d}": rng.standard_normal((rows, WIDTH), np.float32) * np.float32(0.02) for i in range(NUM_LEAVES)
    }
    result: dict[str, Any] = {"megabytes": options.megabytes, "leaves": NUM_LEAVES, "dtype": "bfloat16"}
    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        result |= whole_versions(Path(temporary) / "whole", masters, options.repeats)
        result |= delta_versions(Path(temporary) / "delta", masters)
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=500.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--directory", default=None, help="where to write; default: the system's temporary directory")
    main(parser.parse_args())
