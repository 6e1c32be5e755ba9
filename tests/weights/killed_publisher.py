"""Publishes v1 again and again, killed with SIGKILL before each thing it does to the file system.

    python killed_publisher.py <base> [delta]

Leaves <base>/<n>/ as the writer killed before its n-th event left it; the last one was not killed. With "delta", v1 is
a delta on v0. Imports once and forks for each, since importing takes longer than publishing.
"""

import os
import pathlib
import shutil
import signal
import sys

import numpy as np

from asyncrl_jax.weights.manifest import Canary
from asyncrl_jax.weights.publish import VersionWriter

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def params(number: int, *, near: bool) -> dict[str, np.ndarray]:
    """Of v0 or v1; those of v1 differ everywhere, or `near` those of v0 in one element."""
    rng = np.random.default_rng(0 if near else number)
    made = {f"layers.{i}.weight": rng.normal(size=(16, 8)).astype(np.float32) for i in range(4)}
    if near:
        made["layers.0.weight"][0, 0] += number
    return made


def canary() -> Canary:
    return Canary(np.arange(8, dtype=np.int32).reshape(2, 4), np.full((2, 3), -1.5, np.float32))


def write(writer: VersionWriter, number: int, near: bool) -> None:
    parent = number - 1 if number else None
    writer.publish(params(number, near=near), number=number, parent=parent, line=0, update=number, canary=canary())


def kill_before_event(directory: pathlib.Path, count: int) -> None:
    seen = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal seen
        if event in EVENTS and str(directory) in str(args[0]):
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(hook)


def main(base: pathlib.Path, deltas: bool) -> None:
    for count in range(200):
        directory = base / str(count)
        if count and not deltas:
            shutil.copytree(base / "0", directory, ignore=shutil.ignore_patterns("v000001*"))
        child = os.fork()
        if child == 0:
            writer = VersionWriter(directory, deltas=deltas)
            if count == 0 or deltas:  # a writer makes deltas only on what it wrote itself
                write(writer, 0, near=deltas)
            kill_before_event(directory, count)
            write(writer, 1, near=deltas)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))
    sys.exit("never finished unkilled")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:] == ["delta"])
