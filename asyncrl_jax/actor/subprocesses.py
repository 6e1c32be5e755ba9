"""The end of a child process in an event loop."""

from __future__ import annotations

import asyncio
import contextlib

EXIT_LIMIT_S = 1.0  # for the kernel to end what was killed


async def reap(process: asyncio.subprocess.Process) -> None:
    """Closes the pipes of a process that was killed, and waits for it.

    In this order: asyncio's wait ends only once all pipes have, and one that nobody reads any more never does. There is
    no public way to close them. It asks for the exit code too, and whoever asks second is told 255: so the code comes
    first, unless it takes too long.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(EXIT_LIMIT_S):
            while process.returncode is None:
                await asyncio.sleep(0.002)
    process._transport.close()  # type: ignore[attr-defined]
    await process.wait()
    await asyncio.sleep(0)
