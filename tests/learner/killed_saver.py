"""Saves checkpoints in a loop until it is killed, ten times over.

    python killed_saver.py <base> <seed>

Each of <base>/<n>/ holds the checkpoints of one killed process, and `durable`, the steps that it was told were durable.
Imports once and forks for each, since importing takes longer than saving.
"""

import os
import pathlib
import random
import signal
import sys
import time

import numpy as np

from asyncrl_jax.learner.checkpoint import Checkpoints


def tree(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {f"layer{i}": rng.normal(size=(64, 64)).astype(np.float32) for i in range(8)}


def save_forever(directory: pathlib.Path) -> None:
    checkpoints = Checkpoints(directory / "checkpoints", keep=1)
    told = os.open(directory / "durable", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(1, 10_000):
        checkpoints.save(step, tree(step), {"step": step})
        checkpoints.wait()
        os.write(told, f"{checkpoints.durable()}\n".encode())


def main(base: pathlib.Path, seed: int) -> None:
    moments = random.Random(seed)
    for count in range(10):
        directory = base / str(count)
        directory.mkdir()
        child = os.fork()
        if child == 0:
            save_forever(directory)
        limit = time.monotonic() + 60
        while not (directory / "durable").exists() or (directory / "durable").stat().st_size < 4:
            if time.monotonic() > limit:
                sys.exit("no checkpoint became durable")
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), status


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve(), int(sys.argv[2]))
