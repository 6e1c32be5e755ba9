"""Where new weights may come in: between two tokens, two turns or two episodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Literal

Part = Literal["turn", "episode"]


class SwapGate:
    """Holds back turns, or episodes, that want to start while a swap waits for those under way. One event loop's.

    Invariants:
      * With boundary `turn` no turn, and with `episode` no session, is sampled with two versions.
      * A paused engine swaps at once: nothing under way could end, and the bound on lag goes before the boundary.
    """

    def __init__(self, boundary: str) -> None:
        """Args: boundary: token, turn or episode."""
        self._boundary = boundary
        self._num_open: dict[str, int] = {"token": 0, "turn": 0, "episode": 0}
        self._swapping = False
        self._paused = False
        self._changed = asyncio.Event()

    async def enter(self, part: Part) -> None:
        """Waits until a turn or an episode may start, and counts it as begun."""
        await self._until(lambda: not (self._swapping and part == self._boundary))
        self._num_open[part] += 1

    def leave(self, part: Part) -> None:
        """Counts it as ended."""
        self._num_open[part] -= 1
        self._notify()

    def set_paused(self, paused: bool) -> None:
        self._paused = paused
        self._notify()

    @contextlib.asynccontextmanager
    async def swap(self) -> AsyncIterator[None]:
        """Waits for the boundary, then runs the block while nothing may start."""
        self._swapping = True
        try:
            await self._until(lambda: self._paused or self._num_open[self._boundary] == 0)
            yield
        finally:
            self._swapping = False
            self._notify()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
