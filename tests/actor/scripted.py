"""A policy that says given turns, for episodes without an engine."""

import asyncio

import numpy as np

from asyncrl_jax.actor.engines.base import Completion


class ScriptedPolicy:
    """Says the given token turns, one after the other; token t has log-prob −t and the version of its turn."""

    def __init__(self, *turns):
        self.turns, self.heard, self.num_open = [tuple(turn) for turn in turns], [], 0

    async def open(self, seed, temperature):
        self.num_open += 1
        return self

    async def generate(self, new_tokens, stop_tokens, max_tokens):
        await asyncio.sleep(0)
        self.heard.append(tuple(new_tokens))
        said = self.turns.pop(0)[:max_tokens]
        versions = np.full(len(said), len(self.heard), np.int32)
        finish = "stop" if said[-1] in stop_tokens else "length"
        return Completion(np.array(said, np.int32), -np.array(said, np.float32), versions, finish)

    def close(self):
        self.num_open -= 1
