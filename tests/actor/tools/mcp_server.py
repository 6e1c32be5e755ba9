"""A real MCP server over stdin and stdout."""

import asyncio
import os

from mcp.server.mcpserver import MCPServer

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> str:
    """The sum of two whole numbers."""
    return str(a + b)


@server.tool()
def environment() -> str:
    """All that the server knows of its surroundings."""
    return repr(dict(os.environ))


@server.tool()
def fail(text: str) -> str:
    """Fails."""
    raise ValueError(text)


@server.tool()
async def sleep() -> str:
    """Never returns."""
    await asyncio.sleep(3600)
    return ""


@server.tool()
def die() -> str:
    """Takes the server with it."""
    os._exit(1)


if __name__ == "__main__":
    server.run()
