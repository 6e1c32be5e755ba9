"""The end of a child process in an event loop."""

from __future__ import annotations

import asyncio


async def reap(process: asyncio.subprocess.Process) -> None:
    """Closes the pipes of a process that was killed, and waits for it.

    In this order: asyncio's wait ends only once all pipes have, and one that nobody reads any more never does. There is
    no public way to close them.
    """
    process._transport.close()  # type: ignore[attr-defined]
    await process.wait()
    await asyncio.sleep(0)
