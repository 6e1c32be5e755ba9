"""An environment that does what its task's index says: most are well, some raise, lie, hang, block, die or leak."""

import asyncio
import os
import time

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
}
FINE = 100  # and above
NAP_S = 0.3
KEPT = []  # by all instances of a process


class Odd(Exception):
    """No built-in one."""


class _Episode:
    def __init__(self):
        self.kind, self.answer = "fine", ""

    async def reset(self, task):
        self.kind, self.answer = KINDS.get(task.index, "fine"), ""
        return [Message("user", f"{self.kind} {task.index}")]

    async def step(self, text):
        self.answer = text
        await getattr(self, f"_{self.kind}", asyncio.sleep)(0)
        return TextObservation((Message("user", str(os.getpid())),), done=True)

    async def score(self):
        final = {"lies": 2.0, "lies_nan": float("nan")}.get(self.kind, float(self.answer == "right"))
        success = "yes" if self.kind == "lies_of_its_success" else final == 1.0
        return TextScore(final, success=success)

    async def close(self):
        self.answer = ""

    async def _raises(self, _):
        raise ValueError("no such move")

    async def _raises_oddly(self, _):
        raise Odd("broken")

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
