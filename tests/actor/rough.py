"""An environment that does what its task's index says: most are well, some raise, lie, hang, block, die or leak."""

import asyncio
import contextlib
import os
import stat
import sys
import time

import numpy as np

from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.envs.text import TextObservation, TextScore

KINDS = {
    1: "raises",
    2: "raises_oddly",
    3: "lies",
    4: "lies_nan",
    5: "dies",
    6: "segfaults",
    7: "blocks",
    8: "hangs",
    9: "leaks",
    10: "waits",
    11: "naps",
    12: "lies_of_its_success",
    13: "garbles",
    14: "exits",
    15: "gives_up",
    16: "floods",
    17: "raises_the_unspeakable",
    18: "counts_in_numpy",
    19: "hangs_in_a_thread",
}
FINE = 100  # and above
NAP_S = 0.3
KEPT = []  # by all instances of a process


class Odd(Exception):
    """No built-in one."""


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class _Episode:
    def __init__(self):
        self.kind, self.answer = "fine", ""

    async def reset(self, task):
        self.kind, self.answer = KINDS.get(task.index, "fine"), ""
        return [Message("user", f"{self.kind} {task.index}")]

    async def step(self, text):
        self.answer = text
        await getattr(self, f"_{self.kind}", asyncio.sleep)(0)
        said = "x" * 2**25 if self.kind == "floods" else str(os.getpid())
        return TextObservation((Message("user", said),), done=True)

    async def score(self):
        if self.kind == "counts_in_numpy":
            return TextScore(np.float32(1.0), success=np.bool_(True))
        final = {"lies": 2.0, "lies_nan": float("nan")}.get(self.kind, float(self.answer == "right"))
        success = "yes" if self.kind == "lies_of_its_success" else final == 1.0
        return TextScore(final, success=success)

    async def close(self):
        self.answer = ""

    async def _raises(self, _):
        raise ValueError("no such move")

    async def _raises_oddly(self, _):
        raise Odd("broken")

    async def _raises_the_unspeakable(self, _):
        raise Unspeakable

    async def _exits(self, _):
        sys.exit("I have had enough")

    async def _gives_up(self, _):
        raise asyncio.CancelledError

    async def _garbles(self, _):
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if descriptor > 2 and stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                    os.write(descriptor, self.answer.encode() + b"\n")
        await asyncio.sleep(3600)

    async def _hangs_in_a_thread(self, _):
        await asyncio.to_thread(time.sleep, 3600)

    async def _dies(self, _):
        os._exit(7)

    async def _segfaults(self, _):
        import ctypes

        ctypes.string_at(0)

    async def _blocks(self, _):
        time.sleep(3600)

    async def _hangs(self, _):
        await asyncio.sleep(3600)

    async def _waits(self, _):
        await asyncio.sleep(2.0)

    async def _naps(self, _):
        time.sleep(NAP_S)

    async def _leaks(self, _):
        KEPT.append(bytearray(os.urandom(1) * 2**26))


class Rough:
    name, num_levels, identity, limits_own_score, tools = "text:rough:ROUGH", 1, "rough-1", False, {}

    def __call__(self):
        return _Episode()


ROUGH = Rough()
