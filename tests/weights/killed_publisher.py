"""Publishes v1 again and again, killed with SIGKILL before each thing it does to the file system.

    python killed_publisher.py <base>

Leaves <base>/<n>/ as the writer killed before its n-th event left it; the last one was not killed. Imports once and
forks for each, since importing takes longer than publishing.
"""

import os
import pathlib
import shutil
import signal
import sys

import numpy as np

from asyncrl_jax.weights.manifest import Canary
from asyncrl_jax.weights.publish import publish

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def params(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    return {f"layers.{i}.weight": rng.normal(size=(16, 8)).astype(np.float32) for i in range(4)}


def canary() -> Canary:
    return Canary(np.arange(8, dtype=np.int32).reshape(2, 4), np.full((2, 3), -1.5, np.float32))


def write(directory: pathlib.Path, number: int) -> None:
    parent = number - 1 if number else None
    publish(directory, params(number), number=number, parent=parent, line=0, update=number, canary=canary())


def kill_before_event(directory: pathlib.Path, count: int) -> None:
    seen = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal seen
        if event in EVENTS and str(directory) in str(args[0]):
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(hook)


def main(base: pathlib.Path) -> None:
    for count in range(200):
        directory = base / str(count)
        if count:
            shutil.copytree(base / "0", directory, ignore=shutil.ignore_patterns("v000001*"))
        child = os.fork()
        if child == 0:
            if count == 0:
                write(directory, 0)
            kill_before_event(directory, count)
            write(directory, 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))
    sys.exit("never finished unkilled")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve())
