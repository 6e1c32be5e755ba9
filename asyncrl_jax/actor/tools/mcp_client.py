"""Tools of MCP servers, which are started as children that speak over stdin and stdout, or reached by URL.

Needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl_jax.actor.tools.base import Tool, ToolBroken, ToolFailed
from asyncrl_jax.exit_codes import Unreachable

log = logging.getLogger(__name__)

CONNECT_LIMIT_S = 30.0


class McpServer:
    """One connection for all episodes of an actor, made when the first call needs it and again after the server died.

    Invariants:
      * Neither the actor's environment nor its secrets reach a server that is started here.
      * A server that is gone fails the calls under way as ToolBroken; the next call starts it again.
    """

    def __init__(self, address: str, timeout_s: float = 10.0) -> None:
        """Args: address: a URL, or a command line; timeout_s: of one call, connecting left out."""
        self.address = address
        self._timeout_s = timeout_s
        self._connecting = asyncio.Lock()
        self._there: asyncio.Future[Any] | None = None  # the client, of the connection that is held
        self._holding: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()

    def list_tools(self) -> list[McpTool]:
        """What the server offers, from a connection of its own. Not inside an event loop.

        Raises:
          Unreachable: if it can't be reached.
        """
        try:
            return asyncio.run(self._list())
        except Exception as error:
            raise Unreachable(f"--config.tools.mcp={self.address}: {_reason(error)}") from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a tool's answer.

        Raises:
          ToolFailed: if the tool says that it failed, or says nothing in time.
          ToolBroken: if the server can't be reached or dies.
        """
        from anyio import BrokenResourceError, ClosedResourceError, EndOfStream
        from mcp import MCPError

        client, holding = await self._connected()
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError:
            raise ToolFailed(f"no answer within {self._timeout_s:g} s", "timeout") from None
        except MCPError as error:
            if not holding.done() and "closed" not in str(error).lower():
                raise ToolFailed(str(error)) from None
            await self._disconnect(holding)
            raise ToolBroken(f"MCP server {self.address}: {error}") from error
        except Exception as error:  # an answer that is none, or a connection that ended while it was used
            if isinstance(error, (OSError, ClosedResourceError, BrokenResourceError, EndOfStream)):
                await self._disconnect(holding)
            raise ToolBroken(f"MCP server {self.address}: {_reason(error)[:500]}") from error
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise ToolFailed(text)
        return text

    async def close(self) -> None:
        """Ends the connection, and the server where it was started here."""
        async with self._connecting:
            if self._holding is not None:
                await self._disconnect(self._holding)

    async def _connected(self) -> tuple[Any, asyncio.Task[None]]:
        """The client, and what holds its connection. Whoever stops waiting leaves the connection to the others."""
        async with self._connecting:
            if self._holding is None or self._there is None or self._holding.done():
                self._leave, self._there = asyncio.Event(), asyncio.get_running_loop().create_future()
                self._there.add_done_callback(lambda there: there.exception())  # heard, also if nobody waits any more
                holding = self._hold(self._there, self._leave)
                self._holding = asyncio.create_task(holding, name=f"MCP {self.address}")
            there, held = self._there, self._holding
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                return await asyncio.shield(there), held
        except Exception as error:
            await self._disconnect(held)
            raise ToolBroken(f"MCP server {self.address}: {_reason(error)}") from error

    async def _hold(self, there: asyncio.Future[Any], leave: asyncio.Event) -> None:
        """A connection from start to end; both must be of one task."""
        try:
            async with _client(self.address) as client:
                there.set_result(client)
                await leave.wait()
        except Exception as error:  # noqa: BLE001, whoever waits is told
            if there.done():
                log.warning("MCP server %s is gone: %s", self.address, _reason(error))
            else:
                there.set_exception(error)
        finally:
            if not there.done():
                there.set_exception(ConnectionError("it was closed before it was there"))

    async def _disconnect(self, holding: asyncio.Task[None]) -> None:
        """Ends this connection, if it is still the one that is held: another may have come since."""
        if self._holding is not holding:
            return
        self._holding = None
        self._leave.set()
        _, late = await asyncio.wait({holding}, timeout=CONNECT_LIMIT_S)
        for task in late:
            task.cancel()

    async def _list(self) -> list[McpTool]:
        async with asyncio.timeout(CONNECT_LIMIT_S), _client(self.address) as client:
            listed = await client.list_tools()
        return [McpTool(self, tool.name, tool.description or "", tool.input_schema) for tool in listed.tools]


class McpTool:
    """See `Tool`."""

    limits_itself = True

    def __init__(self, server: McpServer, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self.name = name
        self.description = description
        self.parameters = parameters
        self._server = server

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return await self._server.call(self.name, arguments)


def mcp_tools(servers: Sequence[McpServer]) -> dict[str, Tool]:
    """The tools of all servers, by name.

    Raises:
      Unreachable: if a server can't be reached.
      ValueError: if two offer tools of one name.
    """
    tools: dict[str, Tool] = {}
    for server in servers:
        for tool in server.list_tools():
            if tool.name in tools:
                raise ValueError(f"--config.tools.mcp={server.address}: another server offers {tool.name!r} too")
            tools[tool.name] = tool
    return tools


@contextlib.asynccontextmanager
async def _client(address: str) -> Any:
    from mcp import Client, StdioServerParameters

    server: Any = address
    if not address.startswith(("http://", "https://")):
        command, *arguments = shlex.split(address)
        server = StdioServerParameters(command=command, args=arguments)
    async with Client(server) as client:
        yield client


def _reason(error: BaseException) -> str:
    """The first cause in a group of errors, which is what anyio raises."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return repr(error)
