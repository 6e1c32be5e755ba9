"""Keeps something that runs out, such as a lease, alive while a block of code runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


@contextlib.asynccontextmanager
async def renewed(renew: Callable[[], object], period_s: float) -> AsyncIterator[None]:
    """Calls `renew`, which may block, on a thread: once before the block and then every `period_s` until it ends.

    Raises:
      Exception: whatever `renew` raised, at the end of the block at the latest.
    """

    async def keep() -> None:
        while True:
            await asyncio.sleep(period_s)
            await asyncio.to_thread(renew)

    await asyncio.to_thread(renew)
    keeping = asyncio.create_task(keep(), name="renewal")
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})
        if not keeping.cancelled():
            keeping.result()
